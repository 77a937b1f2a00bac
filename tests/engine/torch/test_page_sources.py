"""Sources of pages one after the other: what one fails to give, the next is asked for."""

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from inlay.base.address import Address
from inlay.base.errors import OverloadedError
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import PAGES, Payload, Request, Source
from inlay.transport.local.arena import anonymous_file
from tests.engine.conformance import ids, make_request
from tests.engine.torch.test_page_exchange import (
    LIES,
    OTHER,
    PEER,
    WINDOWED,
    Always,
    Direct,
    answers,
    one_page_at_a_time,
    settings,
    started,
)
from tests.engine.torch.test_page_tiers import keeping, small, told
from tests.models import make, tiny

BOTH = (Source(PAGES, (PEER, OTHER)),)
PROMPT = Prompt.of(Tokens(ids(1, 100)))


class Seconds(Always):
    """Two seconds of patience, which two sources share."""

    def timeout_for(self, positions: int, deadline: float | None) -> float:
        return 2.0


class Failing(Direct):
    """Two peers, of which the first fails in some way after some answers."""

    def __init__(self, how: str, after: int, **engines: Any) -> None:
        super().__init__(**engines)
        self._how = how
        self._left = after
        self.others = 0

    async def payloads(
        self, address: Address, request: Request, within: float | None = None
    ) -> Sequence[Payload]:
        found = await super().payloads(address, request, within)
        if address == OTHER:
            self.others += 1
            return found
        self._left -= 1
        if self._left >= 0:
            return found
        match self._how:
            case "it is cut":
                raise OverloadedError("the connection was cut")
            case "it hangs":
                await asyncio.Event().wait()
        return LIES[self._how](list(found))


@pytest.mark.parametrize("model", ["llama", "windows"])
@pytest.mark.parametrize("how", ["it is cut", "it hangs", *LIES])
async def test_the_next_peer_gives_what_the_first_failed_to(
    how: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_page_at_a_time(monkeypatch)
    directory = tiny("llama") if model == "llama" else make("qwen3", tmp_path, **WINDOWED)
    config = settings(directory)
    async with started(config, config) as (giving, asking):
        assert asking._exchange is not None
        truth, _ = await answers(giving, make_request("truth", PROMPT))
        for after in (0, 1, 4):
            asking._exchange.price = Seconds()
            direct = Failing(how, after, peer=giving, other=giving)
            asking.use_peers(direct)
            await asking.reset_prefix_cache()
            found = await answers(asking, make_request("one", PROMPT, sources=BOTH))
            assert found == (truth, 96), after
            assert direct.others


async def test_a_peer_gives_what_a_damaged_tier_does_not() -> None:
    memory = anonymous_file(4 << 20)
    config = await small(tiny("llama"))
    async with started(settings(tiny("llama"))) as (giving,):
        truth, _ = await answers(giving, make_request("one", Prompt.of(Tokens(ids(ord("a"), 100)))))
        async with keeping(config, memory, enable_kv_fetch=True) as (engine, tiers):
            await told(engine, tiers, *"abcdef")
            host = tiers.host
            assert host is not None
            before = engine.stats()
            # The cache evicts the last page of a prompt first: these are not its first pages.
            request = make_request("r", Prompt.of(Tokens(ids(ord("a"), 100))), sources=BOTH)
            digests = [digest for _, digest in list(host._places)[:3]]
            for digest in digests:
                host._slots[host._places[0, digest], 100] ^= 1
            direct = Direct(other=giving)
            engine.use_peers(direct)
            assert await answers(engine, request) == (truth, 96)
            after = engine.stats()
            assert after.kv_pages_refused > before.kv_pages_refused
            assert after.kv_pages_loaded > before.kv_pages_loaded
            assert after.kv_pages_fetched > before.kv_pages_fetched


def altered(directory: Path, into: Path) -> Path:
    """A copy of a model with another weight."""
    shutil.copytree(directory, into)
    path = into / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"][0] *= 2
    save_file(weights, path, {"format": "pt"})
    return into


@pytest.mark.parametrize("differs", ["weights", "dtype", "page size"])
async def test_pages_of_another_engine_are_none_of_this_one(differs: str, tmp_path: Path) -> None:
    directory = tiny("llama")
    config = settings(directory)
    match differs:
        case "weights":
            other = settings(altered(directory, tmp_path / "other"))
        case "dtype":
            other = settings(directory, dtype="bfloat16")
        case _:
            other = settings(directory, block_size=32)
    async with started(config, other) as (giving, asking):
        await answers(giving, make_request("one", PROMPT))
        truth, _ = await answers(asking, make_request("one", PROMPT, salt="alone"))
        direct = Direct(peer=giving)
        asking.use_peers(direct)
        found = await answers(asking, make_request("two", PROMPT, sources=BOTH))
        assert found == (truth, 0)
        assert direct.asked
        assert giving.stats().kv_pages_given == 0
