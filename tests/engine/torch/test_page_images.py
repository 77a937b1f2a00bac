"""Pages of prompts with images, which end inside them: fetched, evicted, and lost to preemption.

Of images whose positions have three axes and inner features, and of those that are never cut.
"""

import math
import os
from collections.abc import Iterator
from typing import Any

import pytest

from inlay.base.errors import OverloadedError
from inlay.engine.settings import EngineSettings
from inlay.messages.prompt import Media
from inlay.messages.request import Payload
from inlay.transport.local.arena import anonymous_file
from tests.engine.conformance import ids, make_request
from tests.engine.torch.test_page_exchange import (
    FROM_PEER,
    Direct,
    answers,
    one_page_at_a_time,
    settings,
    started,
)
from tests.engine.torch.test_page_tiers import keeping
from tests.engine.torch.test_parking import outputs, pages_are_kept_at_once
from tests.engine.torch.vision_reference import Parts, Picture, directory_of, generated, prompt_of

__all__ = ["pages_are_kept_at_once"]

PAGES = {"qwen2_vl": 24, "qwen3_vl": 24, "gemma3": 34}
"""Families, and the pages of an engine that has no room for four of their prompts."""
FAMILIES = tuple(PAGES)


def parts(number: int) -> Parts:
    """Two images among tokens."""
    return (
        ids(10 + number, 27), Picture(number, 70, 90), ids(20 + number, 40),
        Picture(30 + number, 40, 56), ids(40 + number, 5),
    )  # fmt: skip


def config(family: str, **changes: Any) -> EngineSettings:
    return settings(directory_of(family), **changes)


async def of_pages(family: str, pages: int) -> EngineSettings:
    """Settings of an engine with so many pages."""
    async with started(config(family)) as (engine,):
        assert engine._model is not None
        size = pages * engine._model.page_bytes(16)
    return config(family, kv_cache_memory_bytes=size, max_model_len=240)


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = anonymous_file(16 << 20)
    yield descriptor
    os.close(descriptor)


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
async def test_those_of_a_peer_give_the_same_output(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_page_at_a_time(monkeypatch)
    prompt, truth = prompt_of(family, parts(1)), generated(family, parts(1), 8).ids
    ends = [
        end
        for end in range(0, len(prompt), 16)
        if not any(first < end < last for first, last in prompt.atomic_bounds())
    ]
    # A page ends inside an image.
    assert any(
        start < end < start + len(segment)
        for start, segment in prompt.spans(0, len(prompt))
        for end in range(0, len(prompt), 16)
        if isinstance(segment, Media)
    )
    async with started(config(family), config(family)) as (giving, asking):
        direct = Direct(peer=giving)
        asking.use_peers(direct)
        assert (await answers(giving, make_request("truth", prompt)))[0] == truth

        async def cached(after: float) -> int:
            """Cached positions where so many answers come."""

            def cut(number: int, found: list[Payload]) -> list[Payload]:
                if number > after:
                    raise OverloadedError("the connection was cut")
                return found

            direct.asked.clear()
            direct.tamper = cut
            await asking.reset_prefix_cache()
            asked = make_request("asks", prompt, sources=FROM_PEER)
            output, found = await answers(asking, asked)
            assert output == truth, after
            return found

        # No prefix ends in an atomic image, nor are pages asked for that lead there.
        assert await cached(math.inf) == ends[-1]
        whole = len(direct.asked)
        found = [await cached(after) for after in range(whole)]
        assert set(found) <= set(ends)
        assert found == sorted(found)
        assert found[0] == 0


@pytest.mark.parametrize("family", FAMILIES)
async def test_those_that_were_evicted_come_back(
    family: str, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_page_at_a_time(monkeypatch)
    async with keeping(await of_pages(family, PAGES[family]), memory) as (engine, tiers):
        truth = []
        for again in range(2):
            for number in range(1, 5):
                request = make_request(str(number), prompt_of(family, parts(number)))
                output, cached = await answers(engine, request)
                assert again == (cached > 0), (again, number)
                truth.append(output)
                tiers.flush()
        assert truth[:4] == truth[4:]
        assert truth[0] == generated(family, parts(1), 8).ids
        stats = engine.stats()
        assert stats.kv_pages_loaded > 0
        assert (stats.kv_pages_refused, stats.preemptions) == (0, 0)


@pytest.mark.thorough
@pytest.mark.parametrize(
    # With fewer pages, Gemma 3's preempted sequences find in the cache all that they have lost.
    ("family", "pages"),
    [("qwen2_vl", 24), ("qwen3_vl", 24), ("gemma3", 50)],
)
async def test_those_of_a_preempted_sequence_come_back(
    family: str, pages: int, memory: int
) -> None:
    some = [make_request(str(n), prompt_of(family, parts(n)), 100) for n in range(1, 5)]
    async with started(config(family)) as (roomy,):
        truth = await outputs(roomy, some)
        assert roomy.stats().preemptions == 0
    async with keeping(await of_pages(family, pages), memory) as (engine, _):
        assert await outputs(engine, some) == truth
        stats = engine.stats()
        assert stats.preemptions > 0
        assert stats.kv_pages_loaded > 0
        assert stats.kv_pages_refused == 0
