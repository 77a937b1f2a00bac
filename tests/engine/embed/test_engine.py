from pathlib import Path

import pytest

from inlay.base.errors import InvalidRequestError
from inlay.engine.settings import EngineSettings
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Task
from tests import scoring_models
from tests.embedding_models import tiny_embedding, tiny_scoring
from tests.engine.embed_conformance import (
    LIMITS,
    CloseConformance,
    EmbedConformance,
    ScoreConformance,
    Waiting,
    ids,
    started,
    to_embed,
    vectors_of,
)


class TestEmbedEngine(EmbedConformance, CloseConformance):
    @pytest.fixture(params=["bert", "qwen3"])
    def directory(self, request: pytest.FixtureRequest) -> Path:
        return tiny_embedding(request.param)

    @pytest.fixture
    def settings(self, directory: Path) -> EngineSettings:
        return EngineSettings.of(model=str(directory), task="embed", **LIMITS)


@pytest.mark.asyncio
async def test_a_pair_of_texts_is_refused_where_a_template_writes_pairs() -> None:
    path = scoring_models.headed("qwen3")
    engine = await started(EngineSettings.of(model=str(path), task="score", **LIMITS))
    try:
        assert await engine.probe() > 0
        prompts = [Prompt.of(Tokens(ids(9, seed))) for seed in range(2)]
        pairs = to_embed("pairs", *prompts, task=Task.SCORE, seconds=(9, 4))
        with pytest.raises(InvalidRequestError, match="frontend is older"):
            engine.submit(pairs, lambda _: None)
        whole = to_embed("whole", *prompts, task=Task.SCORE, seconds=(9, 9))
        assert vectors_of(await Waiting(engine, whole).answer()).shape == (2, 1)
    finally:
        await engine.close()


class TestScoreEngine(ScoreConformance):
    @pytest.fixture
    def directory(self) -> Path:
        return tiny_scoring("bert")

    @pytest.fixture
    def settings(self, directory: Path) -> EngineSettings:
        return EngineSettings.of(model=str(directory), task="score", **LIMITS)
