"""Models that make vectors or scores are held to those of the model's own code, on any worker."""

import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.engine.pool_reference import BOUND, PoolVectors, key_of
from inlay.engine.references import LocalReferences
from inlay.engine.settings import EngineSettings
from inlay.worker.pool_check import check_pool
from tests.embedding_models import tiny_embedding, tiny_scoring
from tests.engine.embed_conformance import LIMITS
from tests.engines.held import own_cache, vectors_are_held_to_what_is_kept
from tests.engines.starting import running
from tests.lifelike import lifelike


@pytest.mark.parametrize(
    ("name", "task"),
    [("bert", "embed"), ("modernbert", "embed"), ("gemma", "embed"), ("bert", "score")],
)
async def test_a_worker_is_held_to_what_is_kept_of_its_pool(
    name: str, task: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    directory = lifelike(tiny_embedding(name) if task == "embed" else tiny_scoring(name, 1))
    given = {"model": str(directory), "task": task, "device": "cpu", **LIMITS}
    settings = EngineSettings.of(**given)
    with own_cache(tmp_path):
        async with running(settings) as engine:
            assert engine.card.dtype == "bfloat16"
            await vectors_are_held_to_what_is_kept(engine, directory, caplog)


async def test_a_reference_of_another_width_is_not_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    given = {"model": str(tiny_embedding("bert")), "task": "embed", "device": "cpu", **LIMITS}
    with own_cache(tmp_path):
        async with running(EngineSettings.of(**given)) as engine:
            card = engine.card
            LocalReferences().keep(key_of(card.weights_id, card.dtype), _kept().encode())
            assert await check_pool(engine, "start", shared=True) is None
    assert "not compared with other workers of its pool: its vectors are" in caplog.text
    assert "(3, 16)" in caplog.text


def _kept(*, count: int = 3, size: int = 16) -> PoolVectors:
    variants = np.random.default_rng(1).normal(size=(1, count, size)).astype(np.float32)
    changed = variants * (1 + np.random.default_rng(2).normal(size=(2, count, size)) * 0.004)
    prompts = [((1, 2, 3), 3)] * count
    both = np.concatenate([variants, changed.astype(np.float32)])
    return PoolVectors.of("transformers", "bfloat16", prompts, both)


@given(st.floats(0.001, 0.5))
def test_a_distance_is_an_error_over_the_rounding(error: float) -> None:
    kept = PoolVectors.decode(_kept().encode(), 4)
    values = np.frombuffer(kept.vectors, "<f4").reshape(3, -1)
    (found,) = kept.distances((values * (1 + error)).astype(np.float32)).values()
    assert found == pytest.approx((error + 0.001) / (kept.noise + 0.001), rel=0.01)
    (found,) = kept.distances(np.full_like(values, np.nan)).values()
    assert not found <= BOUND


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-9],
        lambda data: b"",
        lambda data: data.replace(b"vectors 1", b"vectors 0"),
        lambda data: data.replace(b"\x01\x02\x03", b"\x01\x02\x09"),
    ],
)
def test_what_is_no_reference_of_the_model_is_not_used(damage: object) -> None:
    assert callable(damage)
    with pytest.raises(ValueError, match=r"its|it has|truncated|Input data"):
        PoolVectors.decode(damage(_kept().encode()), 4)
