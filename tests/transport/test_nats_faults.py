"""Parts of a fleet die, freeze and come back, and every stream ends with exactly the tokens of an undisturbed one."""

import asyncio
import os
import signal
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path

import pytest

from inlay.base.errors import OverloadedError
from inlay.engine.settings import EngineSettings
from inlay.messages.card import Stats
from inlay.messages.commands import ReadStats
from inlay.messages.digest import with_digests
from inlay.messages.prompt import Buffer, Prompt, Rows, Tokens
from inlay.messages.request import Output, Request, Sampling
from inlay.router import Router
from inlay.transport.api import Stream
from inlay.transport.link import RequestStream
from inlay.transport.nats.frontend import NatsPlane
from inlay.transport.nats.member import Member
from inlay.transport.output_queue import MERGED
from tests.router.sending import send
from tests.transport.fleet import SECRET, found, links
from tests.transport.nats_server import NatsServer
from tests.transport.paced import PacedWorker

pytestmark = pytest.mark.slow

STREAMS = 20
TOKENS = 700
BOUND = 60
"""Seconds within which everything must have come to an end: nothing hangs."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path)
    server.start()
    yield server
    server.kill()


class Place:
    """A namespace on a server, its worker processes and this process's frontend."""

    def __init__(self, server: NatsServer, model: str) -> None:
        self.server = server
        self.namespace = uuid.uuid4().hex
        self._model = model
        self.workers: list[PacedWorker] = []
        self.planes: list[NatsPlane] = []

    def worker(self) -> PacedWorker:
        self.workers.append(PacedWorker(self.server.url, self.namespace, self._model))
        return self.workers[-1]

    async def frontend(self) -> NatsPlane:
        member = await Member.join(self.server.settings(self.namespace), "frontend")
        self.planes.append(NatsPlane(member, SECRET))
        await self.planes[-1].start()
        return self.planes[-1]

    def at(self, plane: NatsPlane, worker: PacedWorker) -> int:
        """Streams a frontend has at a worker."""
        return sum(len(link._streams) for link in links(plane) if link.id.startswith(worker.id))

    async def busy(self, plane: NatsPlane, worker: PacedWorker) -> None:
        """Return when streams are in their middle at a worker."""
        async with asyncio.timeout(BOUND):
            while not self.at(plane, worker):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)


@pytest.fixture
async def place(server: NatsServer, echo_settings: EngineSettings) -> AsyncIterator[Place]:
    place = Place(server, echo_settings.model.model)
    yield place
    for plane in place.planes:
        await plane.close()
    for worker in place.workers:
        worker.end()


def prompt(number: int) -> list[int]:
    return [number + 1, number + 2, *range(300 + number % 7)]


def make_request(number: int, tokens: int = TOKENS) -> Request:
    return Request(
        id=str(number),
        prompts=(Prompt.of(Tokens(prompt(number))),),
        params=Sampling(max_tokens=tokens),
    )


async def read(stream: Stream, seen: "list[Output] | None" = None) -> list[int]:
    told = [] if seen is None else seen
    async for outputs in stream:
        told.extend(outputs)
    assert told[-1].finish_reason == "length"
    usage = told[-1].usage
    ids = [id_ for output in told for id_ in output.token_ids]
    assert usage is not None
    assert usage.completion_tokens == len(ids)
    return ids


async def answer(router: Router, request: Request, seen: "list[Output] | None" = None) -> list[int]:
    return await read(await send(router, request), seen)


def start(
    router: Router, count: int = STREAMS, tokens: int = TOKENS
) -> "list[asyncio.Task[list[int]]]":
    return [asyncio.create_task(answer(router, make_request(n, tokens))) for n in range(count)]


async def check(tasks: "list[asyncio.Task[list[int]]]", tokens: int = TOKENS) -> None:
    async with asyncio.timeout(BOUND):
        answers = await asyncio.gather(*tasks)
    for number, answer in enumerate(answers):
        assert answer == list(islice(cycle(prompt(number)), tokens))


async def until_quiet(plane: NatsPlane, worker: PacedWorker) -> Stats:
    """Return the counters of a worker when its engine has nothing to do."""
    async with asyncio.timeout(BOUND):
        while True:
            for link in plane.workers():
                if link.id.startswith(worker.id):
                    with suppress(OverloadedError):
                        stats: Stats = await link.call(ReadStats())
                        if stats.running == 0:
                            return stats
            await asyncio.sleep(0.1)


async def test_a_worker_is_killed_and_its_streams_go_on_elsewhere(place: Place) -> None:
    first, _ = place.worker(), place.worker()
    plane = await place.frontend()
    await found(plane, 2)
    tasks = start(Router(plane))
    await place.busy(plane, first)
    first.send(signal.SIGKILL)
    await check(tasks)


async def test_a_frozen_worker_is_replaced_and_gives_up_when_it_wakes(place: Place) -> None:
    first, _ = place.worker(), place.worker()
    plane = await place.frontend()
    await found(plane, 2)
    tasks = start(Router(plane), tokens=3000)
    await place.busy(plane, first)
    first.send(signal.SIGSTOP)
    async with asyncio.timeout(BOUND):
        while len(plane.workers()) == 2 or place.at(plane, first):
            await plane.changed()
    first.send(signal.SIGCONT)
    await found(plane, 2)
    # It had more than ten seconds of work, of which nobody waits for the answer.
    stats = await until_quiet(plane, first)
    assert stats.generated_tokens < STREAMS // 2 * 3000
    await check(tasks, 3000)


async def test_a_worker_that_ends_in_the_middle_hands_its_streams_over(place: Place) -> None:
    first, _ = place.worker(), place.worker()
    plane = await place.frontend()
    await found(plane, 2)
    tasks = start(Router(plane))
    await place.busy(plane, first)
    first.send(signal.SIGTERM)
    await check(tasks)


async def test_nats_is_restarted_and_streams_go_on_where_they_were(place: Place) -> None:
    place.worker(), place.worker()
    plane = await place.frontend()
    await found(plane, 2)
    seen: list[list[Output]] = [[] for _ in range(STREAMS)]
    router = Router(plane)
    tasks = [
        asyncio.create_task(answer(router, make_request(n), told)) for n, told in enumerate(seen)
    ]
    await asyncio.sleep(0.5)
    place.server.kill()
    await asyncio.sleep(1)
    place.server.start()
    await check(tasks)
    # Nobody noticed: requests and outputs do not pass NATS.
    assert {output.attempt for told in seen for output in told} == {0}
    # And the fleet is as it was.
    await found(plane, 2)
    await check(start(router, 3, 20), 20)


@pytest.mark.parametrize("seconds", [1.0, 6.0])
async def test_nats_stands_still_and_nobody_is_given_up(place: Place, seconds: float) -> None:
    place.worker(), place.worker()
    plane = await place.frontend()
    await found(plane, 2)
    tasks = start(Router(plane), tokens=1500)
    await asyncio.sleep(0.5)
    place.server.freeze()
    await asyncio.sleep(seconds)
    assert len(plane.workers()) == 2
    place.server.thaw()
    await check(tasks, 1500)


async def test_when_nats_does_not_come_back_requests_go_on(place: Place) -> None:
    place.worker()
    plane = await place.frontend()
    await found(plane)
    router = Router(plane)
    tasks = start(router)
    await asyncio.sleep(0.5)
    place.server.kill()
    await check(tasks)
    async with asyncio.timeout(BOUND):
        while plane.unreachable() is None:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    await check(start(router, 3, 20), 20)


async def test_a_client_that_does_not_read_stalls_neither_its_engine_nor_its_neighbours(
    place: Place,
) -> None:
    worker = place.worker()
    plane = await place.frontend()
    (link,) = await found(plane)
    slow = link.send(make_request(0, 3000))
    iterator = aiter(slow)
    told = list(await anext(iterator))
    await check(start(Router(plane), 4), TOKENS)
    # All of the slow one's answer is made, and waits as few outputs.
    await until_quiet(plane, worker)
    assert isinstance(slow, RequestStream)
    assert len(slow._outputs.waiting) <= MERGED + 3000 // MERGED
    told += [output async for outputs in iterator for output in outputs]
    ids = [id_ for output in told for id_ in output.token_ids]
    assert ids == list(islice(cycle(prompt(0)), 3000))


async def test_requests_of_a_frontend_that_is_gone_end_at_their_workers(place: Place) -> None:
    worker = place.worker()
    lost, other = await place.frontend(), await place.frontend()
    await found(lost)
    await found(other)
    tasks = start(Router(lost), tokens=100_000)
    async with asyncio.timeout(BOUND):
        while (await other.workers()[0].call(ReadStats())).running < STREAMS:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    # As when its process is killed: the connections close, and nobody is told why.
    await lost._discovery.close()
    for one in lost._connected.values():
        one.wanted = False
        assert one.link is not None
        one.link._carrier.abort()  # type: ignore[attr-defined]
    await lost._member.control.close()
    # What they had to do takes more than six minutes.
    await until_quiet(other, worker)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_large_prompt_whose_worker_dies_on_the_way_is_sent_elsewhere(place: Place) -> None:
    first, _ = place.worker(), place.worker()
    plane = await place.frontend()
    await found(plane, 2)
    rows = Rows(Buffer(os.urandom(64 * 4 * 30_000)), "float32", (30_000, 64))
    router = Router(plane)
    # Digests are made here: the engine of these workers runs on the loop that their heartbeats come
    # from.
    prompt = with_digests(Prompt.of(rows), SECRET)
    big = Request(id="big", prompts=(prompt,), params=Sampling(max_tokens=30))
    whole = await answer(router, big)
    for each in range(2):
        stream = await send(
            router, Request(id=f"big {each}", prompts=(big.prompt,), params=big.sampling)
        )
        if place.at(plane, first):
            break
    task = asyncio.create_task(read(stream))
    await asyncio.sleep(0.01)
    first.send(signal.SIGSTOP)
    async with asyncio.timeout(BOUND):
        assert await task == whole
    first.send(signal.SIGCONT)


async def test_connections_that_are_cut_come_back_and_streams_go_on(place: Place) -> None:
    place.worker()
    plane = await place.frontend()
    await found(plane)
    tasks = start(Router(plane), 8, 1000)
    for _ in range(5):
        await asyncio.sleep(0.4)
        for link in links(plane):
            link._carrier.abort()  # type: ignore[attr-defined]
    await check(tasks, 1000)
