"""The adapter suite of the torch engine, on one vLLM for all."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest
import pytest_asyncio

from inlay.engine.api import GenerateEngine
from inlay.engine.settings import EngineSettings
from tests.engine.adapter_conformance import AdapterConformance, Adapting
from tests.engines.starting import started
from tests.engines.vllm.serving import FLAGS


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def adapting(directory: Path) -> AsyncIterator[GenerateEngine]:
    settings = EngineSettings.of(
        model=str(directory), **FLAGS, enable_lora=True, max_loras=3, max_lora_rank=8
    )
    async with started(settings) as engine:
        yield engine


@pytest.mark.asyncio(loop_scope="session")
class TestVllmAdapters(AdapterConformance):
    @pytest_asyncio.fixture(loop_scope="session")
    async def engine(self, adapting: GenerateEngine) -> AsyncIterator[Adapting]:  # type: ignore[override]
        engine = cast("Adapting", adapting)
        yield engine
        for name in "abcde":
            await engine.unload_adapter(name)
        await engine.reset_prefix_cache()
