from pathlib import Path

import pytest

from inlay.engine.settings import EngineSettings
from tests.engine.conformance import EngineConformance
from tests.models import tiny


class TestTorchEngine(EngineConformance):
    @pytest.fixture(params=["llama", "qwen3"])
    def directory(self, request: pytest.FixtureRequest) -> Path:
        return tiny(request.param)

    @pytest.fixture
    def settings(self, directory: Path) -> EngineSettings:
        return EngineSettings.of(
            model=str(directory), device="cpu", num_threads=1, kv_cache_memory_bytes=8 << 20
        )


class TestOverlappingTorchEngine(EngineConformance):
    """Each step is launched before the results of the last are read, as on a GPU."""

    @pytest.fixture
    def directory(self) -> Path:
        return tiny("qwen3")

    @pytest.fixture
    def settings(self, directory: Path) -> EngineSettings:
        return EngineSettings.of(
            model=str(directory),
            device="cpu",
            num_threads=1,
            kv_cache_memory_bytes=8 << 20,
            async_scheduling=True,
        )
