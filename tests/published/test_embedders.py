"""Embedding models with the files that sentence-transformers publishes beside them."""

import json
import re
import shlex
from functools import cache
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests import embedding_reference as reference
from tests.published.conftest import checkpoint

pytestmark = [pytest.mark.published, pytest.mark.timeout(400)]

PAGE = Path(__file__).parents[2] / "docs" / "start" / "search.md"

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


@pytest.mark.parametrize("name", ["all-minilm-l6-v2"], indirect=True)
def test_the_commands_of_the_first_hour_give_the_answers_it_shows(
    name: str, http: httpx.Client
) -> None:
    page = PAGE.read_text(encoding="utf-8")
    answers = {}
    for command in re.findall(r"^    (curl .*\\\n.*)$", page, re.M):
        words = shlex.split(command.replace("\\\n", " "))
        path = words[1].removeprefix("http://127.0.0.1:8001")
        body = {**json.loads(words[words.index("-d") + 1]), "model": "m"}
        answers[path] = http.post(path, json=body).raise_for_status().json()
    (vector,) = answers["/v1/embeddings"]["data"]
    size = re.search(r"one vector of (\d+) numbers", page)
    assert size
    assert len(vector["embedding"]) == int(size[1])
    scores = [f"{each['relevance_score']:.3f}" for each in answers["/v1/rerank"]["results"]]
    assert f"{scores[0]}\nagainst {scores[1]} (cosines)" in page
