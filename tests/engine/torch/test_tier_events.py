"""Routers are told what the tiers behind a cache have, whatever is evicted, dropped or restored."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from inlay.engine.torch.engine import TorchEngine
from inlay.engine.torch.pages.tiers import PageTiers
from inlay.messages.digest import BLOCK_SIZE
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.routing import KEY_SIZE, KvTier, routing_chain
from inlay.transport.local.arena import anonymous_file
from inlay.worker.kv_feed import KvFeed
from tests.engine.conformance import SECRET, ids
from tests.engine.torch.test_page_tiers import keeping, small, told
from tests.models import tiny

NAMES = "abcdef"


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = anonymous_file(4 << 20)
    yield descriptor
    os.close(descriptor)


def cut(data: Any) -> set[bytes]:
    view = bytes(data)
    return {view[start : start + KEY_SIZE] for start in range(0, len(view), KEY_SIZE)}


class Watched:
    """An engine, and what a router would know of it."""

    def __init__(self, engine: TorchEngine, tiers: PageTiers) -> None:
        self.engine = engine
        self.tiers = tiers
        self._feed = KvFeed()
        engine.watch_blocks(self._feed.take)

    async def tell(self, *names: str) -> None:
        await told(self.engine, self.tiers, *names)

    async def known(self) -> dict[str, KvTier]:
        """What is known of each tier, once all is told."""
        await asyncio.to_thread(self.tiers.flush)
        await self.engine._ask(lambda core: None)
        return {tier.name: tier for tier in self._feed.snapshot().tiers}

    def cached(self) -> set[bytes]:
        """What is known of the cache."""
        return cut(self._feed.snapshot().keys.view)

    async def check(self, page_size: int) -> None:
        """What is told of each tier is in the cache, in it, or in one before it."""
        known = await self.known()
        reached = self.cached()
        for store in self.tiers.stores:
            reached |= {digest[:KEY_SIZE] for _, digest in store.names()}
            assert cut(known[store.name].keys.view) == reached
        pages = page_size // BLOCK_SIZE
        for name in NAMES:
            prompt = Prompt.of(Tokens(ids(ord(name), 100)))
            chain = routing_chain(prompt, self.engine.card, SECRET)
            keys = [chain[at : at + KEY_SIZE] for at in range(0, len(chain), KEY_SIZE)]
            assert set(keys[pages - 1 :: pages]) <= reached, name


@asynccontextmanager
async def watched(memory: int, page_size: int, **options: Any) -> AsyncIterator[Watched]:
    config = (await small(tiny("llama"))).replace(block_size=page_size)
    async with keeping(config, memory, **options) as (engine, tiers):
        yield Watched(engine, tiers)


@pytest.mark.parametrize("page_size", [16, 32])
async def test_all_that_was_evicted_is_known_and_priced(
    page_size: int, memory: int, tmp_path: Path
) -> None:
    # Memory holds a few pages; the rest goes to disk.
    os.ftruncate(memory, 4096 + 6 * 4352 * page_size // 16)
    options: dict[str, Any] = {"kv_offloading_dir": tmp_path / "pages"}
    async with watched(memory, page_size, **options) as one:
        await one.tell(*NAMES)
        await asyncio.to_thread(one.tiers.write_rest)
        await one.check(page_size)
        assert all(tier.price is None for tier in (await one.known()).values())
        exchange = one.engine._exchange
        assert exchange is not None
        exchange.price.computed(1000, 1.0)
        await one.tell(*NAMES)
        await asyncio.to_thread(one.tiers.write_rest)
        await one.check(page_size)
        prices = [tier.price for tier in (await one.known()).values()]
        assert any(price is not None and price > 0 for price in prices)
    async with watched(memory, page_size, **options) as one:
        # What an engine before it kept.
        known = await one.known()
        assert list(known) == ["host memory", "disk"]
        assert all(tier.keys.view for tier in known.values())
        await one.check(page_size)
        await one.engine.reset_prefix_cache()
        assert not any(tier.keys.view for tier in (await one.known()).values())


async def test_a_record_that_was_damaged_is_known_no_more(memory: int) -> None:
    async with watched(memory, 16) as one:
        await one.tell(*NAMES)
        host = one.tiers.host
        assert host is not None
        host._slots[:, 100] ^= 1
        before = {digest for _, digest in host.names()}
        await one.tell("a")
        assert one.engine.stats().kv_pages_refused > 0
        known = cut((await one.known())["host memory"].keys.view)
        kept = {digest for _, digest in host.names()}
        assert known == {digest[:KEY_SIZE] for digest in kept} | one.cached()
        assert before - kept
