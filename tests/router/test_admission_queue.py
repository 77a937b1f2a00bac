"""Requests wait in bounded queues, leave with their client, and fail early without hope."""

import asyncio

import pytest

from inlay.errors import NotFoundError, OverloadedError, RateLimitedError
from inlay.router.admission_queue import AdmissionQueue
from inlay.router.settings import RouterSettings


class Places:
    """So many places; who takes one is noted."""

    def __init__(self, room: int = 0) -> None:
        self.room = room
        self.taken: list[str] = []
        self.undone: list[str] = []

    def place(self, name: str) -> str | None:
        if not self.room:
            return None
        self.room -= 1
        self.taken.append(name)
        return name


class Waiters:
    """A room of waiting tasks."""

    def __init__(self, **settings: float | int) -> None:
        self.places = Places()
        self.now = 0.0
        self.room: AdmissionQueue[str, str] = AdmissionQueue(
            RouterSettings.model_validate(settings), self.places.undone.append, lambda: self.now
        )

    async def add(
        self,
        name: str,
        *,
        client: str = "c",
        priority: int = 0,
        requests: int = 1,
        line: str = "line",
    ) -> "asyncio.Task[str]":
        task = asyncio.create_task(
            self.room.wait(
                line,
                lambda: self.places.place(name),
                num_requests=requests,
                client=client,
                priority=priority,
            )
        )
        await asyncio.sleep(0)
        return task

    async def make_room(self, number: int = 1) -> None:
        self.places.room += number
        self.room.wake()
        await asyncio.sleep(0)


async def test_who_waits_is_placed_when_there_is_room_in_the_order_of_priority_and_turns() -> None:
    waiters = Waiters()
    tasks = [await waiters.add(name) for name in ("a1", "a2")]
    tasks += [await waiters.add("b1", client="d"), await waiters.add("urgent", priority=-1)]
    assert waiters.room.num_requests == 4
    await waiters.make_room(3)
    assert waiters.places.taken == ["urgent", "a1", "b1"]
    await waiters.make_room()
    assert [await task for task in tasks] == ["a1", "a2", "b1", "urgent"]
    assert waiters.room.num_requests == 0
    assert not waiters.room.waits("line", "c")


async def test_a_line_without_room_does_not_hold_up_another() -> None:
    waiters = Waiters()
    stuck = asyncio.create_task(
        waiters.room.wait("stuck", lambda: None, num_requests=1, client="c", priority=-5)
    )
    free = await waiters.add("free")
    await waiters.make_room()
    assert await free == "free"
    stuck.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stuck
    assert waiters.room.num_requests == 0


async def test_who_leaves_while_it_waits_takes_no_place() -> None:
    waiters = Waiters()
    gone, stays = await waiters.add("gone"), await waiters.add("stays")
    gone.cancel()
    await asyncio.sleep(0)
    assert waiters.room.num_requests == 1
    await waiters.make_room(2)
    assert waiters.places.taken == ["stays"]
    assert await stays == "stays"


async def test_who_is_about_to_leave_is_passed_over() -> None:
    waiters = Waiters()
    leaving, stays = await waiters.add("leaving"), await waiters.add("stays")
    leaving.cancel()
    waiters.places.room = 1
    waiters.room.wake()
    assert waiters.places.taken == ["stays"]
    assert await stays == "stays"
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert waiters.room.num_requests == 0


async def test_who_leaves_just_when_it_was_placed_gives_its_place_back() -> None:
    waiters = Waiters()
    task = await waiters.add("late")
    waiters.places.room = 1
    waiters.room.wake()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert waiters.places.undone == ["late"]


async def test_more_than_the_limit_is_an_error_of_the_server() -> None:
    waiters = Waiters(router_queue_size=3)
    tasks = [await waiters.add(str(n), client=str(n)) for n in range(3)]
    with pytest.raises(
        OverloadedError, match=r"3 choices wait; 1 more would pass the limit of 3"
    ) as caught:
        await (await waiters.add("x", client="x"))
    assert caught.value.retry_after == 1
    for task in tasks:
        task.cancel()


async def test_more_than_a_clients_share_is_its_own_error_and_others_still_wait() -> None:
    waiters = Waiters(router_queue_size=8)
    tasks = [await waiters.add(str(n)) for n in range(4)]
    with pytest.raises(RateLimitedError, match="your share of 4"):
        await (await waiters.add("x"))
    tasks.append(await waiters.add("other", client="d"))
    assert waiters.room.num_requests == 5
    for task in tasks:
        task.cancel()


async def test_requests_that_are_more_than_may_wait_wait_when_nobody_else_does() -> None:
    waiters = Waiters(router_queue_size=4)
    task = await waiters.add("many", requests=9)
    await waiters.make_room()
    assert await task == "many"


async def test_without_a_queue_nothing_waits() -> None:
    waiters = Waiters(router_queue_size=0)
    with pytest.raises(OverloadedError, match="all workers are full"):
        await (await waiters.add("x"))


async def test_who_has_waited_too_long_is_told() -> None:
    waiters = Waiters(router_queue_timeout=0.01)
    with pytest.raises(OverloadedError, match=r"full for 0\.01 s"):
        await (await waiters.add("x"))
    assert waiters.room.num_requests == 0


async def test_an_error_of_placing_is_that_requests_own() -> None:
    waiters = Waiters()

    def lost() -> str | None:
        raise NotFoundError("the adapter is gone")

    task = asyncio.create_task(
        waiters.room.wait("line", lost, num_requests=1, client="c", priority=0)
    )
    await asyncio.sleep(0)
    rest = await waiters.add("rest")
    await waiters.make_room()
    with pytest.raises(NotFoundError, match="adapter is gone"):
        await task
    assert await rest == "rest"


async def test_when_to_ask_again_follows_how_fast_requests_end() -> None:
    waiters = Waiters(router_queue_size=10)
    tasks = [await waiters.add(str(n), client=str(n)) for n in range(9)]
    assert waiters.room.retry_after() == 1
    waiters.room.ended(20)
    assert waiters.room.retry_after() == 5
    waiters.now = 1000.0
    assert waiters.room.retry_after() == 60
    for task in tasks:
        task.cancel()


async def test_a_client_whose_request_has_ended_is_placed_though_it_is_anothers_turn() -> None:
    waiters = Waiters()
    first, second = await waiters.add("a1", client="a"), await waiters.add("b1", client="b")
    # Room that only this client may have.
    waiters.places.room = 1
    waiters.room.call_client("b")
    assert waiters.places.taken == ["b1"]
    assert await second == "b1"
    assert waiters.room.waits("line", "a")
    assert not waiters.room.waits("line", "b")
    await waiters.make_room()
    assert await first == "a1"
    assert waiters.room.num_requests == 0


async def test_what_placing_calls_places_nothing_but_has_it_done_next() -> None:
    waiters = Waiters()
    depth = most = tries = 0

    def place() -> str | None:
        """What is sent and taken back gives its room back, as a request that ends does."""
        nonlocal depth, most, tries
        depth, tries = depth + 1, tries + 1
        most = max(most, depth)
        if tries < 5:
            waiters.room.mark("c")
        depth -= 1
        return "placed" if tries == 5 else None

    task = asyncio.create_task(
        waiters.room.wait("line", place, num_requests=1, client="c", priority=0)
    )
    await asyncio.sleep(0)
    for _ in range(9):
        waiters.room.mark()
    assert tries == 0  # so far nothing has been looked at
    async with asyncio.timeout(10):
        assert await task == "placed"
    assert (most, tries) == (1, 5)


async def test_a_placing_within_another_is_an_error_of_that_request_alone() -> None:
    waiters = Waiters()

    def nested() -> str | None:
        waiters.room.wake()
        return None

    task = asyncio.create_task(
        waiters.room.wait("line", nested, num_requests=1, client="c", priority=-1)
    )
    await asyncio.sleep(0)
    rest = await waiters.add("rest")
    await waiters.make_room()
    with pytest.raises(RuntimeError, match="by what placing another calls"):
        await task
    assert await rest == "rest"


async def test_who_waits_has_the_room_that_was_announced_before_a_newcomer() -> None:
    waiters = Waiters()
    task = await waiters.add("waits")
    waiters.places.room = 1
    waiters.room.mark()
    waiters.room.settle()  # as who comes does first
    assert waiters.places.place("newcomer") is None
    assert await task == "waits"
