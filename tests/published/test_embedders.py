"""Embedding models with the files that sentence-transformers publishes beside them."""

import json
import subprocess
from collections.abc import Iterator
from functools import cache

import httpx
import numpy as np
import pytest

from tests import embedding_reference as reference
from tests.published.conftest import checkpoint, served_by_default
from tests.serving import PYTHON, Served

pytestmark = [pytest.mark.published, pytest.mark.timeout(400)]

MINILM, MPNET = "all-minilm-l6-v2", "all-mpnet-base-v2"

TEXTS = (
    "How do I bake sourdough bread?",
    "A recipe for bread with a starter of flour and water.",
    "def merge(left, right): return sorted(left + right)",
    "À Paris, la bibliothèque ouvre à neuf heures. 東京の天気は晴れです。",
    "a",
    "The harbour town counts its lanterns every night. " * 18,
)
"""Of 3 to 200 tokens."""


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served_by_default(checkpoint(MINILM)) as served:
        yield served


@cache
def expected(text: str) -> reference.Array:
    """What the pipeline of its `modules.json` makes: transformer, mean of states, length 1."""
    directory = checkpoint(MINILM)
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


def test_vectors_are_those_of_the_published_pipeline_alone_and_together(http: httpx.Client) -> None:
    together = embedded(http, TEXTS)
    for text, vector in zip(TEXTS, together, strict=True):
        (alone,) = embedded(http, text)
        for found in (vector, alone):
            np.testing.assert_allclose(found, expected(text), atol=2e-6)


def test_mpnet_is_refused_by_its_name_and_the_reason() -> None:
    done = subprocess.run(
        [PYTHON, "-m", "inlay.cli", "serve", checkpoint(MPNET), "--port", "0"],
        check=False,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    assert "'mpnet': its attention adds a bias for each pair of positions" in done.stderr
