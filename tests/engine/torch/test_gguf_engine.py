"""What engines do besides computing is the same over weights in GGUF's blocks.

Sleep, adapters, drafts from the text, pages of another engine.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from inlay.engine.torch.engine import TorchEngine
from inlay.engine.torch.native.integers import integers
from inlay.messages.prompt import Prompt, Tokens
from tests import adapters
from tests.engine.adapter_conformance import load as load_adapter
from tests.engine.conformance import ids, make_request, run
from tests.engine.torch.test_page_exchange import (
    FROM_PEER,
    PEER,
    Direct,
    answers,
    pair,
    settings,
    started,
)
from tests.gguf_models import llama_in_blocks

pytestmark = pytest.mark.skipif(integers() is None, reason="no products in integers here")

PROMPT = Prompt.of(Tokens(ids(1, 40)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A directory, and its file in blocks."""
    return llama_in_blocks(tmp_path_factory.mktemp("engine"))


@asynccontextmanager
async def engine_of(file: Path, **changes: Any) -> AsyncIterator[TorchEngine]:
    async with started(settings(file, enable_kv_fetch=False, **changes)) as (engine,):
        yield engine


@pytest.mark.thorough
async def test_it_says_the_same_after_sleep(model: tuple[Path, Path]) -> None:
    async with engine_of(model[1]) as engine:
        before, _ = await answers(engine, make_request("before", PROMPT, 12))
        for level in (1, 2):
            await engine.sleep(level)
            assert await engine.wake_up(())
            after, cached = await answers(engine, make_request(f"after {level}", PROMPT, 12))
            assert (after, cached) == (before, 0)


@pytest.mark.thorough
async def test_an_adapter_is_added_to_products_with_blocks(
    model: tuple[Path, Path], tmp_path: Path
) -> None:
    """It adds what it adds to the exact weights; a batch and a sleep change nothing."""
    plain, file = model
    adapter = adapters.make_lora(tmp_path, plain)
    changes: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "dtype": "float32"}
    first = {}
    for activations in ("int8", "exact"):
        async with engine_of(file, activations=activations, **changes) as engine:
            await load_adapter(engine, "a", adapter)
            (alone,) = await run(engine, make_request("alone", PROMPT, 8, adapter="a", logprobs=1))
            first[activations] = alone.deltas[0].logprobs[0]
            await engine.sleep(1)
            assert await engine.wake_up(())
            with_it, without = await run(
                engine,
                make_request("with", PROMPT, 8, adapter="a"),
                make_request("without", PROMPT, 8),
            )
            assert with_it.output == alone.output != without.output
    assert first["int8"].top[0][0] == first["exact"].top[0][0]
    assert first["int8"].logprob == pytest.approx(first["exact"].logprob, abs=0.2)


@pytest.mark.usefixtures("even_steps")
async def test_drafts_from_the_text_change_no_output(model: tuple[Path, Path]) -> None:
    repeated = Prompt.of(Tokens(ids(1, 20) * 4))
    found = []
    for method in ("none", "ngram"):
        config = f'{{"method": "{method}"}}'
        async with engine_of(model[1], speculative_config=config, dtype="float32") as engine:
            output, _ = await answers(engine, make_request("one", repeated, 120))
            found.append(output)
            drafted = engine.stats().num_draft_tokens
            assert bool(drafted) == (method == "ngram")
    assert found[0] == found[1]


async def test_pages_come_from_another_engine(model: tuple[Path, Path]) -> None:
    prompt = Prompt.of(Tokens(ids(1, 150)))
    async with pair(model[1]) as (direct, asking):
        giving = direct.engines[PEER]
        assert giving is not None
        truth, _ = await answers(giving, make_request("truth", prompt))
        found = await answers(asking, make_request("found", prompt, sources=FROM_PEER))
        assert found == (truth, (len(prompt) - 1) // 16 * 16)
        assert direct.asked


async def test_pages_of_exact_products_are_others(model: tuple[Path, Path]) -> None:
    prompt = Prompt.of(Tokens(ids(1, 150)))
    configs = settings(model[1], activations="exact"), settings(model[1])
    async with started(*configs) as (giving, asking):
        asking.use_peers(Direct(peer=giving))
        await answers(giving, make_request("exact", prompt))
        _, cached = await answers(asking, make_request("int8", prompt, sources=FROM_PEER))
        assert cached == 0
