"""Cohere's `/v2/embed`, asked as cohere-python 7.3.1 does, against `/v1/embeddings`."""

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.embedding_models import tiny_embedding
from tests.live import fleet

TEXTS = ["the harbour counts its lanterns", "cold wind"]
RECORDED: dict[str, Any] = {
    "texts": TEXTS,
    "model": "tiny",
    "input_type": "search_document",
    "embedding_types": ["float", "int8", "binary", "ubinary", "base64"],
}
"""The body that `ClientV2.embed` sends."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with fleet(tiny_embedding("bert"), task="embed") as running:
        yield running.serve()


def post(url: str, path: str = "/v2/embed", **body: Any) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=180)


def vectors(url: str, **body: Any) -> list[Any]:
    answer = post(url, "/v1/embeddings", **body).json()
    return [one["embedding"] for one in answer["data"]]


def test_each_type_is_as_embeddings_gives_it(url: str) -> None:
    answer = post(url, **RECORDED).json()
    assert answer["response_type"] == "embeddings_by_type"
    assert answer["texts"] == TEXTS
    assert answer["meta"]["api_version"] == {"version": "2"}
    assert answer["meta"]["billed_units"]["input_tokens"] > 0
    found = answer["embeddings"]
    body = {"input": TEXTS, "role": "document"}
    assert found["float"] == vectors(url, **body)
    for kind in ("int8", "binary", "ubinary"):
        assert found[kind] == vectors(url, **body, embed_dtype=kind)
    raw = [np.frombuffer(base64.b64decode(one), np.float32) for one in found["base64"]]
    np.testing.assert_allclose(raw, found["float"], rtol=1e-6)


def test_the_first_version_gives_a_list_unless_types_are_named(url: str) -> None:
    plain = {key: value for key, value in RECORDED.items() if key != "embedding_types"}
    answer = post(url, "/v1/embed", **plain).json()
    assert answer["response_type"] == "embeddings_floats"
    assert answer["embeddings"] == vectors(url, input=TEXTS, role="document")
    typed = post(url, "/v1/embed", **RECORDED).json()
    assert typed["embeddings"] == post(url, **RECORDED).json()["embeddings"]


def test_a_rerank_has_metadata_and_cuts_documents(url: str) -> None:
    # As cohere-haystack sends it.
    body = {"query": "cold", "documents": [*TEXTS, "wind " * 400], "max_tokens_per_doc": 4096}
    answer = post(url, "/v2/rerank", **body).json()
    assert len(answer["results"]) == 3
    units = {"billed_units": {"search_units": 1}, "api_version": {"version": "2"}}
    assert answer["meta"] == units
    many = {"query": "cold", "documents": ["wind"] * 101}
    assert post(url, "/v2/rerank", **many).json()["meta"]["billed_units"] == {"search_units": 2}
    assert "meta" not in post(url, "/v1/rerank", **many).json()
    assert post(url, "/v1/rerank", **body).status_code == 400
    refused = post(url, "/v2/rerank", **body, truncation=False)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "documents[2]", refused.text
    assert post(url, "/v2/rerank", **many, truncation=False).status_code == 200


def test_a_long_text_is_cut_unless_that_is_refused(url: str) -> None:
    text = "cold wind " * 400
    cut = post(url, texts=[text], model="tiny").json()["embeddings"]["float"]
    assert cut == vectors(url, input=[text], auto_truncate=True)
    start = post(url, texts=[text], truncate="START").json()["embeddings"]["float"]
    assert start == vectors(url, input=[text], auto_truncate=True, truncation_side="left")
    few = post(url, texts=[text], max_tokens=4).json()["embeddings"]["float"]
    assert few == vectors(url, input=[text], truncate_prompt_tokens=4)
    refused = post(url, texts=[text], truncate="NONE")
    assert refused.status_code == 400
    assert "maximum context length" in refused.json()["error"]["message"]


def test_errors_name_coheres_fields(url: str) -> None:
    for body, param in (
        ({"texts": []}, "texts"),
        ({"texts": TEXTS, "output_dimension": 7}, "output_dimension"),
        ({"texts": TEXTS, "images": ["data:image/png;base64,"]}, "images"),
        ({"texts": TEXTS, "input_type": "search"}, "input_type"),
        ({"texts": TEXTS, "embedding_types": ["uint8"]}, "embedding_types"),
    ):
        answer = post(url, **body)
        assert answer.status_code == 400
        assert param in str(answer.json()["error"]["param"])


def test_purposes_without_a_prompt_of_the_model_change_nothing(url: str) -> None:
    plain = post(url, texts=TEXTS).json()["embeddings"]
    for purpose in ("classification", "clustering"):
        assert post(url, texts=TEXTS, input_type=purpose).json()["embeddings"] == plain
