"""Embedding models with the files that sentence-transformers publishes beside them."""

import json
from functools import cache
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests import embedding_reference as reference
from tests.published.conftest import checkpoint

pytestmark = [pytest.mark.published, pytest.mark.timeout(400)]

TEXTS = (
    "How do I bake sourdough bread?",
    "A recipe for bread with a starter of flour and water.",
    "def merge(left, right): return sorted(left + right)",
    "À Paris, la bibliothèque ouvre à neuf heures. 東京の天気は晴れです。",
    "a",
    "The harbour town counts its lanterns every night. " * 18,
)
"""Of 3 to 200 tokens."""


@pytest.fixture(scope="module", params=["all-minilm-l6-v2", "all-mpnet-base-v2"])
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@cache
def expected(directory: Path, text: str) -> reference.Array:
    """What the pipeline of its `modules.json` makes: transformer, mean of states, length 1."""
    modules = json.loads((directory / "modules.json").read_text(encoding="utf-8"))
    kinds = [each["type"].rpartition(".")[2] for each in modules]
    assert kinds == ["Transformer", "Pooling", "Normalize"]
    vector = reference.vector(directory, reference.tokenizer_of(directory)(text)["input_ids"])
    found: reference.Array = vector / np.linalg.norm(vector)
    return found


def embedded(http: httpx.Client, texts: object) -> list[reference.Array]:
    done = http.post("/v1/embeddings", json={"model": "m", "input": texts})
    assert done.status_code == 200, done.text
    return [np.array(each["embedding"], np.float32) for each in done.json()["data"]]


def test_vectors_are_those_of_the_published_pipeline_alone_and_together(
    name: str, http: httpx.Client
) -> None:
    directory = checkpoint(name)
    together = embedded(http, TEXTS)
    for text, vector in zip(TEXTS, together, strict=True):
        (alone,) = embedded(http, text)
        for found in (vector, alone):
            np.testing.assert_allclose(found, expected(directory, text), atol=2e-6)
