"""What a worker has received of stored prompts is not sent to it again, for as long as the prompt is there."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import pytest

from inlay.base.errors import OverloadedError
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.messages.card import Stats
from inlay.messages.commands import ReadStats
from inlay.messages.prompt import Buffer, Prompt, Rows, Tokens
from inlay.messages.request import Output, Request, Sampling
from inlay.router import Router
from inlay.transport.nats.frontend import NatsPlane
from inlay.transport.wire import FrameKind
from tests.router.sending import send
from tests.store.frontends import Frontend, Frontends
from tests.store.making import Clock, target, upload_of
from tests.transport.fleet import SECRET, Fleet, FleetWorker, found, links
from tests.transport.nats_server import NatsServer
from tests.transport.paced import PacedEngine
from tests.transport.test_conformance import collect, ids

HIDDEN = 64
ROWS = 1100
SIZE = 4 * HIDDEN * ROWS
BOUND = 60


@dataclass
class Moved:
    """Counts the bytes of parts of messages that a frontend sends.

    `then` is called with each part.
    """

    num_bytes: int = 0
    then: Callable[[], None] = lambda: None

    @classmethod
    def of(cls, plane: NatsPlane) -> "Moved":
        moved = cls()
        for link in links(plane):
            writer = link._carrier._writer  # type: ignore[attr-defined]
            writer.take = partial(moved.take, writer.take)
        return moved

    def take(self, take: Callable[[int], list[bytes]], limit: int) -> list[bytes]:
        """Count what leaves, or is written into the worker's memory, but for small messages."""
        pieces = take(limit)
        num_bytes = sum(len(piece) for piece in pieces if len(piece) > 4096)
        heads = [piece for piece in pieces if len(piece) == 12 and piece[0] == FrameKind.WRITTEN]
        num_bytes += sum(int.from_bytes(head[8:], "little") for head in heads)
        if num_bytes:
            self.num_bytes += num_bytes
            self.then()
        return pieces

    def since(self) -> int:
        """Bytes since the last call."""
        was, self.num_bytes = self.num_bytes, 0
        return was


class Place:
    """A fleet of one namespace, with stores over it."""

    def __init__(self, server: NatsServer, settings: EngineSettings) -> None:
        self.fleet = Fleet(server)
        self.clock = Clock()
        self.stores = Frontends(server, self.clock)
        self.stores.settings = self.fleet.settings
        self._engine = settings

    async def worker(self, *, paced: bool = False, **options: object) -> FleetWorker:
        made = (PacedEngine if paced else EchoEngine)(self._engine, SECRET)
        return await self.fleet.worker(made, **options)

    async def frontend(self, workers: int = 1) -> tuple[NatsPlane, Moved]:
        plane = await self.fleet.frontend(SECRET)
        await found(plane, workers)
        return plane, Moved.of(plane)

    async def store(self) -> Frontend:
        return await self.stores.frontend(memory_bytes=1 << 24)

    async def close(self) -> None:
        await self.stores.close()
        await self.fleet.close()


@pytest.fixture
async def place(nats_server: NatsServer, echo_settings: EngineSettings) -> AsyncIterator[Place]:
    place = Place(nats_server, echo_settings)
    yield place
    await place.close()


async def stored(frontend: Frontend, seed: int, tenant: str = "tenant") -> str:
    return (await frontend.store.put(tenant, *upload_of(seed, rows=ROWS, hidden=HIDDEN))).id


async def rows_of(frontend: Frontend, id_: str, tenant: str = "tenant") -> Rows:
    """As a request would have them, without digests.

    The engine's answer is made of the bytes that reach it.
    """
    (rows,) = await frontend.store.rows(tenant, id_, target(hidden=HIDDEN), look=lambda _: None)
    return msgspec.structs.replace(rows, digests=None)


def make_request(*segments: Tokens | Rows, tokens: int = 3) -> Request:
    return Request(
        id=os.urandom(4).hex(), prompts=(Prompt.of(*segments),), params=Sampling(max_tokens=tokens)
    )


def unnamed(rows: Rows) -> Rows:
    """The same, sent by value."""
    return msgspec.structs.replace(rows, data=Buffer(rows.data.view))


async def answer(
    plane: NatsPlane, *segments: Tokens | Rows, worker: int = 0, tokens: int = 20
) -> list[int]:
    return ids(await collect(plane.workers()[worker].send(make_request(*segments, tokens=tokens))))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def kept(worker: FleetWorker) -> Stats:
    """What the worker tells of it."""
    return msgspec.convert(msgspec.structs.asdict(worker.cache.stats), Stats)


async def test_rows_of_a_stored_prompt_go_to_a_worker_once_whichever_frontend_sends_them(
    place: Place,
) -> None:
    worker = await place.worker()
    (one, one_moved), (other, other_moved) = [await place.frontend() for _ in range(2)]
    stores = [await place.store() for _ in range(2)]
    id_ = await stored(stores[0], 1)
    by_value = await answer(one, Tokens([5]), unnamed(await rows_of(stores[0], id_)))
    assert one_moved.since() >= SIZE
    answers = [await answer(one, Tokens([5]), await rows_of(stores[0], id_))]
    assert SIZE <= one_moved.since() < SIZE + 4096
    for plane, store in ((one, stores[0]), (other, stores[1]), (one, stores[0])):
        answers.append(await answer(plane, Tokens([5]), await rows_of(store, id_)))
    assert answers == [by_value] * 4
    assert (one_moved.since(), other_moved.since()) == (0, 0)
    assert kept(worker) == Stats(kept_bytes=SIZE, kept_hits=3, kept_misses=1)
    told = await one.workers()[0].call(ReadStats())
    assert (told.kept_bytes, told.kept_hits, told.running) == (SIZE, 3, 0)


async def test_of_a_mixed_prompt_only_what_is_missing_is_sent(place: Place) -> None:
    await place.worker()
    plane, moved = await place.frontend()
    store = await place.store()
    first, second = [await rows_of(store, await stored(store, seed)) for seed in (1, 2)]
    value = Rows(Buffer(os.urandom(SIZE)), "float32", (ROWS, HIDDEN))
    await answer(plane, first)
    moved.since()
    mixed = await answer(plane, Tokens([1]), first, value, Tokens([2, 3]), second, tokens=3 * ROWS)
    assert 2 * SIZE <= moved.since() < 2 * SIZE + 4096
    assert mixed == await answer(
        plane, Tokens([1]), unnamed(first), value, Tokens([2, 3]), unnamed(second), tokens=3 * ROWS
    )


@pytest.mark.parametrize("name", ["", "owner.pe-id/float32.0"], ids=["by value", "by reference"])
async def test_the_choices_of_a_request_share_one_transfer(place: Place, name: str) -> None:
    await place.worker(paced=True, kept_bytes=0)
    plane, moved = await place.frontend()
    rows = Rows(Buffer(os.urandom(SIZE), name), "float32", (ROWS, HIDDEN))
    streams = [plane.workers()[0].send(make_request(rows, tokens=100)) for _ in range(8)]
    streams[0].cancel()
    answers = await asyncio.gather(*map(collect, streams))
    assert all(ids(answer) == ids(answers[1]) for answer in answers[1:])
    assert len(ids(answers[1])) == 100
    assert SIZE <= moved.since() < SIZE + 4096


async def test_what_has_no_room_is_sent_again_and_what_was_used_least_recently_goes(
    place: Place,
) -> None:
    worker = await place.worker(kept_bytes=2 * SIZE + SIZE // 2)
    plane, moved = await place.frontend()
    store = await place.store()
    prompts = [await rows_of(store, await stored(store, seed)) for seed in range(3)]
    sent = []
    for index in (0, 1, 0, 2, 0, 1):
        await answer(plane, prompts[index])
        sent.append(moved.since() >= SIZE)
    assert sent == [True, True, False, True, False, True]
    assert kept(worker) == Stats(kept_bytes=2 * SIZE, kept_hits=2, kept_misses=4, kept_evictions=2)


async def test_a_worker_that_may_keep_nothing_is_sent_everything(place: Place) -> None:
    worker = await place.worker(kept_bytes=0)
    plane, moved = await place.frontend()
    store = await place.store()
    rows = await rows_of(store, await stored(store, 1))
    first, second = [await answer(plane, rows) for _ in range(2)]
    assert first == second
    assert moved.since() >= 2 * SIZE
    assert kept(worker) == Stats(kept_misses=2)


async def test_another_tenants_prompt_of_the_same_bytes_is_another(place: Place) -> None:
    worker = await place.worker()
    plane, moved = await place.frontend()
    store = await place.store()
    for tenant in ("one", "other"):
        rows = await rows_of(store, await stored(store, 1, tenant), tenant)
        await answer(plane, rows)
        # Whether it takes a transfer tells nothing of what others have used.
        assert moved.since() >= SIZE
    assert kept(worker) == Stats(kept_bytes=2 * SIZE, kept_misses=2)


async def test_a_deleted_prompt_leaves_the_workers(place: Place) -> None:
    workers = [await place.worker() for _ in range(2)]
    plane, moved = await place.frontend(2)
    store, other = await place.store(), await place.store()
    gone, stays = await stored(store, 1), await stored(store, 2)
    rows = await rows_of(store, gone)
    for worker in range(2):
        await answer(plane, rows, worker=worker)
        await answer(plane, await rows_of(store, stays), worker=worker)
    await other.store.delete("tenant", gone)
    await until(lambda: all(kept(worker).kept_bytes == SIZE for worker in workers))
    moved.since()
    # A request that had its rows before is answered, and leaves nothing.
    await answer(plane, rows)
    assert moved.since() >= SIZE
    assert kept(workers[0]).kept_bytes == SIZE


async def test_an_expired_prompt_leaves_the_workers_when_it_is_removed(place: Place) -> None:
    worker = await place.worker()
    plane, _ = await place.frontend()
    store = await place.store()
    await answer(plane, await rows_of(store, await stored(store, 1)))
    assert kept(worker).kept_bytes == SIZE
    place.clock.now += 1000
    await store.store.sweep()
    await until(lambda: not kept(worker).kept_bytes)


async def test_a_worker_that_may_have_missed_a_deletion_forgets_all(place: Place) -> None:
    worker = await place.worker()
    plane, moved = await place.frontend()
    store = await place.store()
    rows = await rows_of(store, await stored(store, 1))
    await answer(plane, rows)
    worker.member.control._client.abort()
    await until(lambda: not kept(worker).kept_bytes)
    moved.since()
    async with asyncio.timeout(BOUND):
        # The plane may take the worker for gone in between, and sees it again.
        while True:
            try:
                await answer(plane, rows)
                break
            except (OverloadedError, IndexError):
                await plane.changed()
    assert moved.since() >= SIZE


async def test_a_new_worker_is_sent_what_the_one_before_it_had(place: Place) -> None:
    first = await place.worker()
    plane, _ = await place.frontend()
    store = await place.store()
    rows = await rows_of(store, await stored(store, 1))
    expected = await answer(plane, rows)
    await first.close()
    await place.worker()
    async with asyncio.timeout(BOUND):
        while not plane.workers() or plane.workers()[0].id.startswith(first.worker.id):
            await plane.changed()
    moved = Moved.of(plane)
    assert await answer(plane, rows) == expected
    assert moved.since() >= SIZE


@pytest.mark.slow
async def test_a_stream_by_reference_goes_on_elsewhere_when_its_worker_is_killed(
    place: Place,
) -> None:
    workers = {
        worker.worker.id: worker for worker in [await place.worker(paced=True) for _ in range(2)]
    }
    plane, moved = await place.frontend(2)
    store = await place.store()
    rows = await rows_of(store, await stored(store, 1))
    expected = await answer(plane, rows, tokens=400)
    moved.since()
    stream = await send(Router(plane), make_request(rows, tokens=400), name="echo")
    seen: list[Output] = []
    async with asyncio.timeout(BOUND):
        async for outputs in stream:
            if not seen:
                at = next(link for link in links(plane) if link._streams)
                await workers[at.id.partition(".")[0]].kill()
            seen.extend(outputs)
    assert ids(seen) == expected
    assert moved.since() >= SIZE


async def test_what_the_receiver_forgets_while_the_rest_is_on_its_way_arrives_all_the_same(
    place: Place,
) -> None:
    worker = await place.worker()
    plane, moved = await place.frontend()
    store = await place.store()
    rows = await rows_of(store, await stored(store, 1))
    value = Rows(Buffer(os.urandom(SIZE)), "float32", (ROWS, HIDDEN))
    expected = await answer(plane, unnamed(rows), value, tokens=2 * ROWS)
    await answer(plane, rows)
    moved.since()
    moved.then = worker.cache.clear
    assert await answer(plane, rows, value, tokens=2 * ROWS) == expected
    assert SIZE <= moved.since() < SIZE + 4096
