from pathlib import Path

import pytest

from inlay.engine.settings import EngineSettings
from tests.embedding_models import tiny_embedding, tiny_scoring
from tests.engine.embed_conformance import (
    LIMITS,
    CloseConformance,
    EmbedConformance,
    ScoreConformance,
)


class TestEmbedEngine(EmbedConformance, CloseConformance):
    @pytest.fixture(params=["bert", "qwen3"])
    def directory(self, request: pytest.FixtureRequest) -> Path:
        return tiny_embedding(request.param)

    @pytest.fixture
    def settings(self, directory: Path) -> EngineSettings:
        return EngineSettings.of(model=str(directory), task="embed", **LIMITS)


class TestScoreEngine(ScoreConformance):
    @pytest.fixture
    def directory(self) -> Path:
        return tiny_scoring("bert")

    @pytest.fixture
    def settings(self, directory: Path) -> EngineSettings:
        return EngineSettings.of(model=str(directory), task="score", **LIMITS)
