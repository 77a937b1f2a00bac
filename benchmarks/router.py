"""What a decision of the router costs.

CPU time of `Router.send`, from a checked work to a worker's own `send`.

Workers that do nothing stand behind a plane that lists them; their caches are told by events as a
real plane tells them. Half of the requests ask for a prompt that some worker has, half for one that
nobody has. Memory is what the process grows by while the index fills.

    python -m benchmarks.router [--blocks N ...] [--workers N ...]
"""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Never

import msgspec
import numpy as np

from benchmarks._options import parser_of
from inlay.messages.card import Limits, ModelCard
from inlay.messages.commands import WorkerCommand
from inlay.messages.digest import BLOCK_SIZE, Secret
from inlay.messages.prompt import ROW_DIGEST_SIZE, Buffer, Prompt, Rows, Tokens
from inlay.messages.request import Output, Request, Sampling
from inlay.messages.routing import FrontendLoad, KvEvents, KvSnapshot, Stored, routing_chain
from inlay.router import Router
from inlay.router.decide import Ask, decide
from inlay.router.index import keys_of
from inlay.router.snapshot import Pool
from inlay.transport.api import Stream, Worker

SECRET = Secret(bytes(32))
PAGE = 4096
CHAIN = 128
REQUESTS = 400
CARD = ModelCard(
    name="m", path="m", weights_id="w", dtype="float8_e4m3fn", vocab_size=1000, hidden_size=1,
    limits=Limits(max_model_len=1_000_000, max_num_seqs=1_000_000), engine="idle", engine_version="1",
    block_size=BLOCK_SIZE, num_blocks=100_000, kv_events=True,
)  # fmt: skip


class Idle:
    """A stream in which nothing comes."""

    async def __aiter__(self) -> AsyncIterator[Sequence[Output]]:
        await asyncio.Event().wait()
        yield ()

    def cancel(self) -> None: ...


class Standing:
    """A worker that does nothing."""

    def __init__(self, id_: str) -> None:
        self._id = id_

    @property
    def id(self) -> str:
        return self._id

    @property
    def card(self) -> ModelCard:
        return CARD

    def send(self, request: Request) -> Stream:
        return Idle()

    async def call(self, command: WorkerCommand[object], within: float = 30.0) -> Never:
        raise NotImplementedError


class Standings:
    """A plane of them, which carries what they tell."""

    def __init__(self, number: int) -> None:
        self._workers = [Standing(f"worker-{n}") for n in range(number)]
        self.tell: Callable[[str, KvEvents], None] = lambda id_, events: None

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def workers(self) -> Sequence[Worker]:
        return [worker for worker in self._workers if worker.id]

    def unavailable(self) -> Mapping[str, str]:
        return {}

    async def changed(self) -> None:
        await asyncio.Event().wait()

    def room(self, num_bytes: int) -> memoryview | None:
        return None

    def listen(
        self, events: Callable[[str, KvEvents], None], loads: Callable[[FrontendLoad], None]
    ) -> None:
        self.tell = events

    def publish(self, load: FrontendLoad) -> None: ...

    async def kv_snapshot(self, worker_id: str) -> KvSnapshot:
        return KvSnapshot(0, Buffer(b""))


def resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE


def text(random: Random, length: int) -> Prompt:
    return Prompt.of(Tokens([random.randrange(1000) for _ in range(length)]))


def rows(random: Random, length: int) -> Prompt:
    digests = random.randbytes(ROW_DIGEST_SIZE * length)
    return Prompt.of(Rows(Buffer(bytes(length)), "float8_e4m3fn", (length, 1), digests=digests))


def chains() -> None:
    """The chain of a prompt, whose rows carry their digests already."""
    random = Random(3)
    for length in (256, 2048, 16384, 131072):
        said = []
        for make in (text, rows):
            prompt = make(random, length)
            best = min(_timed(partial(routing_chain, prompt, CARD, SECRET)) for _ in range(5))
            said.append(f"{make.__name__} {1e6 * best:.0f} us")
        print(f"chain of {length} positions: {', '.join(said)}")


def _decide(pool: Pool, ask: Ask) -> object:
    return decide(pool.view(), ask)


def _timed(what: Callable[[], object]) -> float:
    began = time.thread_time()
    what()
    return time.thread_time() - began


async def fill(plane: Standings, num_workers: int, num_blocks: int) -> list[bytes]:
    """Have the workers tell of so many blocks, in prompts of `CHAIN` of which a quarter begin like seven others; some of these prompts."""
    numbers, random = np.random.default_rng(1), Random(2)
    sequences = [0] * num_workers
    known: list[bytes] = []
    made, worst, total, messages = 0, 0.0, 0.0, 0
    gc.collect()
    before = resident()
    while made < num_blocks:
        shared = numbers.bytes(8 * CHAIN // 4)
        for _ in range(8):
            keys = shared + numbers.bytes(8 * CHAIN * 3 // 4)
            worker = random.randrange(num_workers)
            sequences[worker] += 1
            message = KvEvents(sequences[worker], (Stored(keys),))
            took = _timed(partial(plane.tell, f"worker-{worker}", message))
            worst, total, messages = max(worst, took), total + took, messages + 1
            made += CHAIN * 3 // 4
            if random.random() < 1000 * CHAIN / num_blocks:
                known.append(keys)
        made += CHAIN // 4
    print(
        f"  filled: {1e6 * total / messages:.0f} us a message of {CHAIN} blocks, the longest {1e3 * worst:.1f} ms; "
        f"{(resident() - before) / made:.0f} bytes a block"
    )
    return known


async def measure(num_workers: int, num_blocks: int) -> None:
    print(f"{num_workers} workers, {num_blocks / 1e6:g} million blocks")
    plane = Standings(num_workers)
    router = Router(plane, secret=SECRET)
    await router.start()
    caches = router._fleet._caches
    assert caches is not None
    await asyncio.sleep(0)  # the workers are seen
    await asyncio.gather(
        *[followed.asking for followed in caches._followed.values() if followed.asking is not None]
    )
    known = await fill(plane, num_workers, num_blocks)
    pool = router._fleet.pool(router.card("m"))
    looks = [_timed(partial(pool.index.overlap, keys_of(keys))) for keys in known[:REQUESTS]]
    print(f"  look-up of {CHAIN} blocks that are there: {_percentiles(looks)}")
    asks = [Ask(CHAIN * BLOCK_SIZE, keys_of(keys)) for keys in known[:REQUESTS]]
    deciding = [_timed(partial(_decide, pool, ask)) for ask in asks]
    print(f"  decision of a prompt of {CHAIN} blocks: {_percentiles(deciding)}")
    random = Random(4)
    for length in (256, 2048):
        prompts = [make(random, length) for _ in range(REQUESTS // 4) for make in (text, rows)]
        times = []
        for number, prompt in enumerate(prompts * 2):  # each a second time, when it is cached
            request = Request(id=str(number), prompts=(prompt,), params=Sampling(max_tokens=1))
            began = time.thread_time()
            (stream,) = await router.send("m", [request])
            times.append(time.thread_time() - began)
            if number % 3:
                stream.cancel()
        print(f"  Router.send, {length} positions: {_percentiles(times)}")
    request = Request(id="s", prompts=(prompts[0],), params=Sampling(max_tokens=1))
    session = []
    for number in range(REQUESTS):
        began = time.thread_time()
        (stream,) = await router.send(
            "m", [msgspec.structs.replace(request, id=str(number))], session=str(number)
        )
        session.append(time.thread_time() - began)
        stream.cancel()
    print(f"  with a session: {_percentiles(session)}")
    await router.close()


def _percentiles(times: list[float]) -> str:
    times = sorted(times)
    return f"p50 {1e6 * times[len(times) // 2]:.0f} us, p99 {1e6 * times[int(len(times) * 0.99)]:.0f} us"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--workers", type=int, nargs="*", default=[10, 1000])
    parser.add_argument("--blocks", type=int, nargs="*", default=[100_000, 1_000_000, 5_000_000])
    asked = parser.parse_args()
    chains()
    for num_workers in asked.workers:
        for num_blocks in asked.blocks:
            asyncio.run(measure(num_workers, num_blocks))


if __name__ == "__main__":
    main()
