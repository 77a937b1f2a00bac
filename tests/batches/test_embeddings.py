"""Batches of embeddings: joined for the engine, each line as if asked alone."""

import base64
import json
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from safetensors.numpy import load

from inlay.store.settings import BatchSettings
from tests.batches.test_batches import begin, client_of, ended, line, rows
from tests.embedding_models import tiny_embedding
from tests.live import fleet

TEXTS = [f"{word} of the harbour {'at night ' * (n % 5)}" for n, word in enumerate("abcdefgh" * 5)]


@pytest.fixture(scope="module")
def embed_url() -> Iterator[str]:
    with fleet(tiny_embedding("bert"), task="embed", dtype="float32") as running:
        yield running.serve(batches=BatchSettings(batch_store="memory"))


@pytest.fixture
def client(embed_url: str) -> openai.OpenAI:
    return client_of(embed_url)


def body_of(index: int, text: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": "tiny",
        "input": [text, text[::-1]] if index % 9 == 0 else text,
    }
    return {**body, "encoding_format": "base64"} if index % 4 == 0 else body


@pytest.mark.thorough
def test_each_line_is_answered_as_it_would_be_alone(client: openai.OpenAI, embed_url: str) -> None:
    bodies = {f"t{index}": body_of(index, text) for index, text in enumerate(TEXTS)}
    data = b"".join(line(id_, "/v1/embeddings", body) for id_, body in bodies.items())
    batch = ended(client, begin(client, data, "/v1/embeddings"))
    assert batch.status == "completed"
    found = rows(client, batch.output_file_id)
    assert set(found) == set(bodies)
    for id_, body in bodies.items():
        answer, expected = (
            found[id_]["response"]["body"],
            httpx.post(f"{embed_url}/v1/embeddings", json=body).json(),
        )
        assert answer["usage"] == expected["usage"]
        for got, wanted in zip(answer["data"], expected["data"], strict=True):
            np.testing.assert_allclose(vector(got), vector(wanted), atol=2e-6)


def test_a_line_of_rerank_counts_its_tokens_and_one_with_texts_is_refused(
    client: openai.OpenAI,
) -> None:
    asked = {"model": "tiny", "query": "ships"}
    good = line("a", "/rerank", {**asked, "documents": TEXTS[:2]})
    batch = ended(client, begin(client, good, "/rerank"))
    (row,) = rows(client, batch.output_file_id).values()
    assert batch.usage is not None
    assert batch.usage.input_tokens == row["response"]["body"]["usage"]["prompt_tokens"] > 0
    texts = line("b", "/rerank", {**asked, "texts": TEXTS[:2]})
    batch = ended(client, begin(client, good + texts, "/rerank"))
    assert batch.status == "failed"
    assert batch.errors is not None
    problems = batch.errors.data or []
    assert [(each.line, each.param) for each in problems] == [(2, "body.texts")]
    assert "a line of a batch gives documents" in str(problems[0].message)


def vector(entry: dict[str, Any]) -> Any:
    value = entry["embedding"]
    if isinstance(value, str):
        return np.frombuffer(base64.b64decode(value), np.float32)
    return np.array(value, np.float32)


def test_a_line_that_is_too_long_fails_alone(client: openai.OpenAI) -> None:
    data = line("ok", "/v1/embeddings", {"input": "a"})
    data += line("long", "/v1/embeddings", {"input": "a " * 5000})
    batch = ended(client, begin(client, data, "/v1/embeddings"))
    error = rows(client, batch.error_file_id)["long"]
    assert error["response"]["status_code"] == 400
    assert error["error"] is None
    assert set(rows(client, batch.output_file_id)) == {"ok"}
    assert json.dumps(error)


@pytest.mark.parametrize("form", ["npy", "safetensors"])
def test_vectors_come_as_one_matrix_in_the_order_of_the_lines(
    client: openai.OpenAI, embed_url: str, form: str
) -> None:
    texts = TEXTS[:9]
    parts = [line(f"t{n}", "/v1/embeddings", {"input": text}) for n, text in enumerate(texts)]
    parts.insert(3, line("long", "/v1/embeddings", {"input": "a " * 5000}))
    parts.insert(5, line("two", "/v1/embeddings", {"input": ["a", "b"]}))
    batch = ended(
        client,
        begin(client, b"".join(parts), "/v1/embeddings", extra_body={"output_format": form}),
    )
    found = rows(client, batch.output_file_id)
    assert set(found) == {f"t{n}" for n in range(9)}
    assert {each["response"]["body"]["data"] == [] for each in found.values()} == {True}
    assert found["t0"]["response"]["body"]["usage"]["prompt_tokens"] > 0
    assert set(rows(client, batch.error_file_id)) == {"long", "two"}
    data = client.files.content(batch.matrix_file_id).read()  # type: ignore[attr-defined]
    matrix = np.load(BytesIO(data)) if form == "npy" else load(data)["embeddings"]
    assert matrix.shape[0] == 11
    assert np.flatnonzero(np.isnan(matrix).any(axis=1)).tolist() == [3, 5]
    answer = httpx.post(f"{embed_url}/v1/embeddings", json={"input": texts}).json()
    expected = np.array([each["embedding"] for each in answer["data"]], np.float32)
    np.testing.assert_allclose(np.delete(matrix, [3, 5], axis=0), expected, atol=2e-6)
