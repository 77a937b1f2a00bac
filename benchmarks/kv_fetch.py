"""What it is worth to fetch a prompt's keys and values from another worker.

    python -m benchmarks.kv_fetch [--positions 2048] [--layers 28] [--rounds 3]

Two engines with a random model of Qwen3-0.6B's shape in bfloat16. One has computed prompts; the
other answers them with one token, by computing and by fetching in turn, over a connection of one
worker to another as it is in a fleet (TLS, loopback; both ends in this process, on its cores). Then
it reads back what it evicted itself, from host memory and from disk. The median of each is printed,
what a byte costs, and the bandwidth above which fetching is worth it.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.engine import write_model
from inlay.address import Address
from inlay.digest import Secret
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.cache.table import PageRun
from inlay.engine.torch.engine import TorchEngine
from inlay.engine.torch.pages.price import FetchPrice
from inlay.engine.torch.step import Core
from inlay.prompt import Prompt, Tokens
from inlay.request import PAGES, Output, Request, Sampling, Source
from inlay.transport.embeds_cache import EmbedsCache
from inlay.transport.endpoint import Endpoint
from inlay.transport.local.arena import anonymous_file
from inlay.transport.peers import PeerConnections
from inlay.transport.tls import load_identity, make_certificate
from inlay.worker.host import EngineHost

SECRET = Secret(bytes(32))


class _Always(FetchPrice):
    """Fetches whatever it costs, which is to be measured."""

    def is_worth(self, source: Address | str, positions: int, num_bytes: int) -> bool:
        return True

    def patience(self, positions: int, deadline: float | None) -> float:
        return 600.0


async def first_token(engine: TorchEngine, prompt: Prompt, *sources: Source) -> tuple[float, int]:
    """Seconds to the only token of a prompt, and how much of it was cached then."""
    ended: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
    sampling = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    engine.submit(
        Request(id="one", prompts=(prompt,), params=sampling, sources=sources), ended.set_result
    )
    output = await ended
    if output.error is not None or output.usage is None:
        raise RuntimeError(f"no answer: {output.error}")
    return time.perf_counter() - began, output.usage.cached_tokens


async def evict(engine: TorchEngine) -> None:
    """Have the cache evict all of its pages, and wait until they are kept."""
    tiers = engine._exchange and engine._exchange.tiers
    if not tiers:
        raise RuntimeError("the engine keeps nothing")

    def some(core: Core) -> int:
        table, run = core.scheduler.table, PageRun()
        # Few at a time: what comes faster than it can be sealed is not kept.
        table.grow([run], table.free + min(8, table.available - table.free))
        core.cached.offload()
        table.release([run])
        return table.available - table.free

    while await engine._ask(some):
        await asyncio.to_thread(tiers.flush)
    await asyncio.to_thread(tiers.write_rest)


async def kept(
    settings: EngineSettings, prompts: list[Prompt], size: float | None, folder: str | None
) -> list[float]:
    """Seconds to the first token of prompts whose pages are in host memory, or on disk."""
    changes = {
        "enable_kv_fetch": False,
        "kv_offloading_size": size,
        "kv_offloading_dir": None if folder is None else Path(folder),
    }
    engine = TorchEngine(settings.model_copy(update=changes), SECRET)
    engine.use_host_memory(anonymous_file(int((size or 0) * 1024**3)))
    await engine.start()
    if engine._exchange is None:
        raise RuntimeError("the engine keeps nothing")
    engine._exchange.price = _Always()
    times = []
    for prompt in prompts:
        await first_token(engine, prompt)
        await evict(engine)
        seconds, cached = await first_token(engine, prompt)
        if cached != (len(prompt) - 1) // 16 * 16:
            raise RuntimeError(f"{cached} positions were cached")
        times.append(seconds)
    await engine.close()
    return times


async def measure(directory: Path, positions: int, rounds: int) -> None:
    settings = EngineSettings(
        model=str(directory), device="cpu", enable_kv_fetch=True, max_model_len=positions + 64
    )
    giving, asking = TorchEngine(settings, SECRET), TorchEngine(settings, SECRET)
    peers, cache = PeerConnections(SECRET), EmbedsCache(0)
    await giving.start()
    await asking.start()
    asking.use_peers(peers)
    endpoint = Endpoint(EngineHost(giving), SECRET, load_identity(make_certificate()), cache)
    address = await endpoint.open("127.0.0.1", "127.0.0.1", 0)
    exchange = asking._exchange
    if exchange is None or giving._model is None:
        raise RuntimeError("the engines do not fetch")
    exchange.price = _Always()
    generator = torch.Generator().manual_seed(1)
    computing: list[float] = []
    fetching: list[float] = []
    prompts: list[Prompt] = []
    for _ in range(rounds + 1):
        ids = torch.randint(3, 150_000, (positions,), generator=generator).tolist()
        prompt = Prompt.of(Tokens(ids))
        prompts.append(prompt)
        await giving.reset_prefix_cache()
        await first_token(giving, prompt)
        for times, sources in ((computing, ()), (fetching, (Source(PAGES, (address,)),))):
            await asking.reset_prefix_cache()
            seconds, cached = await first_token(asking, prompt, *sources)
            if cached != (0 if not sources else (positions - 1) // 16 * 16):
                raise RuntimeError(f"{cached} positions were cached")
            times.append(seconds)
    # The first round makes connections and warms up.
    compute, fetch = (statistics.median(times[1:]) for times in (computing, fetching))
    host = statistics.median((await kept(settings, prompts, 4.0, None))[1:])
    with tempfile.TemporaryDirectory() as folder:
        disk = statistics.median((await kept(settings, prompts, None, f"{folder}/kv"))[1:])
    size = giving._model.page_bytes(16) // 16
    print(f"{positions} positions of {size:,} bytes, median of {rounds} rounds:")
    print(f"  computed    {compute * 1000:7.0f} ms  {positions / compute:9.0f} positions/s")
    for name, took in (("peer, TLS", fetch), ("host memory", host), ("disk", disk)):
        rate = positions * size / took / 1e6
        print(f"  {name:11} {took * 1000:7.0f} ms  {rate:9.0f} MB/s {compute / took:9.1f} times")
    print(f"  worth it above {size * positions / compute / 1e6:.0f} MB/s")
    await peers.close()
    await endpoint.close()
    await giving.close()
    await asking.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), args.layers)
        asyncio.run(measure(Path(folder), args.positions, args.rounds))


if __name__ == "__main__":
    main()
