"""The suite of engines that make vectors, on vLLM."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from inlay.base.errors import InvalidRequestError
from inlay.engine.api import Engine
from inlay.engine.settings import EngineSettings
from tests.embedding_models import sized_embedding, tiny_scoring
from tests.engine.embed_conformance import (
    LIMITS,
    CloseConformance,
    EmbedConformance,
    ScoreConformance,
)
from tests.engines.held import HeldVectors
from tests.engines.starting import running
from tests.engines.vllm.serving import FLAGS

SIZES: dict[str, Any] = {"hidden_size": 96, "num_attention_heads": 3}
"""vLLM's attention on a CPU takes heads of 32 elements."""

POOLING: dict[str, Any] = {**FLAGS, **LIMITS, "engine_arguments": []}


def settings_of(directory: Path, **more: Any) -> EngineSettings:
    return EngineSettings.of(model=str(directory), **{"task": "embed"} | POOLING | more)


@pytest.mark.asyncio(loop_scope="class")
class TestEncoder(HeldVectors, EmbedConformance, CloseConformance):
    @pytest.fixture(scope="class")
    def directory(self) -> Path:
        return sized_embedding("bert", **SIZES)

    @pytest.fixture(scope="class")
    def settings(self, directory: Path) -> EngineSettings:
        return settings_of(directory)

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    async def engine(self, settings: EngineSettings) -> AsyncIterator[Engine]:
        async with running(settings) as engine:
            yield engine


@pytest.mark.asyncio(loop_scope="class")
class TestDecoder(HeldVectors, EmbedConformance):
    """Its prompts may be rows."""

    @pytest.fixture(scope="class")
    def directory(self) -> Path:
        return sized_embedding("qwen3", **SIZES, num_key_value_heads=1, head_dim=32)

    @pytest.fixture(scope="class")
    def settings(self, directory: Path) -> EngineSettings:
        return settings_of(directory, engine_arguments=["--enable-prompt-embeds"])

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    async def engine(self, settings: EngineSettings) -> AsyncIterator[Engine]:
        async with running(settings) as engine:
            assert engine.card.prompt_embeds is None
            yield engine


@pytest.mark.asyncio(loop_scope="class")
class TestCrossEncoder(HeldVectors, ScoreConformance):
    @pytest.fixture(scope="class")
    def directory(self) -> Path:
        return tiny_scoring("bert", **SIZES)

    @pytest.fixture(scope="class")
    def settings(self, directory: Path) -> EngineSettings:
        return settings_of(directory, task="score")

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    async def engine(self, settings: EngineSettings) -> AsyncIterator[Engine]:
        async with running(settings) as engine:
            yield engine


async def test_pooling_that_vllm_does_not_have_is_refused_before_it_starts() -> None:
    with pytest.raises(InvalidRequestError, match=r"this model wants (mean and max|max and mean)"):
        async with running(settings_of(sized_embedding("roberta", **SIZES))):
            pass
