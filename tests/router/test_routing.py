"""Requests go where their prefix is, wait when all are full, and never go where they must not."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import msgspec
import pytest

from inlay.base.address import Address
from inlay.base.errors import (
    DeadlineExceededError,
    NotFoundError,
    OverloadedError,
    RateLimitedError,
)
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.messages.card import Adapter, Limits, ModelCard
from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer, Prompt, Rows, Tokens
from inlay.messages.request import Emit, Output, Request, Sampling
from inlay.router import Router
from inlay.router.settings import RouterSettings
from inlay.transport.api import Stream
from tests.router.sending import IDLE, First, send
from tests.transport.direct import DirectPlane

SECRET = Secret(bytes(32))


class Held(EchoEngine):
    """Keeps requests until it is told to end one."""

    def __init__(self, settings: EngineSettings, **card: object) -> None:
        super().__init__(settings, SECRET)
        self._changes = card
        self.seen: list[Request] = []
        self._held: dict[str, tuple[Request, Emit]] = {}

    @property
    def card(self) -> ModelCard:
        return msgspec.structs.replace(super().card, **self._changes)

    def submit(self, request: Request, emit: Emit) -> None:
        self.seen.append(request)
        self._held[request.id] = (request, emit)

    def abort(self, request_id: str) -> None:
        held = self._held.pop(request_id, None)
        if held is not None:
            held[1](Output(request_id, held[0].attempt, 0, finish_reason="abort"))

    def let_go(self) -> None:
        request, emit = self._held.pop(next(iter(self._held)))
        super().submit(request, emit)


@dataclass
class Fleet:
    """Engines on a plane, and a router."""

    path: Path
    plane: DirectPlane | None = None
    engines: list[Held] = field(default_factory=list)

    async def router(self, *cards: dict[str, object], **settings: object) -> Router:
        engine = EngineSettings.of(model=str(self.path), engine="echo", served_model_name=["m"])
        self.engines = [Held(engine, **card) for card in cards]
        self.plane = await DirectPlane.around(*self.engines)
        return Router(
            self.plane, RouterSettings.model_validate(settings), secret=SECRET, random=First()
        )

    def where(self) -> dict[str, int]:
        """Which engine has seen each request."""
        return {
            request.id: number
            for number, engine in enumerate(self.engines)
            for request in engine.seen
        }

    async def until_seen(self, number: int) -> None:
        async with asyncio.timeout(90):
            while len(self.where()) < number:  # noqa: ASYNC110 - engines in this process, on this loop
                await asyncio.sleep(0)


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    (tmp_path / "config.json").write_text(
        '{"vocab_size": 99, "hidden_size": 4, "max_position_embeddings": 100000}'
    )
    fleet = Fleet(tmp_path)
    yield fleet
    if fleet.plane is not None:
        await fleet.plane.close()


def text(family: int, length: int, rest: int = 0) -> Prompt:
    """Prompts of a family begin alike; the last 16 positions are `rest`'s."""
    return Prompt.of(Tokens([family] * (length - 16) + [rest] * 16))


def rows(family: int, length: int) -> Prompt:
    return Prompt.of(
        Rows(Buffer(bytes([family]) * 16 * length), "float32", (length, 4)), Tokens([1] * 16)
    )


def make_request(id_: str, prompt: Prompt | None = None, **more: object) -> Request:
    made = Request(
        id=id_, prompts=(prompt or text(1, 32),), params=Sampling(max_tokens=2, ignore_eos=True)
    )
    return msgspec.structs.replace(made, **more)


async def finish(stream: Stream) -> int:
    return sum([len(output.token_ids) async for outputs in stream for output in outputs])


SMALL = Limits(max_model_len=10_000, max_num_seqs=1)


@pytest.mark.parametrize(
    "make", [lambda family: text(family, 800), lambda family: rows(family, 800)]
)
async def test_a_prompt_goes_where_a_like_one_went_be_it_text_or_rows(
    fleet: Fleet, make: object
) -> None:
    assert callable(make)
    router = await fleet.router({}, {}, {})
    for number in range(9):
        stream = await send(router, make_request(str(number), make(number % 3)))
        await fleet.until_seen(number + 1)
        fleet.engines[fleet.where()[str(number)]].let_go()
        await finish(stream)
    by_family = {
        family: {fleet.where()[str(n)] for n in range(family, 9, 3)} for family in range(3)
    }
    assert all(len(workers) == 1 for workers in by_family.values())
    assert set(router.loads().values()) == {IDLE}


async def test_decisions_and_the_blocks_that_were_found_are_counted(fleet: Fleet) -> None:
    router = await fleet.router({}, {})
    streams = [await send(router, make_request(str(number), rows(1, 304))) for number in range(3)]
    streams.append(await send(router, make_request("else", text(2, 160))))
    assert router.stats.decisions == {("m", False): 4}
    # Blocks of 16: three times 19 of rows and one of text, and ten; all but the first prompt of
    # rows were found.
    assert router.stats.looked_up == {"m": 3 * 20 + 10}
    assert router.stats.hits == {"m": 2 * 20}
    for stream in streams:
        stream.cancel()


async def test_a_prefix_is_left_for_a_worker_with_less_to_do(fleet: Fleet) -> None:
    router = await fleet.router({}, {})
    streams = [await send(router, make_request(str(n), text(1, 320, n))) for n in range(6)]
    await fleet.until_seen(6)
    assert set(Counter(fleet.where().values()).values()) != {6}
    for stream in streams:
        stream.cancel()
    assert set(router.loads().values()) == {IDLE}


async def test_what_is_cached_is_not_counted_as_work(fleet: Fleet) -> None:
    router = await fleet.router({}, {})
    first = await send(router, make_request("a", text(1, 320)))
    assert {load.prefill for load in router.loads().values()} == {320, 0}
    await fleet.until_seen(1)
    fleet.engines[0].let_go()
    await finish(first)
    second = await send(router, make_request("b", text(1, 336)))
    assert {load.prefill for load in router.loads().values()} == {32, 0}
    second.cancel()


async def test_choices_of_one_prompt_go_to_one_worker_and_compute_it_once(fleet: Fleet) -> None:
    router = await fleet.router({}, {}, {})
    streams = await router.send("m", [make_request(str(n), text(1, 64)) for n in range(5)])
    await fleet.until_seen(5)
    assert len(set(fleet.where().values())) == 1
    (load,) = [load for load in router.loads().values() if load != IDLE]
    assert (load.requests, load.prefill) == (5, 64)
    for stream in streams:
        stream.cancel()
    assert set(router.loads().values()) == {IDLE}


async def test_a_session_goes_to_one_worker_whatever_its_prompts(fleet: Fleet) -> None:
    router = await fleet.router({}, {}, {}, {})
    for number in range(40):
        stream = await send(
            router, make_request(str(number), text(number, 64)), session=f"s{number % 8}"
        )
        await fleet.until_seen(number + 1)
        stream.cancel()
    homes = {n: {fleet.where()[str(k)] for k in range(n, 40, 8)} for n in range(8)}
    assert all(len(workers) == 1 for workers in homes.values())
    assert len(set.union(*homes.values())) > 1


async def test_the_price_of_a_fetch_is_that_of_prompts_which_other_workers_have(
    fleet: Fleet,
) -> None:
    now = 0.0
    await fleet.router({"kv_layout": "l"}, {"kv_layout": "l"})
    assert fleet.plane is not None
    for number, worker in enumerate(fleet.plane.workers()):
        address = Address("h", number + 1, b"f")
        worker._card = msgspec.structs.replace(worker.card, address=address)
    router = Router(fleet.plane, RouterSettings(), secret=SECRET, random=First(), clock=lambda: now)

    async def answered(prompt: Prompt, session: str, seconds: float) -> int:
        """Which worker answers, after so many seconds."""
        nonlocal now
        number = len(fleet.where())
        stream = await send(router, make_request(str(number), prompt), session=session)
        await fleet.until_seen(number + 1)
        now += seconds
        worker = fleet.where()[str(number)]
        fleet.engines[worker].let_go()
        assert [output async for outputs in stream for output in outputs]
        return worker

    homes = {await answered(text(9, 32, n), str(n), 0.001): str(n) for n in range(12)}
    price = router._fleet.pool(fleet.engines[0].card).price
    assert price.value == RouterSettings().router_fetch_weight
    assert await answered(text(1, 1024), homes[0], 1.024) == 0
    # 1008 positions are at the other, 16 are computed; then the worker computes all of them.
    assert await answered(text(1, 1024, 2), homes[1], 0.504 + 0.016) == 1
    assert price.value == pytest.approx(0.5)
    assert await answered(text(2, 1024), homes[0], 1.024) == 0
    assert await answered(text(2, 1024, 2), homes[1], 1.024) == 1
    assert price.value == pytest.approx(0.7 * 0.5 + 0.3 * 1.0)
    # A small part says nothing.
    assert await answered(text(3, 144), homes[0], 0.144) == 0
    assert await answered(text(3, 128) + text(4, 1024), homes[1], 9.0) == 1
    assert price.value == pytest.approx(0.65)


async def test_a_request_for_an_adapter_goes_where_it_is(fleet: Fleet) -> None:
    adapter = Adapter(name="a", content_id="0" * 32, path="a")
    router = await fleet.router({"adapters": (adapter,)}, {}, {})
    streams = [await send(router, make_request(str(n), text(n, 64), adapter="a")) for n in range(6)]
    assert [load.requests for load in router.loads().values()] == [6, 0, 0]
    with pytest.raises(NotFoundError, match="`b` does not exist"):
        await send(router, make_request("x", adapter="b"))
    for stream in streams:
        stream.cancel()


async def test_requests_wait_in_the_router_when_all_are_full_and_go_where_there_is_room_first(
    fleet: Fleet,
) -> None:
    router = await fleet.router({"limits": SMALL}, {"limits": SMALL}, router_worker_backlog=0)
    placed = [await send(router, make_request(str(n))) for n in range(2)]
    await fleet.until_seen(2)
    assert set(fleet.where().values()) == {0, 1}
    waiting = [
        asyncio.create_task(send(router, make_request(f"w{n}", priority=-n))) for n in range(3)
    ]
    await asyncio.sleep(0)
    assert router.num_waiting == 3
    assert router.waiting() == {"m": 3}
    fleet.engines[1].let_go()
    await finish(placed[1 if fleet.where()["1"] == 1 else 0])
    await fleet.until_seen(3)
    assert fleet.where()["w2"] == 1
    assert router.num_waiting == 2
    placed[0 if fleet.where()["1"] == 1 else 1].cancel()
    await fleet.until_seen(4)
    assert fleet.where()["w1"] == 0
    for task in waiting[1:]:
        (await task).cancel()
    (await waiting[0]).cancel()
    assert set(router.loads().values()) == {IDLE}
    assert router.num_waiting == 0
    assert router.waiting() == {}


async def test_a_client_that_leaves_while_it_waits_takes_no_room(fleet: Fleet) -> None:
    router = await fleet.router({"limits": SMALL}, router_worker_backlog=0)
    first = await send(router, make_request("first"))
    waiting = asyncio.create_task(send(router, make_request("waiting")))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    first.cancel()
    assert router.num_waiting == 0
    await fleet.until_seen(1)
    assert set(fleet.where()) == {"first"}


async def test_a_full_queue_is_503_and_a_clients_own_part_429(fleet: Fleet) -> None:
    router = await fleet.router({"limits": SMALL}, router_worker_backlog=0, router_queue_size=4)
    first = await send(router, make_request("first"))
    waiting = [
        asyncio.create_task(router.send("m", [make_request(str(n), client="mine")]))
        for n in range(2)
    ]
    await asyncio.sleep(0)
    with pytest.raises(RateLimitedError, match="share of 2"):
        await router.send("m", [make_request("x", client="mine")])
    waiting += [
        asyncio.create_task(router.send("m", [make_request(f"o{n}", client=str(n))]))
        for n in range(2)
    ]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="limit of 4") as caught:
        await router.send("m", [make_request("y", client="new")])
    assert caught.value.retry_after is not None
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    first.cancel()


async def test_time_spent_waiting_is_taken_from_the_deadline(fleet: Fleet) -> None:
    router = await fleet.router({"limits": SMALL}, router_worker_backlog=0)
    first = await send(router, make_request("first"))
    late = asyncio.create_task(send(router, make_request("late", deadline=0.001)))
    in_time = asyncio.create_task(send(router, make_request("in time", deadline=1000.0)))
    await asyncio.sleep(0.01)
    first.cancel()
    with pytest.raises(DeadlineExceededError):
        await late
    stream = await in_time
    await fleet.until_seen(2)
    left = fleet.engines[0].seen[-1].deadline
    assert left is not None
    assert 900 < left < 1000 - 0.005
    stream.cancel()


async def test_requests_that_wait_for_a_worker_that_dies_are_told(fleet: Fleet) -> None:
    router = await fleet.router({"limits": SMALL}, router_worker_backlog=0)
    first = await send(router, make_request("first"))
    waiting = asyncio.create_task(send(router, make_request("waiting")))
    await asyncio.sleep(0)
    assert fleet.plane is not None
    fleet.plane.worker_ends[0].close()
    with pytest.raises(OverloadedError, match="No worker"):
        await waiting
    first.cancel()


async def test_one_worker_needs_no_chain(fleet: Fleet) -> None:
    router = await fleet.router({})
    pool = router._fleet.pool(router.card("m"))
    assert not pool.asks_for_chain(None)
    stream = await send(router, make_request("x", text(1, 1600)))
    stream.cancel()
    assert pool.index.num_sets == 1


async def test_a_client_with_all_places_does_not_keep_anothers_requests_from_the_engine(
    fleet: Fleet,
) -> None:
    router = await fleet.router({"limits": Limits(max_model_len=10_000, max_num_seqs=4)})
    greedy = await router.send("m", [make_request(f"a{n}", client="a") for n in range(16)])
    more = asyncio.create_task(router.send("m", [make_request("a16", client="a")]))
    await fleet.until_seen(16)
    # Places and as many again are 8 requests, of which each of two clients has half, and each of
    # four a quarter.
    others = [await router.send("m", [make_request(f"b{n}", client="b")]) for n in range(4)]
    waiting = asyncio.create_task(router.send("m", [make_request("b4", client="b")]))
    await fleet.until_seen(20)
    others += [
        await router.send("m", [make_request(f"{client}0", client=client)]) for client in "cd"
    ]
    await fleet.until_seen(22)
    assert router.num_waiting == 2
    # As one of its own ends, a client within its share goes on; the one beyond it does not.
    greedy[0].cancel()
    for some in (others[4], others[5], others[0]):
        some[0].cancel()
    others.append(await waiting)
    assert not more.done()
    for stream in chain(greedy, *others):
        stream.cancel()
    (await more)[0].cancel()
    assert set(router.loads().values()) == {IDLE}
    assert router.num_waiting == 0


async def test_one_client_alone_has_all_requests_a_worker_may_have_and_then_waits(
    fleet: Fleet,
) -> None:
    router = await fleet.router({"limits": Limits(max_model_len=10_000, max_num_seqs=4)})
    streams = [await send(router, make_request(str(n), client="a")) for n in range(8)]
    waiting = asyncio.create_task(send(router, make_request("w", client="a")))
    await asyncio.sleep(0)
    assert router.num_waiting == 1
    for stream in streams:
        stream.cancel()
    (await waiting).cancel()
    assert set(router.loads().values()) == {IDLE}
