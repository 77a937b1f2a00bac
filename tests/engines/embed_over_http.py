"""Tests of `/v1/embeddings` over HTTP, whatever engine is behind the frontend.

An engine's own test module subclasses `EmbedOverHttp` and gives it the fixtures `directory` (of
`tests.embedding_models`, float32, with matryoshka) and `server`, which serves it as "m";
`rows_refused` is said where rows are sent, None where they are taken.
"""

import base64
from pathlib import Path
from typing import Any, ClassVar

import httpx
import numpy as np
import numpy.typing as npt
import openai
import pytest
import torch

from tests import embedding_reference as reference
from tests.embedding_models import MAX_LENGTH, VOCAB_SIZE, WORDS
from tests.equality.test_over_http import saved
from tests.serving import Served

TEXTS = [" ".join((WORDS * 2)[number : number + 1 + 3 * number % 37]) for number in range(1, 40)]
"""More than two batches of the engine."""

Array = npt.NDArray[np.float32]


def post(server: Served, **body: Any) -> httpx.Response:
    return httpx.post(server.v1 + "/embeddings", json={"model": "m", **body}, timeout=300)


def vectors(response: httpx.Response) -> Array:
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    return np.array([item["embedding"] for item in data], np.float32)


def ids_of(directory: Path, text: str) -> list[int]:
    found: list[int] = reference.tokenizer_of(directory)(text)["input_ids"]
    return found


def expected(directory: Path, text: str) -> Array:
    vector = reference.vector(directory, ids_of(directory, text))
    return vector / np.float32(np.linalg.norm(vector))


def close(found: Array, wanted: Array) -> None:
    """Both are of length 1, and the same."""
    assert found.shape == wanted.shape
    assert np.linalg.norm(found, axis=1) == pytest.approx(1, abs=1e-5)
    assert (found * wanted).sum(1).min() > 0.9999


def refused(answer: httpx.Response, said: str) -> None:
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"], answer.text


class EmbedOverHttp:
    """Engine-independent tests of the route."""

    rows_refused: ClassVar[str | None]

    @pytest.fixture(scope="class")
    def wanted(self, directory: Path) -> Array:
        return np.array([expected(directory, text) for text in TEXTS])

    def test_the_openai_client_gets_the_vectors_of_transformers(
        self, server: Served, directory: Path, wanted: Array
    ) -> None:
        count = sum(len(ids_of(directory, text)) for text in TEXTS)
        with openai.OpenAI(base_url=server.v1, api_key="none", timeout=300) as client:
            for options in ({}, {"encoding_format": "float"}):
                answer = client.embeddings.create(model="m", input=TEXTS, **options)  # type: ignore[arg-type]
                assert answer.model == "m"
                assert answer.usage.prompt_tokens == answer.usage.total_tokens == count
                assert [item.index for item in answer.data] == list(range(len(TEXTS)))
                close(np.array([item.embedding for item in answer.data], np.float32), wanted)

    def test_ids_and_base64_give_what_texts_and_numbers_give(
        self, server: Served, directory: Path, wanted: Array
    ) -> None:
        ids = [ids_of(directory, text) for text in TEXTS]
        close(vectors(post(server, input=ids)), wanted)
        close(vectors(post(server, input=ids[3])), wanted[3:4])
        shown = post(server, input=ids, encoding_format="base64").json()["data"]
        close(
            np.array([np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in shown]),
            wanted,
        )

    def test_shortened_vectors_have_length_one_again(self, server: Served, wanted: Array) -> None:
        cut = wanted[:, :12] / np.linalg.norm(wanted[:, :12], axis=1, keepdims=True)
        close(vectors(post(server, input=TEXTS, dimensions=12)), cut)

    def test_rows_are_the_tokens_they_stand_for_or_a_400_that_says_why(
        self, server: Served, directory: Path, wanted: Array
    ) -> None:
        rows = [reference.embedded(directory, ids_of(directory, text)) for text in TEXTS[:4]]
        answer = post(server, prompt_embeds=[saved(torch.from_numpy(each)) for each in rows])
        if self.rows_refused is None:
            close(vectors(answer), wanted[:4])
            assert answer.json()["usage"]["prompt_tokens"] == sum(map(len, rows))
            broken = rows[0].copy()
            broken[0, 0] = np.nan
            answer = post(server, prompt_embeds=saved(torch.from_numpy(broken)))
        refused(answer, self.rows_refused or "must be finite")

    def test_what_is_no_input_is_refused_by_name_and_harms_nobody(
        self, server: Served, directory: Path, wanted: Array
    ) -> None:
        entry = httpx.get(server.v1 + "/models/m").json()
        cases: list[tuple[str, dict[str, Any]]] = [
            ("out of vocabulary", {"input": [5, VOCAB_SIZE]}),
            ("out of vocabulary", {"input": [[5], [entry["vocab_size"] + 999_999]]}),
            ("must not be empty", {"input": []}),
            ("is empty", {"input": [[5], []]}),
            ("empty string", {"input": ["hello", ""]}),
            ("of several of these", {"input": ["hello", [5]]}),
            ("maximum context length", {"input": [[5] * (MAX_LENGTH + 1)]}),
            ("dimensions may be", {"input": "hello", "dimensions": wanted.shape[1] + 1}),
            ("does not generate text", {"prompt": "hello"}),
        ]
        for said, fields in cases:
            path = "/completions" if "prompt" in fields else "/embeddings"
            answer = httpx.post(server.v1 + path, json={"model": "m", **fields}, timeout=300)
            refused(answer, said)
        close(vectors(post(server, input=TEXTS)), wanted)
