"""`/v1/score` and `/v1/rerank`, in vLLM's shapes."""

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inlay.embedding.config import EmbeddingConfig
from tests import embedding_reference as reference
from tests.embedding_models import tiny_embedding, tiny_scoring
from tests.live import Fleet, fleet
from tests.payloads import saved

QUERY = "how many ships"
DOCUMENTS = [
    "the harbour counts ships every night",
    "cold wind",
    "the capital of the island",
    "ships sail south",
]


@pytest.fixture(scope="module")
def bert() -> Iterator[Fleet]:
    with fleet(tiny_scoring("bert"), task="score") as running:
        yield running


@pytest.fixture(scope="module")
def url(bert: Fleet) -> str:
    return bert.serve()


@pytest.fixture(scope="module")
def embedder() -> Iterator[str]:
    with fleet(tiny_embedding("bge"), task="embed") as running:
        yield running.serve()


@pytest.fixture(scope="module")
def e5() -> Iterator[str]:
    with fleet(tiny_embedding("e5"), task="embed") as running:
        yield running.serve()


def post(url: str, path: str, **body: Any) -> dict[str, Any]:
    response = httpx.post(url + path, json=body, timeout=180)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def expected(query: str, document: str) -> float:
    (logit,) = reference.logits(tiny_scoring("bert"), query, document)
    return float(1 / (1 + np.exp(-logit)))


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_one_text_is_scored_against_many(url: str, path: str) -> None:
    body = post(url, path, model="tiny", text_1=QUERY, text_2=DOCUMENTS)
    assert [item["score"] for item in body["data"]] == pytest.approx(
        [expected(QUERY, document) for document in DOCUMENTS], abs=1e-5
    )
    assert [item["index"] for item in body["data"]] == [0, 1, 2, 3]
    tokenizer = reference.tokenizer_of(tiny_scoring("bert"))
    assert body["usage"]["prompt_tokens"] == sum(
        len(tokenizer(QUERY, each)["input_ids"]) for each in DOCUMENTS
    )


def test_many_are_scored_against_as_many_under_every_name(url: str) -> None:
    wanted = [expected(*pair) for pair in zip(DOCUMENTS, DOCUMENTS[::-1], strict=True)]
    for first, second in (
        ("text_1", "text_2"),
        ("queries", "documents"),
        ("queries", "items"),
        ("data_1", "data_2"),
    ):
        body = post(url, "/score", **{first: DOCUMENTS, second: DOCUMENTS[::-1]})
        assert [item["score"] for item in body["data"]] == pytest.approx(wanted, abs=1e-5)


def test_scores_without_activation_are_logits(url: str) -> None:
    body = post(url, "/score", text_1=QUERY, text_2="cold wind", use_activation=False)
    (logit,) = reference.logits(tiny_scoring("bert"), QUERY, "cold wind")
    assert body["data"][0]["score"] == pytest.approx(float(logit), abs=1e-4)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked_best_first(url: str, path: str) -> None:
    mixed = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, *DOCUMENTS[2:]]
    body = post(url, path, query=QUERY, documents=mixed)
    scores = [expected(QUERY, document) for document in DOCUMENTS]
    order = sorted(range(4), key=lambda index: -scores[index])
    assert [result["index"] for result in body["results"]] == order
    assert [result["document"]["text"] for result in body["results"]] == [
        DOCUMENTS[index] for index in order
    ]
    assert [result["relevance_score"] for result in body["results"]] == pytest.approx(
        [scores[index] for index in order], abs=1e-5
    )
    best = post(url, path, query=QUERY, documents=DOCUMENTS, top_n=2, return_documents=False)[
        "results"
    ]
    assert [set(result) for result in best] == [{"index", "relevance_score"}] * 2
    assert [result["index"] for result in best] == order[:2]
    assert body["results"][0]["document"] == {"text": DOCUMENTS[order[0]], "multi_modal": None}
    assert set(body["usage"]) == {"prompt_tokens", "total_tokens"}
    alone = post(url, path, query=QUERY, documents=DOCUMENTS[0])["results"]
    assert [result["relevance_score"] for result in alone] == pytest.approx([scores[0]], abs=1e-5)


def test_an_embedding_model_scores_by_cosine(embedder: str) -> None:
    path = tiny_embedding("bge")
    tokenizer = reference.tokenizer_of(path)
    query, *others = [
        reference.vector(path, tokenizer(text)["input_ids"])
        for text in ("query : " + QUERY, *DOCUMENTS)
    ]
    wanted = [reference.cosine(query, other) for other in others]
    body = post(embedder, "/score", text_1=QUERY, text_2=DOCUMENTS)
    assert [item["score"] for item in body["data"]] == pytest.approx(wanted, abs=1e-5)
    ranked = post(embedder, "/rerank", query=QUERY, documents=DOCUMENTS)["results"]
    assert ranked[0]["index"] == int(np.argmax(wanted))


NAMES = st.sampled_from((None, "query", "passage"))
CUTS = st.sampled_from((None, -1, 3, 5, 8, 13))


@pytest.mark.thorough
@given(query=NAMES, document=NAMES, cut=CUTS, side=st.sampled_from((None, "left", "right")))
def test_a_score_is_the_cosine_of_what_embeddings_gives_for_each_role(
    e5: str, query: str | None, document: str | None, cut: int | None, side: str | None
) -> None:
    """With the prompts of the model: E5, BGE and Qwen3-Embedding rank by them."""
    cuts = {"truncate_prompt_tokens": cut, "truncation_side": side}
    more = {k: v for k, v in cuts.items() if v is not None}

    def vectors(texts: list[str], role: str, name: str | None) -> Any:
        part = {"role": role} if name is None else {"prompt_name": name}
        body = post(e5, "/v1/embeddings", input=texts, **part, **more)
        return np.array([item["embedding"] for item in body["data"]])

    (asked,), others = vectors([QUERY], "query", query), vectors(DOCUMENTS, "document", document)
    wanted = (others @ asked).tolist()
    named = {"query_prompt_name": query, "document_prompt_name": document}
    more |= {k: v for k, v in named.items() if v is not None}
    body = post(e5, "/v1/score", text_1=QUERY, text_2=DOCUMENTS, **more)
    assert [item["score"] for item in body["data"]] == pytest.approx(wanted, abs=1e-5)
    results = post(e5, "/v1/rerank", query=QUERY, documents=DOCUMENTS, **more)["results"]
    ranked = sorted(results, key=lambda result: int(result["index"]))
    assert [result["relevance_score"] for result in ranked] == pytest.approx(wanted, abs=1e-5)


def test_rows_score_as_the_texts_that_they_stand_for() -> None:
    path = tiny_embedding("qwen3")
    card = EmbeddingConfig.read(path)
    with fleet(path, task="embed", dtype="float32") as running:
        url = running.serve(enable_prompt_embeds=True)

        def rows(text: str, *prompts: str) -> dict[str, str]:
            prompt = next((name for name in prompts if name in card.prompts), card.default_prompt)
            whole = card.prompts.get(prompt or "", "") + text
            ids = reference.tokenizer_of(path)(whole)["input_ids"]
            return {"prompt_embeds": saved(torch.from_numpy(reference.embedded(path, ids)))}

        query = rows(QUERY, "query")
        documents = [rows(text, "document", "passage", "corpus") for text in DOCUMENTS]
        wanted = [
            item["score"] for item in post(url, "/score", text_1=QUERY, text_2=DOCUMENTS)["data"]
        ]
        for one in (QUERY, query):
            for many in (DOCUMENTS, documents, [*DOCUMENTS[:2], *documents[2:]]):
                body = post(url, "/score", text_1=one, text_2=many)
                found = [item["score"] for item in body["data"]]
                assert found == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "param", "phrase"),
    [
        ("/score", {"text_1": "a"}, "text_2", "exactly one"),
        ("/score", {"text_1": "a", "queries": "b", "text_2": "c"}, "text_1", "text_1 and queries"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_1", "2 texts and text_2 3"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2", "must not be empty"),
        ("/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2", "empty string"),
        (
            "/score",
            {"text_1": "a", "text_2": ["the hill " * 60]},
            "text_2[0]",
            "maximum context length",
        ),
        ("/rerank", {"query": "", "documents": ["a"]}, "query", "empty string"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "must not be empty"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "0 or more"),
        ("/rerank", {"query": "a", "documents": [5]}, "documents[0]", "int"),
        ("/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents", "at most 2048"),
        ("/rerank", {"documents": ["b"]}, "query", "query"),
        ("/v1/embeddings", {"input": "a"}, "model", "--task embed"),
        (
            "/rerank",
            {"query": "a", "documents": ["b"], "max_tokens_per_doc": -1},
            "max_tokens_per_doc",
            "got -1",
        ),
        (
            "/score",
            {"text_1": "a", "text_2": "b", "max_tokens_per_query": 64},
            "max_tokens_per_query",
            "64 pos",
        ),
        (
            "/score",
            {"text_1": "a", "text_2": "b", "instruction": "c"},
            "instruction",
            "chat template",
        ),
        (
            "/score",
            {"text_1": "a", "text_2": "b", "query_prompt_name": "query"},
            "query_prompt_name",
            "reads pairs",
        ),
        (
            "/rerank",
            {"query": "a", "documents": ["b"], "chat_template_kwargs": {"a": 1}},
            "chat_template_kwargs",
            "template",
        ),
        ("/score", {"text_1": {"content": []}, "text_2": "b"}, "text_1", "reads pairs"),
        (
            "/score",
            {"text_1": "a", "text_2": "b", "padding": "max_length"},
            "padding",
            "without padding",
        ),
    ],
)
def test_what_cannot_be_scored_is_refused_by_name(
    url: str, path: str, body: dict[str, Any], param: str, phrase: str
) -> None:
    response = httpx.post(url + path, json=body, timeout=180)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], phrase in error["message"]) == (param, True), error


def test_long_pairs_are_cut_as_asked(url: str) -> None:
    body = post(url, "/score", text_1=QUERY, text_2="the hill " * 200, truncate_prompt_tokens=-1)
    assert body["usage"]["prompt_tokens"] == 64


def test_a_server_may_cut_long_pairs_of_requests_that_do_not_say(bert: Fleet) -> None:
    url = bert.serve(truncate_prompt_tokens=-1)
    body = post(url, "/score", text_1=QUERY, text_2="the hill " * 200)
    assert body["usage"]["prompt_tokens"] == 64


def test_queries_and_documents_are_clipped_before_they_are_a_pair(url: str, embedder: str) -> None:
    clipped = {"max_tokens_per_query": 2, "max_tokens_per_doc": 3}
    body = post(url, "/rerank", query=QUERY, documents=DOCUMENTS, **clipped)
    short = [" ".join(document.split()[:3]) for document in DOCUMENTS]
    wanted = [expected("how many", document) for document in short]
    found = {result["index"]: result["relevance_score"] for result in body["results"]}
    assert [found[index] for index in range(4)] == pytest.approx(wanted, abs=1e-5)
    assert {result["document"]["text"] for result in body["results"]} == set(DOCUMENTS)
    long = post(url, "/score", text_1=QUERY, text_2="the hill " * 4000, max_tokens_per_doc=5)
    assert long["usage"]["prompt_tokens"] == 3 + 3 + 5
    path = tiny_embedding("bge")
    ids = [reference.tokenizer_of(path)(text)["input_ids"] for text in ("query : how many", *short)]
    query, *others = [reference.vector(path, each) for each in ids]
    body = post(embedder, "/score", text_1=QUERY, text_2=DOCUMENTS, **clipped)
    assert [item["score"] for item in body["data"]] == pytest.approx(
        [reference.cosine(query, other) for other in others], abs=1e-5
    )


@pytest.mark.thorough
def test_a_head_of_several_labels_gives_no_score_and_computes_nothing() -> None:
    with fleet(tiny_scoring("distilbert", 3), task="score") as running:
        url = running.serve()
        response = httpx.post(url + "/score", json={"text_1": "a", "text_2": "b"}, timeout=180)
        assert response.status_code == 400
        assert "3 labels" in response.json()["error"]["message"]
        assert "inlay:embedding_cache_misses_total 0.0" in httpx.get(url + "/metrics").text
