"""Pages that the cache evicts are kept and come back: output is that of an engine that recomputes.

What is kept may be torn, damaged or gone at any time, and changes no output.
"""

import os
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from inlay.base.errors import EngineError, InvalidRequestError
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.engine import TorchEngine
from inlay.engine.torch.pages.tiers import PageTiers
from inlay.messages.digest import BLOCK_DIGEST_SIZE, Secret
from inlay.messages.prompt import Prompt, Tokens
from inlay.transport.local.arena import anonymous_file
from tests.engine import reference
from tests.engine.conformance import SECRET, ids, make_request, run
from tests.engine.torch.test_page_exchange import (
    STATES,
    WINDOWED,
    Always,
    answers,
    one_page_at_a_time,
    settings,
    started,
)
from tests.models import make, tiny

MEMORY = 4 << 20
NAMES = "abcdefgh"


@asynccontextmanager
async def keeping(
    config: EngineSettings, memory: int, *, secret: Secret = SECRET, **changes: Any
) -> AsyncIterator[tuple[TorchEngine, PageTiers]]:
    """An engine whose evicted pages are kept in `memory`, which outlives it."""
    values = {"kv_offloading_size": 1, "enable_kv_fetch": False, **changes}
    engine = TorchEngine(config.replace(**values), secret)
    engine.use_host_memory(os.dup(memory))
    try:
        await engine.start()
        assert engine._exchange is not None
        assert engine._exchange.tiers is not None
        engine._exchange.price = Always()
        yield engine, engine._exchange.tiers
    finally:
        await engine.close()


@pytest.fixture
def memory() -> Any:
    descriptor = anonymous_file(MEMORY)
    yield descriptor
    os.close(descriptor)


async def told(engine: TorchEngine, tiers: PageTiers, *names: str) -> list[list[int]]:
    """Outputs of prompts of 100 positions, after which what was evicted is kept."""
    found = []
    for name in names:
        request = make_request(name, Prompt.of(Tokens(ids(ord(name), 100))))
        found.append((await answers(engine, request))[0])
    tiers.flush()
    return found


async def small(directory: Path, pages: int = 24) -> EngineSettings:
    """Settings of an engine with so many pages."""
    async with started(settings(directory)) as (engine,):
        assert engine._model is not None
        size = pages * engine._model.page_bytes(16)
    return settings(directory, kv_cache_memory_bytes=size, max_model_len=160)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "model", ["llama", "all windows", "windows among full", "latent", "bfloat16", *STATES]
)
async def test_what_was_evicted_comes_back_and_gives_the_same_output(
    model: str, tmp_path: Path, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = {
        "all windows": lambda: tiny("mistral"),
        "windows among full": lambda: make("qwen3", tmp_path, **WINDOWED),
        "latent": lambda: tiny("deepseek_v3"),
        "bfloat16": lambda: tiny("llama", "bfloat16"),
    }.get(model, lambda: tiny(model, STATES.get(model, "float32")))()
    one_page_at_a_time(monkeypatch)
    config = await small(directory, 40 if "among" in model or model in STATES else 24)
    names = "abcdef"
    async with keeping(config, memory) as (engine, tiers):
        truth = await told(engine, tiers, *names)
        before = engine.stats()
        assert before.kv_pages_offloaded > 0
        assert before.kv_pages_loaded == 0
        assert before.preemptions == 0
        for _ in range(2):
            for name, output in zip(names, truth, strict=True):
                request = make_request(name, Prompt.of(Tokens(ids(ord(name), 100))))
                assert await answers(engine, request) == (output, 96), name
                tiers.flush()
        after = engine.stats()
        assert after.kv_pages_loaded > after.kv_pages_from_disk == 0
        assert after.kv_pages_refused == 0
        assert 0 < after.kv_host_bytes <= MEMORY
        # A prompt with rows shares the beginning that came back.
        rows = reference.rows_of(reference.look_up(directory, ids(ord("a"), 100)[40:]))
        mixed = Prompt.of(Tokens(ids(ord("a"), 40)), rows)
        if model not in ("bfloat16", "all windows", "qwen3_5_text"):
            assert await answers(engine, make_request("a", mixed)) == (truth[0], 32)


@pytest.mark.thorough
async def test_an_engine_finds_what_one_before_it_kept(memory: int) -> None:
    config = await small(tiny("llama"))
    async with keeping(config, memory) as (engine, tiers):
        truth = await told(engine, tiers, *"abcde")
        kept = engine.stats().kv_host_bytes
    # Another model's pages would be in the way of none.
    async with keeping(await small(tiny("mistral")), memory) as (other, tiers):
        assert other.stats().kv_host_bytes == 0
    async with keeping(config, memory) as (engine, tiers):
        assert engine.stats().kv_host_bytes == kept
        assert await told(engine, tiers, *"abcde") == truth
        assert engine.stats().kv_pages_loaded > 0
        # An admin who resets the cache wants all of it gone.
        await engine.reset_prefix_cache()
        assert engine.stats().kv_host_bytes == 0
        assert os.fstat(memory).st_blocks == 0
        before = engine.stats().kv_pages_loaded
        assert await told(engine, tiers, "a") == truth[:1]
        assert engine.stats().kv_pages_loaded == before
        await told(engine, tiers, *"bcde")
        await engine.sleep(1)
        assert os.fstat(memory).st_blocks == 0
        await engine.wake_up(())
        assert await told(engine, tiers, *"abcde") == truth


@pytest.mark.parametrize("step", [7, 4096])
async def test_memory_that_was_damaged_or_half_written_changes_nothing(
    memory: int, step: int
) -> None:
    config = await small(tiny("llama"))
    async with keeping(config, memory) as (engine, tiers):
        truth = await told(engine, tiers, *"abcde")
    content = bytearray(os.pread(memory, MEMORY, 0))
    for place in range(0, len(content), step):
        content[place] ^= 1
    os.pwrite(memory, content, 0)
    async with keeping(config, memory) as (engine, tiers):
        for _ in range(2):
            assert await told(engine, tiers, *"abcde") == truth
        assert (engine.stats().kv_pages_refused > 0) == (step > 7)


async def test_memory_that_holds_a_few_pages_is_not_exceeded(memory: int) -> None:
    config = await small(tiny("llama"))
    os.ftruncate(memory, 4096 + 6 * 4352)
    async with keeping(config, memory) as (engine, tiers):
        truth = await told(engine, tiers, *"abcdefgh")
        assert tiers.host is not None
        assert len(tiers.host) == tiers.host.num_slots <= 6
        assert await told(engine, tiers, *"hgfedcba") == truth[::-1]
        assert engine.stats().kv_pages_loaded > 0
    os.ftruncate(memory, 4096)
    with pytest.raises(EngineError, match="hold none: raise --kv-offloading-size"):
        async with keeping(config, memory):
            pass


async def test_requests_of_one_prompt_bring_it_back_once(memory: int) -> None:
    async with keeping(await small(tiny("llama"), 40), memory) as (engine, tiers):
        truth = await told(engine, tiers, *"abcdefgh")
        before = engine.stats().kv_pages_loaded
        same = Prompt.of(Tokens(ids(ord("a"), 100)))
        receivers = await run(engine, *(make_request(str(n), same) for n in range(4)))
        assert [receiver.output for receiver in receivers] == [truth[0]] * 4
        assert engine.stats().kv_pages_loaded - before == 6


MIB = 1 / 1024


@pytest.mark.parametrize(("model", "size"), [("llama", None), ("llama", 1), ("qwen3_5_text", None)])
async def test_what_memory_has_no_room_for_comes_back_from_disk(
    model: str, size: int | None, memory: int, tmp_path: Path
) -> None:
    config = await small(tiny(model), 24 if model == "llama" else 40)
    os.ftruncate(memory, 4096 + 6 * 4352)
    options: dict[str, Any] = {"kv_offloading_size": size, "kv_offloading_dir": tmp_path / "pages"}
    async with keeping(config, memory, **options) as (engine, tiers):
        truth = await told(engine, tiers, *NAMES)
        assert await told(engine, tiers, *NAMES) == truth
    sizes = [path.stat().st_size for path in runs(tmp_path)]
    assert sizes
    async with keeping(config, memory, **options) as (engine, tiers):
        # By their headers.
        assert engine.stats().kv_disk_bytes >= sum(sizes)
        assert await told(engine, tiers, *NAMES) == truth
        stats = engine.stats()
        assert stats.kv_pages_loaded > 6
        # Where both have a page it comes from memory.
        assert stats.kv_pages_from_disk > 0
        assert (stats.kv_pages_from_disk == stats.kv_pages_loaded) == (size is None)
        assert (stats.kv_disk_refused_files, stats.kv_disk_errors, stats.kv_pages_refused) == (
            0, 0, 0,
        )  # fmt: skip
        await engine.reset_prefix_cache()
        assert not runs(tmp_path)
        assert engine.stats().kv_disk_bytes == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_what_a_tier_does_not_have_is_a_miss(dtype: str, memory: int, tmp_path: Path) -> None:
    config = await small(tiny("llama", dtype))
    async with keeping(config, memory, kv_offloading_dir=tmp_path / "pages") as (_, tiers):
        assert len(tiers.stores) == 2
        for store in tiers.stores:
            assert len(tiers.read(store, 0, [bytes(BLOCK_DIGEST_SIZE)])) == 0


def runs(path: Path) -> list[Path]:
    return sorted(path.glob("pages/*.pages"))


async def test_files_show_nothing_and_belong_to_one_engine_of_one_secret(
    memory: int, tmp_path: Path
) -> None:
    config = await small(tiny("llama"))
    options: dict[str, Any] = {"kv_offloading_size": None, "kv_offloading_dir": tmp_path / "pages"}
    async with keeping(config, memory, **options) as (engine, tiers):
        truth = await told(engine, tiers, *NAMES)
        with pytest.raises(InvalidRequestError, match="in use by another"):
            async with keeping(config, memory, **options):
                pass
    files = runs(tmp_path)
    assert [path.stat().st_mode & 0o777 for path in files] == [0o600] * len(files)
    assert files[0].parent.stat().st_mode & 0o777 == 0o700
    # What no key hides is alike from page to page; what is sealed does not get smaller.
    content = b"".join(path.read_bytes()[4096:] for path in files)
    assert len(zlib.compress(content)) > 0.99 * len(content)
    async with keeping(config, memory, secret=Secret(bytes(32)), **options) as (engine, tiers):
        assert engine.stats().kv_disk_refused_files == len(files)
        assert not runs(tmp_path)
        assert await told(engine, tiers, *NAMES) == truth


def cut(files: list[Path]) -> None:
    os.truncate(files[0], files[0].stat().st_size - 1)


def swap(files: list[Path]) -> None:
    first, second = (path.read_bytes() for path in files[:2])
    files[0].write_bytes(second)
    files[1].write_bytes(first)


def flip(files: list[Path]) -> None:
    content = bytearray(files[0].read_bytes())
    content[5000] ^= 1
    files[0].write_bytes(content)


def remove(files: list[Path]) -> None:
    files[0].unlink()


def exchange(files: list[Path]) -> None:
    files[0].unlink()
    files[0].symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("fault", "running"),
    [(cut, False), (swap, False)] + [(each, True) for each in (cut, swap, flip, remove, exchange)],
)
async def test_a_file_that_was_cut_swapped_or_changed_is_dropped_and_changes_nothing(
    fault: Callable[[list[Path]], None], running: bool, memory: int, tmp_path: Path
) -> None:
    config = await small(tiny("llama"))
    options: dict[str, Any] = {"kv_offloading_size": None, "kv_offloading_dir": tmp_path / "pages"}
    async with keeping(config, memory, **options) as (engine, tiers):
        truth: list[list[int]] = []
        for name in NAMES:
            truth += await told(engine, tiers, name)
            tiers.write_rest()
        whole = runs(tmp_path)
        assert len(whole) > 1
        if running:
            fault(whole)
            assert await faults(engine, tiers, truth)
    if not running:
        fault(whole)
        async with keeping(config, memory, **options) as (engine, tiers):
            # What a file has is read from its header, whatever the file is called.
            assert bool(await faults(engine, tiers, truth)) == (fault is cut)


async def faults(engine: TorchEngine, tiers: PageTiers, truth: list[list[int]]) -> int:
    """Faults of files that were noticed while outputs were those of before."""
    for _ in range(2):
        assert await told(engine, tiers, *NAMES) == truth
    stats = engine.stats()
    return stats.kv_disk_refused_files + stats.kv_disk_errors


async def test_files_stay_within_their_bound(memory: int, tmp_path: Path) -> None:
    config = await small(tiny("llama"))
    options: dict[str, Any] = {"kv_offloading_size": None, "kv_offloading_dir": tmp_path / "pages"}
    bound = 0.25 * MIB
    async with keeping(config, memory, **options, kv_offloading_disk_size=bound) as (engine, tiers):
        truth = await told(engine, tiers, *NAMES)
        tiers.write_rest()
        for _ in range(3):
            assert await told(engine, tiers, *NAMES) == truth
            tiers.write_rest()
            assert engine.stats().kv_disk_bytes <= bound * 1024**3
            assert sum(path.stat().st_size for path in runs(tmp_path)) <= bound * 1024**3
    assert runs(tmp_path)
