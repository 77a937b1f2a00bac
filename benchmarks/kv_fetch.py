"""What it is worth to fetch a prompt's keys and values from another worker.

    python -m benchmarks.kv_fetch [--positions 2048 8192] [--layers 28] [--rounds 3] [--windows 30]
        [--parts first resuming cost steps]

Two engines with a random model of Qwen3-0.6B's shape in bfloat16. One has computed prompts; the
other answers them with one token, by computing and by fetching in turn, over connections of one
worker to another as they are in a fleet: of neighbours on one machine, who share memory, and TCP
with TLS over loopback; both ends in this process, on its cores. Then it reads back what it evicted
itself, from host memory and from disk, and goes on with a request of 4,096 positions that the first
gave up. The median of each is printed: seconds, and CPU seconds of both ends, which neighbours on
the machine disturb less; what a byte costs beside copying it, also over TCP without TLS, which no
fleet has; and the bandwidth above which fetching is worth it. Last come the steps of a request that
is being decoded, while pages come from a process of its own, as they do in a fleet, and while none
do.

Tried without gain: pages written through the caches (0.42 to 0.52 CPU seconds a GB against 0.29);
chunks of 512 KB to 2 MB over TCP; uvloop in the engine's process; sums of a page taken after it was
copied (0.18 against 0.15). Questions are of 32 MB: from a neighbour they take 2.0 to 2.3 copies,
those of 16 MB 2.4 to 2.8.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from benchmarks._options import parser_of
from benchmarks._random_models import write_model
from inlay.base.address import Address
from inlay.base.pace import freeze_gc
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.cache.table import PageRun
from inlay.engine.torch.engine import TorchEngine
from inlay.engine.torch.pages.price import WorkerPrice
from inlay.engine.torch.step import Core
from inlay.messages.digest import Secret
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import PAGES, Output, Request, Sampling, Source
from inlay.transport.embeds_cache import EmbedsCache
from inlay.transport.endpoint import Endpoint
from inlay.transport.local.arena import anonymous_file
from inlay.transport.peers import PeerConnections
from inlay.transport.tls import load_identity, make_certificate
from inlay.worker.host import EngineHost

SECRET = Secret(bytes(32))
FETCHES = 12
"""Fetches of which the CPU time is taken; the first makes connections."""
TURNS = 4
"""Times that these are taken, between copies."""


class _Always(WorkerPrice):
    """Fetches whatever it costs, which is to be measured."""

    def is_worth(self, source: Address | str, positions: int, num_bytes: int) -> bool:
        return True

    def timeout_for(self, positions: int, deadline: float | None) -> float:
        return 600.0


class Took(NamedTuple):
    """Seconds, and CPU seconds of this process."""

    wall: float
    cpu: float


def median(times: Sequence[Took]) -> Took:
    """Return the medians of both. The first round makes connections and warms up."""
    rest = times[1:] or times
    return Took(*(statistics.median(part) for part in zip(*rest, strict=True)))


async def first_token(
    engine: TorchEngine, prompt: Prompt, *sources: Source, prior: tuple[int, ...] = ()
) -> tuple[Took, int]:
    """Time to the next token of a prompt, and how much of it was cached then."""
    ended: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
    sampling = Sampling(max_tokens=1 + len(prior), temperature=0.0, ignore_eos=True)
    began = Took(time.perf_counter(), time.process_time())
    engine.submit(
        Request(id="one", prompts=(prompt,), params=sampling, sources=sources, prior_output=prior),
        ended.set_result,
    )
    output = await ended
    if output.error is not None or output.usage is None:
        raise RuntimeError(f"no answer: {output.error}")
    took = Took(time.perf_counter() - began.wall, time.process_time() - began.cpu)
    return took, output.usage.cached_tokens


async def evict(engine: TorchEngine) -> None:
    """Have the cache evict all of its pages, and wait until they are kept."""
    tiers = engine._exchange and engine._exchange.tiers
    if not tiers:
        raise RuntimeError("the engine keeps nothing")

    def some(core: Core) -> int:
        table, run = core.scheduler.table, PageRun()
        # Few at a time: what comes faster than it can be sealed is not kept.
        table.grow([run], table.free + min(8, table.available - table.free))
        if core.cached.offloading is not None:
            core.cached.offloading.copy()
        table.release([run])
        return table.available - table.free

    while await engine._ask(some):
        await asyncio.to_thread(tiers.flush)
    await asyncio.to_thread(tiers.write_rest)


async def kept(
    settings: EngineSettings, prompts: list[Prompt], size: float | None, folder: str | None
) -> list[Took]:
    """Times to the first token of prompts whose pages are in host memory, or on disk."""
    changes = {
        "enable_kv_fetch": False,
        "kv_offloading_size": size,
        "kv_offloading_dir": None if folder is None else Path(folder),
    }
    engine = TorchEngine(settings.replace(**changes), SECRET)
    engine.use_host_memory(anonymous_file(int((size or 0) * 1024**3)))
    await engine.start()
    if engine._exchange is None:
        raise RuntimeError("the engine keeps nothing")
    engine._exchange.price = _Always()
    times = []
    for prompt in prompts:
        await first_token(engine, prompt)
        await evict(engine)
        took, cached = await first_token(engine, prompt)
        page = await engine._ask(lambda core: core.bounds.page_size)
        if cached != (len(prompt) - 1) // page * page:
            raise RuntimeError(f"{cached} positions were cached")
        times.append(took)
    await engine.close()
    return times


def copying() -> float:
    """CPU seconds of copying a GB from memory to memory."""
    source = torch.ones(1 << 28, dtype=torch.uint8)
    target = torch.empty_like(source)
    times = []
    for _ in range(9):
        began = time.process_time()
        target.copy_(source)
        times.append((time.process_time() - began) / len(source) * 1e9)
    return statistics.median(times[1:])


class Steps:
    """What each turn of an engine's thread takes: a step, and what is copied before it."""

    def __init__(self, engine: TorchEngine) -> None:
        self.times: list[Took] = []
        self.came = asyncio.Event()
        turn, loop = engine._turn, asyncio.get_running_loop()

        def timed(core: Core) -> None:
            began = Took(time.perf_counter(), time.thread_time())
            turn(core)
            took = Took(time.perf_counter() - began.wall, time.thread_time() - began.cpu)
            self.times.append(took)
            loop.call_soon_threadsafe(self.came.set)

        engine._turn = timed  # type: ignore[method-assign]

    async def until(self, count: int) -> None:
        """Return once so many were noted."""
        while len(self.times) < count:
            self.came.clear()
            await self.came.wait()


def p99_ratio(alone: list[list[float]], during: list[list[float]]) -> tuple[float, float, float]:
    """Return p99 of some times over that of others, and its confidence interval of 95%.

    Windows of both were taken in turns; the interval is of windows drawn again (bootstrap).
    """
    first, second = np.array(alone), np.array(during)
    drawn = np.random.default_rng(1).integers(0, len(first), (2000, len(first)))
    ratios = [
        np.quantile(second[some], 0.99) / np.quantile(first[some], 0.99)
        for some in (slice(None), *drawn)
    ]
    low, high = np.quantile(ratios[1:], (0.025, 0.975))
    return float(ratios[0]), float(low), float(high)


class Fleet:
    """An engine that gives pages, and one that asks it over a connection."""

    def __init__(self, settings: EngineSettings) -> None:
        self.giving, self.asking = (TorchEngine(settings, SECRET) for _ in range(2))
        self.steps = Steps(self.asking)
        self._peers = PeerConnections(SECRET)

    async def start(self) -> None:
        await self.giving.start()
        await self.asking.start()
        self.asking.use_peers(self._peers)
        identity, host = load_identity(make_certificate()), EngineHost(self.giving)
        # Without TLS there is no fingerprint either.
        without: Any = {"context": None, "fingerprint": b""}
        plain = identity._replace(**without)
        self._endpoints = [
            Endpoint(host, SECRET, each, EmbedsCache(0), neighbours=way)
            for each, way in ((identity, True), (identity, False), (plain, False))
        ]
        *self.sources, self.plain = [
            Source(PAGES, (await endpoint.open("127.0.0.1", "127.0.0.1", 0),))
            for endpoint in self._endpoints
        ]
        exchange, model = self.asking._exchange, self.giving._model
        if exchange is None or model is None:
            raise RuntimeError("the engines do not fetch")
        exchange.price = _Always()
        self.position_bytes = model.page_bytes(16) // 16
        # As workers do once they serve.
        freeze_gc()

    async def close(self) -> None:
        await self._peers.close()
        for endpoint in self._endpoints:
            await endpoint.close()
        await self.giving.close()
        await self.asking.close()

    async def all_ways(self, prompt: Prompt, prior: tuple[int, ...] = ()) -> list[Took]:
        """Times to the next token.

        Computed, fetched from a neighbour and over TCP, and where all is here.
        """
        await self.giving.reset_prefix_cache()
        await first_token(self.giving, prompt, prior=prior)
        found = []
        for sources in ((), *((source,) for source in self.sources), None):
            if sources is not None:
                await self.asking.reset_prefix_cache()
            took, cached = await first_token(self.asking, prompt, *sources or (), prior=prior)
            if bool(cached) == (sources == ()):
                raise RuntimeError(f"{cached} positions were cached")
            found.append(took)
        return found

    async def fetches(self, prompt: Prompt, source: Source, count: int) -> list[float]:
        """CPU seconds of fetches alone, of a prompt that the other has: nothing is computed."""
        found = []
        for _ in range(count):
            await self.asking.reset_prefix_cache()
            ended: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
            request = Request(
                id="fetch",
                prompts=(prompt,),
                params=Sampling(max_tokens=1),
                sources=(source,),
                prefetch=True,
            )
            began = time.process_time()
            self.asking.submit(request, ended.set_result)
            await ended
            found.append(time.process_time() - began)
        return found

    async def disturbed(
        self, prompt: Prompt, source: Source, windows: int, size: int
    ) -> tuple[list[list[Took]], list[list[Took]]]:
        """Return steps of a request that decodes: windows of `size`, without and with imports."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        begun = asyncio.Event()

        def emit(output: Output) -> None:
            begun.set()
            if output.finish_reason is not None:
                ended.set_result(None)

        most = Sampling(max_tokens=4096, temperature=0.0, ignore_eos=True)
        short = Prompt.of(Tokens(list(range(3, 67))))
        self.asking.submit(Request(id="other", prompts=(short,), params=most), emit)
        await begun.wait()
        found: tuple[list[list[Took]], list[list[Took]]] = ([], [])
        for number in range(2 * windows):
            imports = bool(number % 2)
            importing = asyncio.create_task(self._import(prompt, source)) if imports else None
            # What the last window began is over.
            await self.steps.until(len(self.steps.times) + 2)
            start = len(self.steps.times)
            await self.steps.until(start + size)
            found[imports].append(self.steps.times[start : start + size])
            if importing is not None:
                importing.cancel()
                await asyncio.gather(importing, return_exceptions=True)
        self.asking.abort("other")
        await ended
        return found

    async def _import(self, prompt: Prompt, source: Source) -> None:
        """Bring a prompt's pages again and again."""
        while True:
            await self.asking.reset_prefix_cache()
            ahead: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
            sampling = Sampling(max_tokens=1)
            request = Request(
                id="import",
                prompts=(prompt,),
                params=sampling,
                sources=(source,),
                prefetch=True,
            )
            self.asking.submit(request, ahead.set_result)
            try:
                await asyncio.shield(ahead)
            except asyncio.CancelledError:
                self.asking.abort("import")
                await ahead
                raise


async def cost_of_fetches(fleet: Fleet, prompt: Prompt) -> None:
    """Print what a byte costs beside copying it."""
    await fleet.giving.reset_prefix_cache()
    await first_token(fleet.giving, prompt)
    sources = zip(
        ("neighbour", "peer, TLS", "peer, no TLS"), (*fleet.sources, fleet.plain), strict=True
    )
    for name, source in sources:
        costs, copies = [], []
        for _ in range(TURNS):
            copied = copying()
            found = (await fleet.fetches(prompt, source, FETCHES))[1:]
            _, cached = await first_token(fleet.asking, prompt)
            costs.append(statistics.median(found) / (cached * fleet.position_bytes) * 1e9)
            copies.append(costs[-1] / ((copied + copying()) / 2))
        print(
            f"{FETCHES - 1} fetches alone of {cached} positions, {TURNS} turns, {name}: "
            f"{_each(costs, 3)} CPU s a GB, {_each(copies, 2)} copies",
            flush=True,
        )


def _each(values: Sequence[float], digits: int) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values)


def random_prompt(positions: int, generator: torch.Generator) -> Prompt:
    """Return a prompt that was not computed before."""
    return Prompt.of(Tokens(torch.randint(3, 150_000, (positions,), generator=generator).tolist()))


@asynccontextmanager
async def another(directory: Path) -> AsyncIterator[dict[str, Source]]:
    """A process that has computed `given_prompt` and gives its pages, over each way."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.kv_fetch", "--give", str(directory),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    if process.stdout is None:
        raise RuntimeError("the process has no pipe")
    try:
        found = msgspec.json.decode(await process.stdout.readline(), type=dict[str, Address])
        yield {way: Source(PAGES, (address,)) for way, address in found.items()}
    finally:
        process.kill()
        await process.wait()


def given_prompt() -> Prompt:
    """Return the prompt whose pages the other process gives."""
    return random_prompt(2048, torch.Generator().manual_seed(2))


async def give(directory: Path) -> None:
    """Compute the prompt, print addresses, and give the pages there."""
    engine = TorchEngine(settings_of(directory, 2048), SECRET)
    await engine.start()
    await first_token(engine, given_prompt())
    host, identity = EngineHost(engine), load_identity(make_certificate())
    endpoints = {
        way: Endpoint(host, SECRET, identity, EmbedsCache(0), neighbours=way == "neighbour")
        for way in ("neighbour", "peer, TLS")
    }
    addresses = {
        way: await endpoint.open("127.0.0.1", "127.0.0.1", 0) for way, endpoint in endpoints.items()
    }
    freeze_gc()
    print(msgspec.json.encode(addresses).decode(), flush=True)
    await asyncio.Event().wait()


async def disturbance(fleet: Fleet, directory: Path, windows: int) -> None:
    """Print how much longer others' steps take while pages come."""
    async with another(directory) as sources:
        for way, source in sources.items():
            alone, during = await fleet.disturbed(given_prompt(), source, windows, 40)
            for name, kind in (("CPU of the engine's thread", 1), ("wall", 0)):
                parts = [
                    [[took[kind] for took in window] for window in each] for each in (alone, during)
                ]
                ratio, low, high = p99_ratio(*parts)
                print(
                    f"p99 of others' steps during imports, {way}, {name}: {ratio:.2f} times that "
                    f"without ({low:.2f} to {high:.2f}), {windows} windows of 40 steps of each, in "
                    f"turns; alone {np.quantile(parts[0], 0.99) * 1000:.1f} ms",
                    flush=True,
                )


def settings_of(directory: Path, longest: int) -> EngineSettings:
    """Return settings of an engine for prompts of at most `longest` positions."""
    return EngineSettings.of(
        model=str(directory),
        device="cpu",
        enable_kv_fetch=True,
        kv_cache_memory_bytes=2 << 30,
        max_model_len=max(4096, longest) + 64,
    )


async def first_tokens(
    fleet: Fleet, settings: EngineSettings, prompts: list[Prompt], copied: float
) -> None:
    """Print what the first token of prompts of one length takes, over every way."""
    size, positions, rounds = fleet.position_bytes, len(prompts[0]), len(prompts) - 1
    found = [await fleet.all_ways(prompt) for prompt in prompts]
    computed, near, fetched, here = (median([one[n] for one in found]) for n in range(4))
    host = median(await kept(settings, prompts, 4.0, None))
    with tempfile.TemporaryDirectory() as folder:
        disk = median(await kept(settings, prompts, None, f"{folder}/kv"))
    print(f"{positions} positions of {size:,} bytes, median of {max(1, rounds)} rounds:")
    print(
        f"  computed    {computed.wall * 1000:7.0f} ms {computed.cpu:7.2f} CPU s  "
        f"{positions / computed.wall:6.0f} positions/s; worth it above "
        f"{size * positions / computed.wall / 1e6:.0f} MB/s"
    )
    ways = {"neighbour": near, "peer, TLS": fetched, "host memory": host, "disk": disk}
    for name, took in ways.items():
        cost = (took.cpu - here.cpu) / (positions * size) * 1e9
        print(
            f"  {name:11} {took.wall * 1000:7.0f} ms {took.cpu:7.2f} CPU s  "
            f"{positions * size / took.wall / 1e6:6.0f} MB/s; {computed.wall / took.wall:5.1f} "
            f"times, CPU {computed.cpu / took.cpu:5.1f}; {cost:.2f} CPU s a GB: "
            f"{cost / copied:.1f} copies",
            flush=True,
        )


async def resuming(fleet: Fleet, prompts: list[Prompt], prior: tuple[int, ...]) -> None:
    """Print what the next token takes of requests of 4,096 positions that were given up."""
    found = [await fleet.all_ways(prompt, prior) for prompt in prompts]
    computed, fetched = (median([one[n] for one in found]) for n in range(2))
    print(
        f"resuming 4,096 positions: {computed.wall * 1000:.0f} ms ({computed.cpu:.2f} CPU s) "
        f"computed, {fetched.wall * 1000:.0f} ms ({fetched.cpu:.2f} CPU s) fetched: "
        f"{fetched.wall / computed.wall:.3f} of it, CPU {fetched.cpu / computed.cpu:.3f}",
        flush=True,
    )


async def measure(directory: Path, args: argparse.Namespace) -> None:
    """Measure the parts that are asked for."""
    fleet = Fleet(settings := settings_of(directory, max(args.positions)))
    await fleet.start()
    generator, copied = torch.Generator().manual_seed(1), copying()
    print(f"copying a GB from memory to memory: {copied:.2f} CPU s")

    def several(positions: int) -> list[Prompt]:
        return [random_prompt(positions, generator) for _ in range(args.rounds + 1)]

    if "first" in args.parts:
        for positions in args.positions:
            await first_tokens(fleet, settings, several(positions), copied)
    if "resuming" in args.parts:
        await resuming(fleet, several(4096 - 32), tuple(range(3, 35)))
    if "cost" in args.parts:
        for positions in (512, 2048):
            await cost_of_fetches(fleet, random_prompt(positions, generator))
    if "steps" in args.parts:
        await disturbance(fleet, directory, args.windows)
    await fleet.close()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--positions", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--windows", type=int, default=30)
    parts = ("first", "resuming", "cost", "steps")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--give", type=Path, help="the model of a worker that gives pages")
    args = parser.parse_args()
    if args.give is not None:
        asyncio.run(give(args.give))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), args.layers)
        asyncio.run(measure(Path(folder), args))


if __name__ == "__main__":
    main()
