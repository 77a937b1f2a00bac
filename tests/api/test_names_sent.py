"""An error names the field that the client sent, where one has several names."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.embedding_models import tiny_embedding
from tests.live import fleet
from tests.payloads import error, post

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "count"}]}
ASK: dict[str, Any] = {"model": "tiny", "input": "count"}
MANY = 10**6


@pytest.mark.parametrize(
    ("path", "body", "field", "said"),
    [
        ("chat/completions", {**CHAT, "max_tokens": MANY}, "max_tokens", "max_tokens asks for"),
        (
            "chat/completions",
            {**CHAT, "max_completion_tokens": MANY},
            "max_completion_tokens",
            "and max_completion_tokens asks for",
        ),
        (
            "chat/completions",
            {**CHAT, "max_completion_tokens": 2, "min_tokens": 5},
            "min_tokens",
            "min_tokens must be at most max_completion_tokens (2)",
        ),
        (
            "responses",
            {**ASK, "max_output_tokens": MANY},
            "max_output_tokens",
            "and max_output_tokens asks for",
        ),
        (
            "responses",
            {**ASK, "max_output_tokens": 2, "min_tokens": 5},
            "min_tokens",
            "at most max_output_tokens (2)",
        ),
    ],
)
def test_lengths(url: str, path: str, body: dict[str, Any], field: str, said: str) -> None:
    found = error(post(url, f"/v1/{path}", body))
    assert (found["param"], said in found["message"]) == (field, True), found


@pytest.mark.parametrize("said", ["max_tokens", "use max_tokens"])
def test_what_is_quoted_stays_as_the_client_sent_it(url: str, said: str) -> None:
    body = {**ASK, "max_output_tokens": 2, "tool_choice": said}
    assert f"'{said}'" in error(post(url, "/v1/responses", body))["message"]


def test_a_field_whose_alias_has_other_values_is_named_beside_it(vectors: str) -> None:
    body = {**TEXT, "embedding_type": "float", "endianness": "big"}
    message = error(post(vectors, "/v1/embeddings", body))["message"]
    assert "encoding_format (sent as embedding_type) is float" in message


@pytest.fixture(scope="module")
def vectors() -> Iterator[str]:
    with fleet(tiny_embedding("bert"), task="embed") as running:
        yield running.serve()


TEXT: dict[str, Any] = {"input": "a"}
RANK: dict[str, Any] = {"query": "a", "documents": ["b"]}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/embeddings", {**TEXT, "dimensions": MANY}, "dimensions"),
        ("/v1/embeddings", {**TEXT, "output_dimension": MANY}, "output_dimension"),
        ("/v1/embeddings", {**TEXT, "output_dtype": "int8", "endianness": "big"}, "endianness"),
        ("/v1/rerank", {**RANK, "top_n": -1}, "top_n"),
        ("/v1/rerank", {**RANK, "top_k": -1}, "top_k"),
        ("/v2/rerank", {**RANK, "top_k": -1}, "top_k"),
        ("/v1/score", {"queries": "a", "data_1": "b", "items": ["c"]}, "queries"),
        ("/v1/score", {"queries": ["a", "b", "c"], "items": ["c", "d"]}, "queries"),
        ("/v1/score", {"queries": "a", "items": [""]}, "items"),
    ],
)
def test_vectors_and_scores(vectors: str, path: str, body: dict[str, Any], field: str) -> None:
    found = error(post(vectors, path, body))
    assert found["param"] == field
    assert field in found["message"], found
