"""A tier gives a page to none but a request of its salt, adapter, weights, dtype, layout and secret.

Each in host memory and on disk, which an engine has filled and another one is started on.
"""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from inlay.engine.settings import EngineSettings
from inlay.engine.torch.engine import TorchEngine
from inlay.engine.torch.pages.host_memory import _entry
from inlay.engine.torch.pages.tiers import PageTiers
from inlay.messages.card import Adapter
from inlay.messages.digest import Secret
from inlay.messages.prompt import Prompt, Tokens
from inlay.transport.local.arena import anonymous_file
from tests import adapters
from tests.engine.conformance import SECRET, ids, make_request
from tests.engine.torch.test_page_exchange import answers, settings, started
from tests.engine.torch.test_page_sources import altered
from tests.engine.torch.test_page_tiers import keeping
from tests.models import tiny

PROMPT = Prompt.of(Tokens(ids(1, 100)))
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
KINDS = ("host memory", "disk")


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = anonymous_file(4 << 20)
    yield descriptor
    os.close(descriptor)


class Tiers:
    """Memory or a directory that outlives the engines that are started on it."""

    def __init__(self, kind: str, memory: int, path: Path) -> None:
        self._memory = memory
        in_memory = kind == "host memory"
        self.options: dict[str, Any] = {
            "kv_offloading_size": 1 if in_memory else None,
            "kv_offloading_dir": None if in_memory else path / "kv",
        }

    @asynccontextmanager
    async def engine(
        self, config: EngineSettings, secret: Secret = SECRET
    ) -> AsyncIterator[tuple[TorchEngine, PageTiers]]:
        async with keeping(config, self._memory, secret=secret, **self.options) as found:
            yield found


@pytest.fixture(params=KINDS)
def kept(request: pytest.FixtureRequest, memory: int, tmp_path: Path) -> Tiers:
    return Tiers(request.param, memory, tmp_path)


async def evict(engine: TorchEngine, tiers: PageTiers) -> None:
    """Have the cache give up all pages, which the tiers keep."""
    for number in range(40, 48):
        await answers(engine, make_request("f", Prompt.of(Tokens(ids(number, 100)))))
        tiers.flush()
    tiers.write_rest()


def config(directory: Path, **changes: Any) -> EngineSettings:
    values = {"kv_cache_memory_bytes": 160_000, "max_model_len": 160, **changes}
    return settings(directory, **values)


@pytest.mark.thorough
async def test_within_one_engine_to_its_salt_and_adapter_alone(kept: Tiers, tmp_path: Path) -> None:
    directory = tiny("llama")
    paths = [
        adapters.make_lora(tmp_path / name, directory, seed=seed)
        for seed, name in enumerate(("first", "second"), 1)
    ]

    async def load(engine: TorchEngine, name: str, content: str, path: Path) -> None:
        adapter = Adapter(name=name, content_id=content * 32, path=str(path))
        await engine.load_adapter(adapter, str(path))

    async def loaded(engine: TorchEngine) -> None:
        for name, path in zip("ab", paths, strict=True):
            await load(engine, name, name, path)

    truth = {}
    async with started(settings(directory, **LORA)) as (plain,):
        await loaded(plain)
        for adapter in (None, "a", "b"):
            truth[adapter] = (await answers(plain, make_request("t", PROMPT, adapter=adapter)))[0]
    assert len(set(map(tuple, truth.values()))) == 3
    async with kept.engine(config(directory, **LORA)) as (engine, tiers):
        await loaded(engine)
        await answers(engine, make_request("kept", PROMPT, adapter="a", salt="one"))
        await evict(engine, tiers)
        for adapter, salt in ((None, "one"), ("b", "one"), ("a", "two"), ("a", None), (None, None)):
            before = engine.stats().kv_pages_loaded
            request = make_request("other", PROMPT, adapter=adapter, salt=salt)
            assert await answers(engine, request) == (truth[adapter], 0)
            assert engine.stats().kv_pages_loaded == before
        request = make_request("same", PROMPT, adapter="a", salt="one")
        assert await answers(engine, request) == (truth["a"], 96)
        # One that has the name of an adapter, and not its content, finds nothing.
        await engine.unload_adapter("a")
        await load(engine, "a", "c", paths[1])
        await evict(engine, tiers)
        assert await answers(engine, request) == (truth["b"], 0)


@pytest.mark.parametrize("other", ["weights", "dtype", "page size", "family", "secret"])
async def test_an_engine_that_differs_in_anything_finds_nothing(
    other: str, kept: Tiers, tmp_path: Path
) -> None:
    own, changed = (
        config(tiny("llama")),
        {
            "weights": lambda: config(altered(tiny("llama"), tmp_path / "weights")),
            "dtype": lambda: config(tiny("llama"), dtype="bfloat16"),
            "page size": lambda: config(tiny("llama"), block_size=32),
            "family": lambda: config(tiny("qwen3")),
            "secret": lambda: config(tiny("llama")),
        }[other](),
    )
    secret = Secret(bytes(32)) if other == "secret" else SECRET
    async with started(changed.replace(kv_cache_memory_bytes=8 << 20)) as (plain,):
        truth, _ = await answers(plain, make_request("truth", PROMPT))
    async with kept.engine(own) as (engine, tiers):
        await answers(engine, make_request("kept", PROMPT))
        await evict(engine, tiers)
        assert (await answers(engine, make_request("again", PROMPT)))[1] == 96
    async with kept.engine(changed, secret) as (engine, _):
        assert await answers(engine, make_request("other", PROMPT)) == (truth, 0)
        assert engine.stats().kv_pages_loaded == 0
        assert engine.stats().kv_pages_refused == 0


async def test_a_record_under_the_name_of_another_is_refused(memory: int, tmp_path: Path) -> None:
    """As if a key were incomplete: entries of a prompt name the records of another's."""
    kept, second = Tiers("host memory", memory, tmp_path), Prompt.of(Tokens(ids(2, 100)))
    async with kept.engine(config(tiny("llama"))) as (engine, tiers):
        truth, _ = await answers(engine, make_request("one", PROMPT))
        await evict(engine, tiers)
        assert tiers.host is not None
        first = set(tiers.host.names())
        others, _ = await answers(engine, make_request("two", second))
        await evict(engine, tiers)
        places = dict(tiers.host._places)
    assert first < set(places)
    turned = dict(zip(places, list(places.values())[::-1], strict=True))
    layout = os.pread(memory, 16, next(iter(places.values())) * _entry.size)
    for number, ((group, digest), place) in enumerate(turned.items(), 1):
        entry = _entry.pack(layout, digest, group, number)
        os.pwrite(memory, entry, place * _entry.size)
    async with kept.engine(config(tiny("llama"))) as (engine, _):
        assert await answers(engine, make_request("one", PROMPT)) == (truth, 0)
        assert await answers(engine, make_request("two", second)) == (others, 0)
        assert engine.stats().kv_pages_loaded == 0
        assert engine.stats().kv_pages_refused > 0
