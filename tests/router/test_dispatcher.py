"""Requests wait in bounded queues, leave with their client, and fail early without hope."""

import asyncio
from collections import Counter

import pytest
from msgspec.structs import replace

from inlay.base.errors import (
    DeadlineExceededError,
    NotFoundError,
    OverloadedError,
    RateLimitedError,
)
from inlay.messages.card import Adapter
from inlay.messages.request import Request
from inlay.router import Router
from inlay.router.resume import ResumingStream
from inlay.router.settings import RouterSettings
from inlay.transport.api import Stream
from tests.router.scripted_plane import SMALL, Answering, ScriptedPlane, quiet, request
from tests.router.sending import First

Task = asyncio.Task[list[ResumingStream]]


class House:
    """A router, its workers, and a clock."""

    def __init__(self, *workers: Answering, **settings: float) -> None:
        self.now = 0.0
        self.plane = ScriptedPlane(*workers)
        self.running: dict[str, ResumingStream] = {}
        given = RouterSettings.model_validate({"router_worker_backlog": 0, **settings})
        self.router = Router(self.plane, given, random=First(), clock=lambda: self.now)

    @property
    def sent(self) -> list[str]:
        """Ids of what all workers were sent, one worker after the other."""
        return [one.request.id for worker in self.plane.there for one in worker.answers]

    async def ask(self, *ids: str, **how: object) -> Task:
        """Ask for a placing, and let what happens at once happen."""
        requests = [replace(request(id_), **how) for id_ in ids]
        task = asyncio.create_task(self.router.send("m", requests))
        await quiet()
        return task

    async def end(self, number: int = 0) -> None:
        """Have a worker end the first request that it runs, which frees a place."""
        worker = self.plane.there[number]
        self.running[worker.live[0].request.id].cancel()
        await quiet()

    async def full(self, client: str = "c") -> None:
        """Fill all workers."""
        for number in range(len(self.plane.there)):
            (stream,) = await (await self.ask(f"full-{number}", client=client))
            self.running[f"full-{number}"] = stream


async def ended(*tasks: Task) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_who_waits_is_placed_when_there_is_room_in_the_order_of_priority_and_turns() -> None:
    worker = Answering("w")
    house = House(worker)
    await house.full()
    tasks = [await house.ask(name, client="a") for name in ("a1", "a2")]
    tasks += [await house.ask("b1", client="b"), await house.ask("urgent", priority=-1)]
    assert house.router.num_waiting == 4
    house.running["full-0"].cancel()
    for _ in range(4):
        await quiet()
        worker.live[0].end()
        (stream,) = await next(task for task in tasks if task.done())
        tasks = [task for task in tasks if not task.done()]
        assert [output async for outputs in stream for output in outputs]
    assert house.sent == ["full-0", "urgent", "a1", "b1", "a2"]
    assert house.router.num_waiting == 0
    assert house.router.loads()["w"].requests == 0


async def test_a_line_without_room_does_not_hold_up_another() -> None:
    adapter = Adapter(name="a", content_id="0" * 32, path="a")
    house = House(Answering("w0", replace(SMALL, adapters=(adapter,))), Answering("w1"))
    (first,) = await (await house.ask("first", adapter="a"))
    (second,) = await (await house.ask("second", client="a"))
    stuck = await house.ask("stuck", adapter="a", priority=-5, client="b")
    free = await house.ask("free", client="c")
    second.cancel()
    await quiet()
    assert free.done()
    (stream,) = await free
    assert stream.worker == "w1"
    assert not stuck.done()
    await ended(stuck)
    first.cancel()
    assert house.router.num_waiting == 0


async def test_who_leaves_while_it_waits_takes_no_place() -> None:
    house = House(Answering("w"))
    await house.full()
    gone, stays = await house.ask("gone"), await house.ask("stays")
    await ended(gone)
    assert house.router.num_waiting == 1
    await house.end()
    assert (await stays)[0].worker == "w"
    assert house.sent == ["full-0", "stays"]


async def test_who_is_about_to_leave_is_passed_over() -> None:
    house = House(Answering("w"))
    await house.full()
    leaving, stays = await house.ask("leaving"), await house.ask("stays")
    house.running["full-0"].cancel()
    leaving.cancel()
    assert (await stays)[0].worker == "w"
    assert house.sent == ["full-0", "stays"]
    assert house.router.num_waiting == 0


async def test_who_leaves_just_when_it_was_placed_gives_its_place_back() -> None:
    house = House(Answering("w"))
    await house.full()
    late = await house.ask("late")
    house.running["full-0"].cancel()
    house.router._dispatcher._run()
    assert house.sent == ["full-0", "late"]
    await ended(late)
    assert not house.plane.there[0].live
    assert house.router.loads()["w"].requests == 0


async def test_more_than_the_limit_is_an_error_of_the_server() -> None:
    house = House(Answering("w"), router_queue_size=3)
    await house.full()
    tasks = [await house.ask(str(n), client=str(n)) for n in range(3)]
    with pytest.raises(
        OverloadedError, match=r"3 choices wait; 1 more would pass the limit of 3"
    ) as caught:
        await (await house.ask("x", client="x"))
    assert caught.value.retry_after == 1
    await ended(*tasks)


async def test_more_than_a_clients_share_is_its_own_error_and_others_still_wait() -> None:
    house = House(Answering("w"), router_queue_size=8)
    await house.full()
    tasks = [await house.ask(str(n), client="c") for n in range(4)]
    with pytest.raises(RateLimitedError, match="your share of 4"):
        await (await house.ask("x", client="c"))
    tasks.append(await house.ask("other", client="d"))
    assert house.router.num_waiting == 5
    await ended(*tasks)


async def test_requests_that_are_more_than_may_wait_wait_when_nobody_else_does() -> None:
    house = House(Answering("w"), router_queue_size=4)
    await house.full()
    many = await house.ask(*map(str, range(9)))
    assert house.router.num_waiting == 9
    await house.end()
    assert len(await many) == 9


async def test_without_a_queue_nothing_waits() -> None:
    house = House(Answering("w"), router_queue_size=0)
    await house.full()
    with pytest.raises(OverloadedError, match="all workers are full"):
        await (await house.ask("x"))


async def test_who_has_waited_too_long_is_told() -> None:
    house = House(Answering("w"), router_queue_timeout=0.01)
    await house.full()
    with pytest.raises(OverloadedError, match=r"full for 0\.01 s"):
        await (await house.ask("x"))
    assert house.router.num_waiting == 0


async def test_an_error_of_placing_is_that_requests_own() -> None:
    adapter = Adapter(name="a", content_id="0" * 32, path="a")
    worker = Answering("w", replace(SMALL, adapters=(adapter,)))
    house = House(worker)
    await house.full()
    lost, late = await house.ask("lost", adapter="a"), await house.ask("late", deadline=5.0)
    rest = await house.ask("rest")
    worker.card = SMALL
    house.now = 6.0
    await house.end()
    with pytest.raises(NotFoundError, match="`a` does not exist"):
        await lost
    with pytest.raises(DeadlineExceededError, match="full for the 5 s"):
        await late
    assert (await rest)[0].worker == "w"


async def test_when_to_ask_again_follows_how_fast_requests_end() -> None:
    house = House(Answering("w"), router_queue_size=10)
    await house.full()
    for number in range(20):
        task = await house.ask(f"quick-{number}")
        await house.end()
        house.running[f"quick-{number}"] = (await task)[0]
    tasks = [await house.ask(str(n), client=str(n)) for n in range(9)]
    retry_after = house.router._dispatcher.retry_after
    assert retry_after() == 5
    house.now = 1000.0
    assert retry_after() == 60
    await ended(*tasks)
    assert House(Answering("w")).router._dispatcher.retry_after() == 1


async def test_a_client_whose_request_has_ended_is_placed_though_it_is_anothers_turn() -> None:
    worker = Answering("w", replace(SMALL, limits=replace(SMALL.limits, max_num_seqs=4)))
    house = House(worker)
    running = {
        id_: (await (await house.ask(id_, client=id_[0])))[0] for id_ in ("a1", "a2", "a3", "b1")
    }
    # Over its capacity the worker takes those of a client below its share alone.
    running["b2"] = (await (await house.ask("b2", client="b")))[0]
    waiting = {id_: await house.ask(id_, client=id_[0]) for id_ in ("a4", "b3")}
    assert not any(task.done() for task in waiting.values())
    running["b1"].cancel()
    await quiet()
    assert [id_ for id_, task in waiting.items() if task.done()] == ["b3"]
    assert house.router.num_waiting == 1
    running["a1"].cancel()
    await quiet()
    assert not waiting["a4"].done()
    running["a2"].cancel()
    assert (await waiting["a4"])[0].worker == "w"


async def test_a_mark_places_nothing_but_has_it_done_next() -> None:
    house = House(Answering("w"))
    await house.full()
    waits = await house.ask("waits")
    house.running["full-0"].cancel()
    for _ in range(9):
        house.router._dispatcher.mark()
    assert house.sent == ["full-0"]
    assert (await waits)[0].worker == "w"


class Nesting(Answering):
    """A worker whose sending has waiting requests placed."""

    router: Router

    def send(self, request: Request) -> Stream:
        if request.id == "nested":
            self.router._dispatcher.mark()
            self.router._dispatcher._run()
        return super().send(request)


async def test_a_placing_within_another_is_an_error_of_that_request_alone() -> None:
    worker = Nesting("w")
    house = House(worker)
    worker.router = house.router
    await house.full()
    nested, rest = await house.ask("nested", priority=-1), await house.ask("rest")
    house.running["full-0"].cancel()
    with pytest.raises(RuntimeError, match="by what placing another calls"):
        await nested
    assert (await rest)[0].worker == "w"


async def test_who_waits_has_the_room_that_was_announced_before_a_newcomer() -> None:
    house = House(Answering("w"))
    await house.full()
    waits = await house.ask("waits")
    house.running["full-0"].cancel()
    newcomer = asyncio.create_task(house.router.send("m", [request("new", client="n")]))
    assert (await waits)[0].worker == "w"
    await quiet()
    assert not newcomer.done()
    await ended(newcomer)


@pytest.mark.parametrize("started", [False, True])
async def test_a_worker_that_is_gone_is_tried_once_by_all_that_wait(started: bool) -> None:
    lost, full = Answering("lost"), Answering("full")
    house = House(lost, full)
    if started:
        await house.router.start()
    await house.full()
    tasks = [await house.ask(f"w{number}", client=str(number)) for number in range(5)]
    lost.gone = True
    lost.live[0].cancel()
    house.running["full-0"].cancel()
    await quiet()
    assert lost.tries == 2
    assert not any(task.done() for task in tasks)
    # It comes back by another name.
    house.plane.there[0] = Answering("back")
    house.plane.tell()
    await quiet()
    assert Counter(task.done() for task in tasks) == {True: 1, False: 4}
    assert lost.tries == 2
    await ended(*tasks)
    await house.router.close()


async def test_where_the_only_worker_is_gone_nobody_waits_for_the_plane_to_say_so() -> None:
    lost = Answering("lost")
    house = House(lost)
    await house.router.start()
    await quiet()
    lost.gone = True
    for _ in range(3):
        with pytest.raises(OverloadedError, match="No worker of the model `m` is ready"):
            await (await house.ask("x"))
    assert lost.tries == 1
    await house.router.close()


async def test_a_worker_that_was_thought_gone_is_asked_again_once_the_plane_says_something() -> (
    None
):
    worker = Answering("w")
    house = House(worker)
    await house.router.start()
    await quiet()
    worker.gone = True
    with pytest.raises(OverloadedError, match="No worker"):
        await (await house.ask("x"))
    worker.gone = False
    house.plane.there.append(Answering("asleep", replace(SMALL, asleep=1)))
    house.plane.tell()
    await quiet()
    assert (await (await house.ask("y")))[0].worker == "w"
    await house.router.close()
