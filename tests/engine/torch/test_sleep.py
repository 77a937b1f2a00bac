"""A torch engine that sleeps gives its memory back, and answers afterwards as before."""

import asyncio
import ctypes
import gc
import json
import shutil
from collections.abc import AsyncIterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
import torch
from torch import nn

from inlay.base.errors import EngineError, InlayError, InvalidRequestError, OverloadedError
from inlay.engine.kv_events import AllBlocksCleared, BlockStored, Event
from inlay.engine.kv_subscriber import KvSubscriber
from inlay.engine.settings import EngineSettings
from inlay.engine.torch import sleep
from inlay.engine.torch.engine import TorchEngine
from inlay.engine.torch.sleep import HostCopy, SleepState, storages
from inlay.messages.commands import Sleep, WakeUp
from inlay.messages.digest import Secret
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.routing import Cleared, KvEvent, Stored
from inlay.worker.host import EngineHost
from tests import adapters
from tests.engine.adapter_conformance import load
from tests.engine.conformance import Receiver, ids, make_request, run
from tests.models import make, tiny

LARGE: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}


def create(path: Path, **changes: Any) -> TorchEngine:
    settings: dict[str, Any] = {
        "device": "cpu",
        "num_threads": 1,
        "kv_cache_memory_bytes": 16 << 20,
    }
    return TorchEngine(
        EngineSettings.of(model=str(path), **(settings | changes)), Secret(bytes(32))
    )


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[TorchEngine]:
    engine = create(tiny("llama"))
    await engine.start()
    yield engine
    await engine.close()


def prompt(seed: int = 1, count: int = 40) -> Prompt:
    return Prompt.of(Tokens(ids(seed, count)))


def resident() -> int:
    """Bytes of this process that no file has, without what the allocator only keeps."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


async def _least_resident() -> int:
    """The least within two seconds: what threads in the background hold comes and goes."""
    found = [resident()]
    for _ in range(10):
        await asyncio.sleep(0.2)
        found.append(resident())
    return min(found)


class Measured(NamedTuple):
    """Outputs, and bytes in memory, before and after sleeping."""

    said: list[list[int]]
    awake: int
    asleep: int
    awake_again: int
    asleep_again: int


async def _measure(path: Path, level: int) -> Measured:
    engine = create(path, max_model_len=512)
    await engine.start()
    (before,) = await run(engine, make_request("before", prompt(), 12))
    awake = resident()
    await engine.sleep(level)
    asleep = await _least_resident()
    assert await engine.wake_up(())
    (after,) = await run(engine, make_request("after", prompt(), 12))
    awake_again = resident()
    await engine.sleep(level)
    asleep_again = await _least_resident()
    await engine.close()
    return Measured([before.output, after.output], awake, asleep, awake_again, asleep_again)


def measure(path: Path, level: int) -> Measured:
    return asyncio.run(_measure(path, level))


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
def test_memory_returns_and_answers_stay(level: int, tmp_path: Path) -> None:
    path = make("llama", tmp_path / "model", **LARGE)
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    # Some 20 MB of the process come and go.
    assert weights > 300e6
    # A process of its own: what other tests have left in this one comes and goes.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        found = alone.submit(measure, path, level).result()
    before, after = found.said
    assert after == before
    assert found.awake - found.asleep > 0.9 * weights
    assert found.awake_again < found.awake + 0.5 * weights
    assert found.asleep_again < found.asleep + 0.5 * weights


async def test_the_cache_is_empty_after_waking_and_counters_go_on(engine: TorchEngine) -> None:
    await run(engine, make_request("a", prompt(), 4))
    await engine.sleep(1)
    asleep = engine.stats()
    assert (asleep.generated_tokens, asleep.blocks_total) == (4, 0)
    assert await engine.wake_up(())
    blocks = engine.stats().blocks_total
    (again,) = await run(engine, make_request("b", prompt(), 4))
    assert again.last.usage is not None
    assert again.last.usage.cached_tokens == 0
    assert engine.stats().generated_tokens == 8
    assert blocks == engine.stats().blocks_total == engine.card.num_blocks
    assert engine.stats().steps > asleep.steps


@pytest.mark.parametrize("order", [("weights", "kv_cache"), ("kv_cache", "weights")])
async def test_an_engine_wakes_in_parts_and_takes_nothing_before_all_are(
    engine: TorchEngine, order: tuple[str, str]
) -> None:
    (before,) = await run(engine, make_request("before", prompt()))
    await engine.sleep(1)
    assert not await engine.wake_up(order[:1])
    assert not await engine.wake_up(order[:1])
    refused = make_request("refused", prompt())
    with pytest.raises(OverloadedError, match="asleep"):
        engine.submit(refused, Receiver(refused))
    with pytest.raises(InlayError):
        await engine.probe()
    assert await engine.wake_up(order[1:])
    assert await engine.wake_up(())
    (after,) = await run(engine, make_request("after", prompt()))
    assert after.output == before.output


@pytest.mark.thorough
async def test_falling_deeper_and_closing_while_asleep_are_fine(engine: TorchEngine) -> None:
    await engine.sleep(1)
    await engine.sleep(2)
    await engine.sleep(1)
    assert not await engine.wake_up(("weights",))
    await engine.sleep(2)
    assert not await engine.wake_up(("kv_cache",))


async def test_it_does_not_sleep_while_a_request_runs(engine: TorchEngine) -> None:
    running = make_request("running", prompt(), 300)
    receiver = Receiver(running)
    engine.submit(running, receiver)
    with pytest.raises(EngineError, match="1 requests are under way"):
        await engine.sleep(1)
    engine.abort("running")


async def test_a_checkpoint_that_has_changed_is_not_woken_and_the_engine_sleeps_on(
    tmp_path: Path,
) -> None:
    path = shutil.copytree(tiny("llama"), tmp_path / "model")
    engine = create(path)
    await engine.start()
    (before,) = await run(engine, make_request("before", prompt()))
    await engine.sleep(2)
    config = path / "config.json"
    kept = config.read_text()
    config.write_text(json.dumps(json.loads(kept) | {"rope_theta": 500.0, "rms_norm_eps": 0.1}))
    with pytest.raises(InvalidRequestError, match="is not what it was"):
        await engine.wake_up(())
    config.unlink()
    with pytest.raises(InlayError):
        await engine.wake_up(())
    config.write_text(kept)
    assert await engine.wake_up(())
    (after,) = await run(engine, make_request("after", prompt()))
    assert after.output == before.output
    await engine.close()


async def test_adapters_are_there_again_after_waking(tmp_path: Path) -> None:
    path = tiny("llama")
    engine = create(path, enable_lora=True, max_loras=2, max_lora_rank=8)
    await engine.start()
    names = ("a", "b")
    for name in names:
        await load(engine, name, adapters.make_lora(tmp_path / name, path))
    before = await run(engine, *(make_request(name, prompt(), adapter=name) for name in names))
    await engine.sleep(1)
    await engine.unload_adapter("b")
    assert await engine.wake_up(())
    (after,) = await run(engine, make_request("c", prompt(), adapter="a"))
    assert after.output == before[0].output
    await load(engine, "b", tmp_path / "b")
    (other,) = await run(engine, make_request("d", prompt(), adapter="b"))
    assert other.output == before[1].output
    await engine.close()


class _Holder(nn.Module):
    """Weights that are shared, viewed, and held by what is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.tied = nn.Parameter(self.first.weight.detach(), requires_grad=False)
        self.rows = {"view": self.first.weight.detach()[2:4]}
        self.beside = SleepState(lambda: None, "")  # type: ignore[type-var]
        self.beside._host_copy = (torch.arange(5.0),)  # type: ignore[assignment]


async def test_what_is_put_aside_comes_back_and_still_shares_memory() -> None:
    holder = _Holder()
    found = storages(holder, torch.device("cpu"))
    assert len(found) == 3  # the weight, its bias, and what the inlay object holds
    before = holder.first.weight.detach().clone()
    aside = await asyncio.to_thread(HostCopy, found)
    assert not any(storage.nbytes() for storage in found)
    aside.restore()
    assert torch.equal(holder.first.weight, before)
    with torch.no_grad():
        holder.tied.zero_()
    assert not holder.first.weight.any()
    assert not holder.rows["view"].any()


@pytest.mark.parametrize("sizes", [[], [64], [1], [65, 0, 200, 7, 64, 129], [3] * 90])
def test_blocks_that_are_pinned_together_have_no_room_left_over_but_in_the_last(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch pins the next power of two of each block's bytes."""
    monkeypatch.setattr(sleep, "BLOCK_BYTES", 64)
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    before = [tensor.clone() for tensor in tensors]
    aside = HostCopy([tensor.untyped_storage() for tensor in tensors])
    pinned = sum(1 << (len(block) - 1).bit_length() for block in aside.blocks)
    assert sum(sizes) <= pinned < sum(sizes) + 64
    assert not any(tensor.untyped_storage().nbytes() for tensor in tensors)
    aside.restore()
    assert not aside.blocks
    for tensor, expected in zip(tensors, before, strict=True):
        assert torch.equal(tensor, expected)


@pytest.mark.thorough
async def test_routers_and_readers_hear_that_a_sleeping_engine_has_nothing_cached(
    tmp_path: Path,
) -> None:
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    config = {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": replay}
    engine = create(tiny("llama"), kv_events_config=json.dumps(config))
    await engine.start()
    host, told = EngineHost(engine, sleep_mode=True), list[KvEvent]()
    host.watch_cache(lambda events: told.extend(events.events))
    read: list[Event] = []
    reader = KvSubscriber(
        endpoint, replay, "", take=lambda batch: read.extend(batch.events), lost=pytest.fail
    )
    try:
        for level in (1, 2):
            told.clear()
            await run(engine, make_request(f"before-{level}", prompt()))
            assert len((await host.kv_snapshot()).keys.view)
            await host.call(Sleep(level))
            assert told[-1] == Cleared()
            assert not len((await host.kv_snapshot()).keys.view)
            assert (await host.call(WakeUp())).awake
            await run(engine, make_request(f"after-{level}", prompt()))
            assert isinstance(told[-1], Stored)
    finally:
        await engine.close()
        # Closing empties the cache once more.
        async with asyncio.timeout(30):
            while sum(isinstance(event, AllBlocksCleared) for event in read) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        reader.close()
    kinds = [type(event) for event in read]
    first = kinds.index(AllBlocksCleared)
    assert BlockStored in kinds[:first]
    assert BlockStored in kinds[first:]
