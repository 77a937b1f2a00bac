"""The suite of engines that make vectors, on SGLang."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from inlay.base.errors import InvalidRequestError
from inlay.engine.api import Engine
from inlay.engine.settings import EngineSettings
from tests.embedding_models import tiny_embedding
from tests.engine.embed_conformance import LIMITS, CloseConformance, EmbedConformance
from tests.engines.held import HeldVectors
from tests.engines.sglang.serving import FLAGS
from tests.engines.starting import running


def settings_of(directory: Path, **more: Any) -> EngineSettings:
    return EngineSettings.of(model=str(directory), task="embed", **FLAGS | LIMITS | more)


class _Suite(HeldVectors, EmbedConformance):
    @pytest.fixture(scope="class")
    def settings(self, directory: Path) -> EngineSettings:
        return settings_of(directory)

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    async def engine(self, settings: EngineSettings) -> AsyncIterator[Engine]:
        async with running(settings) as engine:
            yield engine


@pytest.mark.asyncio(loop_scope="class")
class TestDecoder(_Suite, CloseConformance):
    """Its prompts may be rows."""

    @pytest.fixture(scope="class")
    def directory(self) -> Path:
        return tiny_embedding("qwen3")


@pytest.mark.asyncio(loop_scope="class")
class TestEncoder(_Suite):
    @pytest.fixture(scope="class")
    def directory(self) -> Path:
        return tiny_embedding("bge")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bert", "by 'cls'; this one wants mean"),
        ("gemma", "models of type bert, llama"),
        ("roberta", "this one wants (mean and max|max and mean)"),
    ],
)
async def test_a_model_that_sglang_would_pool_in_another_way_is_refused_before_it_starts(
    name: str, said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        async with running(settings_of(tiny_embedding(name))):
            pass


async def test_cross_encoders_and_adapters_are_refused_before_anything_is_started() -> None:
    for more, said in (
        ({"task": "score"}, "--task score"),
        ({"enable_lora": True}, "--enable-lora"),
    ):
        with pytest.raises(InvalidRequestError, match=said):
            async with running(settings_of(tiny_embedding("bge")).replace(**more)):
                pass
