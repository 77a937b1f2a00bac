"""What every plane must do, whatever carries the messages."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from inlay.base.errors import (
    ContextLengthError,
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
)
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.messages.commands import (
    CacheReset,
    Drain,
    ProbeEngine,
    ReadStats,
    ResetPrefixCache,
    Sleep,
    WorkerCommand,
)
from inlay.messages.digest import with_digests
from inlay.messages.outputs import payloads_of
from inlay.messages.prompt import Buffer, Prompt, Rows, Segment, Tokens
from inlay.messages.request import EngineUsage, Output, Payload, Pooling, Request, Sampling, Task
from inlay.transport import ReceiveMemory, TcpPeer, dial
from inlay.transport.api import Plane, Stream, Worker
from inlay.transport.embeds_cache import EmbedsCache
from inlay.transport.endpoint import Endpoint
from inlay.transport.local import LocalPlane
from inlay.transport.messages import FromWorker
from inlay.worker import spawn
from inlay.worker.host import EngineHost
from tests.transport.direct import DirectPlane
from tests.transport.fleet import SECRET, Fleet, found, identity
from tests.transport.nats_server import NatsServer


class Dance(WorkerCommand[CacheReset], frozen=True, tag="dance"):
    """A command that no worker knows."""


class Place:
    """A plane under test and the means to hurt it."""

    def __init__(self, plane: Plane, kill: Callable[[], Awaitable[None]]) -> None:
        self.plane = plane
        self.kill = kill

    @property
    def link(self) -> Any:
        """The connection to its worker."""
        if isinstance(self.plane, LocalPlane):
            return self.plane._links[0]
        return self.plane.workers()[0]

    @property
    def open_streams(self) -> Collection[object]:
        """What its only worker is thought to be at."""
        return dict(self.link._streams)


@asynccontextmanager
async def direct(settings: EngineSettings) -> AsyncIterator[Place]:
    plane = await DirectPlane.around(EchoEngine(settings, SECRET))

    async def kill() -> None:
        plane.worker_ends[0].close()

    yield Place(plane, kill)
    await plane.close()


@asynccontextmanager
async def local(settings: EngineSettings) -> AsyncIterator[Place]:
    process = await spawn(settings, SECRET, arena_bytes=1 << 20)
    plane = LocalPlane([process.channel])
    await plane.start()
    await plane.wait_ready()

    async def kill() -> None:
        os.kill(process.pid, 9)

    yield Place(plane, kill)
    await plane.close()
    await process.close()
    assert not process.alive


@asynccontextmanager
async def over_nats(
    settings: EngineSettings, server: NatsServer, *, dials: bool = False
) -> AsyncIterator[Place]:
    fleet = Fleet(server)
    worker = await fleet.worker(EchoEngine(settings, SECRET), dials=dials)
    plane = await fleet.frontend(SECRET, listens=dials)
    await found(plane)
    yield Place(plane, worker.kill)
    await fleet.close()


@asynccontextmanager
async def connected(settings: EngineSettings, *, neighbours: bool) -> AsyncIterator[Place]:
    engine = EchoEngine(settings, SECRET)
    await engine.start()
    endpoint = Endpoint(
        EngineHost(engine), SECRET, identity(), EmbedsCache(0), neighbours=neighbours
    )
    address = await endpoint.open("127.0.0.1", "127.0.0.1", 0)
    connection: TcpPeer[FromWorker] = await dial(
        address, SECRET, FromWorker, ReceiveMemory(1 << 28)
    )
    plane = LocalPlane([connection])
    await plane.start()
    await plane.wait_ready()

    async def kill() -> None:
        for end in endpoint._serving.values():
            end.abort()

    yield Place(plane, kill)
    await plane.close()
    await endpoint.close()
    await engine.close()
    await asyncio.sleep(0.05)


@pytest.fixture(params=["direct", "local", "nats", "nats-dialling", "tcp", "neighbours"])
async def place(
    request: pytest.FixtureRequest, echo_settings: EngineSettings, nats_server: NatsServer
) -> AsyncIterator[Place]:
    ways: dict[str, Callable[[EngineSettings], AbstractAsyncContextManager[Place]]] = {
        "direct": direct,
        "local": local,
        "nats": partial(over_nats, server=nats_server),
        "nats-dialling": partial(over_nats, server=nats_server, dials=True),
        "tcp": partial(connected, neighbours=False),
        "neighbours": partial(connected, neighbours=True),
    }
    async with ways[request.param](echo_settings) as opened:
        yield opened


@pytest.fixture(params=["direct", "local"])
async def shared_memory(
    request: pytest.FixtureRequest, echo_settings: EngineSettings
) -> AsyncIterator[Place]:
    """A plane whose ends share memory."""
    async with {"direct": direct, "local": local}[request.param](echo_settings) as opened:
        yield opened


def make_request(id_: str, *segments: Segment, max_tokens: int = 20, **fields: object) -> Request:
    prompt = with_digests(Prompt.of(*segments), SECRET)
    return Request(id=id_, prompts=(prompt,), params=Sampling(max_tokens=max_tokens), **fields)  # type: ignore[arg-type]


def random_rows(num: int, hidden: int = 64) -> Rows:
    return Rows(Buffer(os.urandom(4 * num * hidden)), "float32", (num, hidden))


async def collect(stream: Stream) -> list[Output]:
    return [output async for outputs in stream for output in outputs]


def ids(outputs: list[Output]) -> list[int]:
    return [id_ for output in outputs for id_ in output.token_ids]


async def test_a_stream_carries_every_output_in_order_and_ends(place: Place) -> None:
    outputs = await collect(
        place.plane.workers()[0].send(make_request("a", Tokens([5, 6, 7]), max_tokens=7))
    )
    assert ids(outputs) == [5, 6, 7, 5, 6, 7, 5]
    assert [output.offset for output in outputs] == list(range(7))
    assert outputs[-1].finish_reason == "length"
    assert outputs[-1].usage is not None
    assert outputs[-1].usage.completion_tokens == 7


async def test_a_resumed_request_goes_on_where_it_stopped(place: Place) -> None:
    worker = place.plane.workers()[0]
    whole = ids(await collect(worker.send(make_request("a", Tokens([1, 2, 3]), max_tokens=10))))
    rest = await collect(
        worker.send(
            make_request(
                "b", Tokens([1, 2, 3]), max_tokens=10, prior_output=tuple(whole[:4]), attempt=1
            )
        )
    )
    assert ids(rest) == whole[4:]
    assert (rest[0].offset, rest[0].attempt) == (4, 1)


@pytest.mark.parametrize(
    "num_rows", [1, 1000, 3000, 9000], ids=["inline", "shared", "larger", "beyond the arena"]
)
async def test_rows_of_any_size_arrive_as_they_were_sent(place: Place, num_rows: int) -> None:
    worker = place.plane.workers()[0]
    plain = random_rows(num_rows)
    # The engine answers with ids drawn from the rows' digests; without digests on the request it
    # computes them from the bytes.
    bare = Request(
        id="bare",
        prompts=(Prompt.of(Tokens([1]), plain),),
        params=Sampling(max_tokens=num_rows + 1),
    )
    marked = make_request("marked", Tokens([1]), plain, max_tokens=num_rows + 1)
    first, second = await asyncio.gather(collect(worker.send(bare)), collect(worker.send(marked)))
    assert ids(first) == ids(second)
    assert len(set(ids(first))) > 1 or num_rows == 1


async def test_rows_of_a_stored_prompt_arrive_as_they_were_sent_each_time(place: Place) -> None:
    worker = place.plane.workers()[0]
    plain = random_rows(1000)
    again = Rows(Buffer(plain.data.view, "owner.pe-id/float32.0"), plain.dtype, plain.shape)
    requests = [
        Request(
            id=str(number),
            prompts=(Prompt.of(Tokens([1]), rows),),
            params=Sampling(max_tokens=1001),
        )
        for number, rows in enumerate([plain, again, again, again.slice(0, 1000), plain])
    ]
    first, second = [await collect(worker.send(one)) for one in requests[:2]]
    rest = await asyncio.gather(*(collect(worker.send(one)) for one in requests[2:]))
    assert len(set(ids(first))) > 1
    assert all(ids(answer) == ids(first) for answer in (second, *rest))


async def test_the_arena_is_whole_again_after_many_prompts(shared_memory: Place) -> None:
    worker = shared_memory.plane.workers()[0]
    arena = shared_memory.link._carrier.arena
    prompts = [make_request(str(n), Tokens([n]), random_rows(300 + 50 * n)) for n in range(20)]
    streams = [worker.send(prompt) for prompt in prompts]
    assert arena.held_bytes
    for stream in streams[::3]:
        stream.cancel()
    await asyncio.gather(*map(collect, streams))
    assert not arena.held_bytes
    del prompts, streams
    assert arena.free_bytes == arena.size


async def test_requests_that_share_rows_share_them_on_the_way(shared_memory: Place) -> None:
    worker = shared_memory.plane.workers()[0]
    arena = shared_memory.link._carrier.arena
    shared = with_digests(Prompt.of(random_rows(1000)), SECRET)
    requests = [
        Request(id=str(n), prompts=(shared,), params=Sampling(max_tokens=50)) for n in range(8)
    ]
    streams = [worker.send(one) for one in requests]
    assert arena.held_bytes < 2 * shared.nbytes
    answers = await asyncio.gather(*map(collect, streams))
    assert all(ids(answer) == ids(answers[0]) for answer in answers)
    assert not arena.held_bytes


async def test_a_cancelled_request_ends_with_abort_and_its_neighbours_go_on(place: Place) -> None:
    worker = place.plane.workers()[0]
    neighbour = worker.send(make_request("n", Tokens([9]), max_tokens=3000))
    stream = worker.send(make_request("c", Tokens([1]), max_tokens=100_000))
    seen: list[Output] = []
    async for outputs in stream:
        seen.extend(outputs)
        stream.cancel()
        stream.cancel()
    assert seen[-1].finish_reason == "abort"
    assert len(ids(seen)) < 100_000
    assert len(ids(await collect(neighbour))) == 3000
    stream.cancel()


async def test_a_refused_request_raises_the_workers_own_error(place: Place) -> None:
    worker = place.plane.workers()[0]
    with pytest.raises(ContextLengthError, match="maximum context length is 200000"):
        await collect(worker.send(make_request("long", Tokens([1]), max_tokens=200_000)))
    with pytest.raises(InvalidRequestError, match="no positions"):
        await collect(worker.send(make_request("empty")))
    assert ids(await collect(worker.send(make_request("after", Tokens([4]), max_tokens=1)))) == [4]


async def test_a_deadline_that_passed_raises(place: Place) -> None:
    stream = place.plane.workers()[0].send(
        make_request("late", Tokens([1]), max_tokens=150_000, deadline=0.01)
    )
    with pytest.raises(DeadlineExceededError):
        await collect(stream)


async def test_commands_are_answered(place: Place) -> None:
    worker = place.plane.workers()[0]
    await collect(worker.send(make_request("a", Tokens([1]), max_tokens=3)))
    stats, probed, reset = await asyncio.gather(
        worker.call(ReadStats()), worker.call(ProbeEngine()), worker.call(ResetPrefixCache())
    )
    assert stats.generated_tokens == 3
    assert probed.seconds >= 0
    assert reset == CacheReset(0)
    with pytest.raises(InvalidRequestError, match="--enable-sleep-mode"):
        await worker.call(Sleep())


async def test_a_command_of_a_later_version_is_refused_alone(place: Place) -> None:
    worker = place.plane.workers()[0]
    with pytest.raises(InvalidRequestError, match=r"cannot follow this command: .*'dance'"):
        await worker.call(Dance())
    assert (await worker.call(Drain())).requests == 0


async def test_a_draining_worker_finishes_what_it_has_and_refuses_more(place: Place) -> None:
    worker = place.plane.workers()[0]
    before = worker.send(make_request("before", Tokens([1]), max_tokens=500))
    await worker.call(Drain())
    with pytest.raises(OverloadedError, match="draining"):
        await collect(worker.send(make_request("after", Tokens([1]))))
    assert len(ids(await collect(before))) == 500


async def test_when_the_worker_dies_its_streams_and_calls_say_so_at_once(place: Place) -> None:
    worker = place.plane.workers()[0]
    stream = worker.send(make_request("a", Tokens([1]), max_tokens=150_000))
    iterator = aiter(stream)
    assert await anext(iterator)
    await place.kill()
    with pytest.raises(OverloadedError, match="gone"):
        async for _ in iterator:
            pass
    while place.plane.workers():
        await place.plane.changed()
    with pytest.raises(OverloadedError, match="gone"):
        worker.send(make_request("b", Tokens([1])))
    with pytest.raises(OverloadedError, match="gone"):
        await worker.call(ReadStats())


async def test_many_streams_at_once_are_kept_apart(place: Place) -> None:
    worker = place.plane.workers()[0]
    answers = await asyncio.gather(
        *(
            collect(worker.send(make_request(str(n), Tokens([n, n + 1]), max_tokens=40)))
            for n in range(200)
        )
    )
    for n, answer in enumerate(answers):
        assert ids(answer) == [n, n + 1] * 20


async def test_what_is_no_message_ends_everything_that_waits(echo_settings: EngineSettings) -> None:
    plane = await DirectPlane.around(EchoEngine(echo_settings, SECRET))
    worker = plane.workers()[0]
    iterator = aiter(worker.send(make_request("a", Tokens([1]), max_tokens=150_000)))
    assert await anext(iterator)
    # A frame of five bytes that are not msgpack.
    plane.worker_ends[0]._writer.write(b"\x05\0\0\0\0\0\0\0" + b"\xc1" * 5)
    with pytest.raises(OverloadedError, match="gone"):
        async for _ in iterator:
            pass
    while plane.workers():
        await plane.changed()
    await plane.close()


async def test_a_request_that_cannot_be_sent_leaves_nothing_behind(place: Place) -> None:
    worker = place.plane.workers()[0]
    with pytest.raises(OverflowError):
        worker.send(make_request("a", Tokens([2**70])))
    assert not place.open_streams
    assert ids(await collect(worker.send(make_request("a", Tokens([4]), max_tokens=1)))) == [4]


def make_embed_request(id_: str, *prompts: Prompt) -> Request:
    marked = tuple(with_digests(prompt, SECRET) for prompt in prompts)
    return Request(id=id_, task=Task.EMBED, prompts=marked, params=Pooling())


async def embed(worker: Worker, id_: str, *prompts: Prompt) -> Payload:
    (found,) = await payloads_of(worker.send(make_embed_request(id_, *prompts)))
    return found


def vectors_of(answer: Payload) -> np.ndarray:
    return np.frombuffer(answer.data.view, np.float32).reshape(answer.shape)


async def test_vectors_come_as_one_buffer_in_the_order_of_their_prompts(place: Place) -> None:
    worker = place.plane.workers()[0]
    prompts = [Prompt.of(Tokens([n, n + 1])) for n in range(10_000)]
    (output,) = await collect(worker.send(make_embed_request("all", *prompts)))
    assert (output.finish_reason, output.usage) == ("stop", EngineUsage(20_000, 0))
    vectors = vectors_of(output.payloads[0])
    assert vectors.shape == (10_000, 64)
    alone = [vectors_of(await embed(worker, str(n), prompts[n]))[0] for n in (0, 350, 9999)]
    assert (vectors[[0, 350, 9999]] == np.stack(alone)).all()


async def test_rows_to_be_embedded_leave_no_room_taken(shared_memory: Place) -> None:
    worker = shared_memory.plane.workers()[0]
    rows = random_rows(1000)
    first, second = [await embed(worker, name, Prompt.of(rows, Tokens([5]))) for name in ("a", "b")]
    assert first.data == second.data
    assert shared_memory.link._carrier.arena.held_bytes == 0


async def test_what_cannot_be_embedded_is_refused_with_the_engines_own_words(place: Place) -> None:
    worker = place.plane.workers()[0]
    with pytest.raises(ContextLengthError, match="maximum context length is 200000"):
        await embed(worker, "long", Prompt.of(Tokens([1] * 200_001)))


async def test_vectors_that_nobody_waits_for_any_more_free_their_room(shared_memory: Place) -> None:
    worker = shared_memory.plane.workers()[0]
    worker.send(make_embed_request("left", Prompt.of(random_rows(1000)))).cancel()
    await worker.call(ProbeEngine())
    assert shared_memory.link._carrier.arena.held_bytes == 0


async def test_whoever_waits_for_vectors_hears_that_the_worker_is_gone(place: Place) -> None:
    worker = place.plane.workers()[0]
    waiting = asyncio.create_task(embed(worker, "lost", *[Prompt.of(Tokens([1] * 3000))] * 3000))
    await asyncio.sleep(0)
    await place.kill()
    with pytest.raises(OverloadedError, match="gone"):
        await waiting
