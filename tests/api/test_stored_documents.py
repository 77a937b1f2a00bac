"""Stored documents: outputs that are kept, and what reranks and scores make of their references."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from inlay.store import PromptStore, StoreSettings
from tests import output_models as models
from tests.embedding_models import tiny_embedding, tiny_scoring
from tests.live import SECRET, Fleet, fleet

TEXTS = [
    "the harbour : counts : its lanterns",
    "cold wind",
    "what is the capital of the island",
    "ships sail south " * 9,
]
QUERY = "what counts lanterns"
CACHE = 1_000_000
"""A batch rounds a text otherwise than another does: what is compared to the bit is cached."""
ONE, TWO = ({"authorization": f"Bearer {name}"} for name in ("one", "two"))


def store(**settings: Any) -> PromptStore:
    return StoreSettings(**settings).open(SECRET)


@pytest.fixture(scope="module")
def bge() -> Iterator[Fleet]:
    with fleet(models.bge_m3(), task="embed") as running:
        yield running


@pytest.fixture(scope="module")
def url(bge: Fleet) -> str:
    return bge.serve(store=store(), api_key=["one", "two"], embedding_cache_bytes=CACHE)


def ask(url: str, path: str = "/v1/rerank", headers: Any = ONE, **body: Any) -> httpx.Response:
    return httpx.post(url + path, json=body, headers=headers, timeout=180)


def answered(url: str, path: str = "/v1/rerank", **body: Any) -> Any:
    response = ask(url, path, **body)
    assert response.status_code == 200, response.text
    return response.json()


def kept(url: str, texts: list[str] = TEXTS, **body: Any) -> list[str]:
    """Return the references of stored texts."""
    items = answered(url, "/v1/embeddings", input=texts, store=True, **body)["data"]
    assert [item["embedding"] for item in items] == [[]] * len(texts)
    return [item["ref"] for item in items]


def ranks(url: str, documents: list[Any], **body: Any) -> list[tuple[int, float]]:
    found = answered(url, query=QUERY, documents=documents, **body)["results"]
    return [(one["index"], one["relevance_score"]) for one in found]


def refusal(response: httpx.Response, status: int = 400) -> tuple[str, str]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


@pytest.mark.parametrize("output", ["dense", "sparse", "tokens"])
def test_references_rank_as_their_texts_do_to_the_last_bit(url: str, output: str) -> None:
    refs = kept(url, outputs=["dense", "sparse", "tokens"])
    assert all(ref.startswith("pv-") for ref in refs)
    assert len(set(refs)) == len(TEXTS)
    wanted = ranks(url, TEXTS, output=output)
    stored = [{"ref": ref} for ref in refs]
    assert ranks(url, stored, output=output) == wanted
    mixed = [TEXTS[0], stored[1], {"text": TEXTS[2]}, stored[3]]
    assert ranks(url, mixed, output=output) == wanted
    scores = answered(url, "/v1/score", text_1=QUERY, text_2=mixed, output=output)["data"]
    assert sorted((one["index"], one["score"]) for one in scores) == sorted(wanted)


@pytest.mark.parametrize("path", [models.stanford(), models.splade(), tiny_embedding("bge")])
def test_each_layout_stores_what_it_compares(path: Path) -> None:
    with fleet(path, task="embed") as running:
        url = running.serve(store=store(), embedding_cache_bytes=CACHE)
        wanted = ranks(url, TEXTS)
        assert ranks(url, [{"ref": ref} for ref in kept(url)]) == wanted
        queries = kept(url, [QUERY], role="query")
        found = answered(url, query={"ref": queries[0]}, documents=TEXTS)
        assert [(one["index"], one["relevance_score"]) for one in found["results"]] == wanted
        both = answered(url, query={"ref": queries[0]}, documents=[{"ref": r} for r in kept(url)])
        assert both["usage"] == {"prompt_tokens": 0, "total_tokens": 0}


def test_the_same_document_has_one_reference_and_a_ranked_one_is_named(url: str) -> None:
    (ref,) = kept(url, ["cold wind"])
    assert kept(url, ["cold wind"]) == [ref]
    assert kept(url, ["cold wind"], role="query") != [ref]
    found = answered(url, query=QUERY, documents=[{"ref": ref}, "cold wind"])["results"]
    shown = {one["index"]: one["document"] for one in found}
    assert shown[0] == {"text": None, "multi_modal": None, "ref": ref}
    assert shown[1] == {"text": "cold wind", "multi_modal": None}


def test_a_document_is_shown_pinned_and_deleted_as_any_stored_prompt(url: str) -> None:
    item = answered(
        url, "/v1/embeddings", input="north wind", store=True, outputs=["tokens"], role="document"
    )["data"][0]
    at = f"{url}/v1/prompt_embeds/{item['ref']}"
    shown = httpx.get(at, headers=ONE).json()
    assert (shown["object"], shown["num_vectors"]) == ("vectors", item["num_vectors"])
    assert (shown["size"], shown["dtype"]) == (16, "float32")
    assert shown["expires_at"] == item["expires_at"] > 0
    assert httpx.post(at + "/pin", headers=ONE).json()["pinned"]
    assert httpx.delete(at, headers=ONE).json()["deleted"]
    param, message = refusal(ask(url, query=QUERY, documents=[{"ref": item["ref"]}]), 404)
    assert (param, "not found" in message) == ("documents[0]", True)


def test_halves_take_half_of_the_bytes(url: str) -> None:
    long = ["ships sail south and north " * 10]
    sizes, scores = [], []
    for dtype in ("float32", "float16"):
        (ref,) = kept(url, long, outputs=["tokens"], embed_dtype=dtype)
        sizes.append(httpx.get(f"{url}/v1/prompt_embeds/{ref}", headers=ONE).json()["bytes"])
        scores.append(ranks(url, [{"ref": ref}], output="tokens")[0][1])
    assert sizes[1] < 0.6 * sizes[0]
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)


def test_openais_client_stores_documents(url: str) -> None:
    with openai.OpenAI(base_url=url + "/v1", api_key="one", max_retries=0) as client:
        answer = client.embeddings.create(
            model="tiny", input=["cold wind"], extra_body={"store": True}
        )
    extra = answer.data[0].model_extra
    assert extra is not None
    assert extra["ref"] == kept(url, ["cold wind"])[0]


def test_what_is_anothers_or_of_another_model_is_refused_where_it_stands(
    bge: Fleet, url: str
) -> None:
    (ref,) = kept(url, ["cold wind"])
    document = {"ref": ref}
    theirs = refusal(ask(url, headers=TWO, query=QUERY, documents=["x", document]), 404)
    assert theirs[0] == "documents[1]"
    none = refusal(ask(url, query=QUERY, documents=[{"ref": "pv-" + "a" * 32}]), 404)
    assert none[1].replace("a" * 32, ref[3:]) == theirs[1], "it says nothing about others' ids"
    _, message = refusal(ask(url, query=QUERY, documents=[document], output="tokens"))
    assert "has dense; tokens is compared here" in message
    param, message = refusal(ask(url, query=document, documents=["x"]))
    assert (param, "has the role document; here stands a query" in message) == ("query", True)
    with fleet(models.stanford(), task="embed") as running:
        shared = store()
        first, second = bge.serve(store=shared), running.serve(store=shared)
        (own,) = kept(first, ["cold wind"], outputs=["tokens"])
        param, message = refusal(ask(second, query=QUERY, documents=[{"ref": own}]))
        assert param == "documents[0]"
        assert "is of the model `tiny` with weights_id" in message
        assert "store it again" in message


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"encoding_format": "safetensors"}, "encoding_format", "references, in JSON"),
        ({"embed_dtype": "int8"}, "embed_dtype", "is not stored; allowed: float32"),
        ({"dimensions": 7}, "dimensions", "what /v1/rerank compares"),
        ({"normalize": False}, "normalize", "what /v1/rerank compares"),
        ({"use_activation": False}, "use_activation", "what /v1/rerank compares"),
        ({"endianness": "big"}, "endianness", "what /v1/rerank compares"),
        ({"outputs": ["labels"]}, "outputs[0]", "labels"),
        ({"outputs": ["token_labels"]}, "outputs", "token_labels"),
    ],
)
def test_what_cannot_be_stored_is_refused(
    url: str, body: dict[str, Any], param: str, words: str
) -> None:
    found = refusal(ask(url, "/v1/embeddings", input="x", store=True, **body))
    assert found[0] == param
    assert words in found[1]


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({}, "got none"),
        ({"text": "a", "ref": "pv-a"}, "got text and ref"),
        ({"text": ""}, "empty string"),
        ({"prompt_embeds": "AAAA"}, "--enable-prompt-embeds"),
        ({"content": [{"type": "wrong"}]}, "documents[1].content"),
    ],
)
def test_an_item_has_one_form(url: str, document: dict[str, Any], words: str) -> None:
    _, message = refusal(ask(url, query=QUERY, documents=["x", document]))
    assert words in message


@pytest.mark.parametrize("field", ["query", "documents"])
def test_many_documents_are_refused_before_they_are_read(url: str, field: str) -> None:
    sides = {"query": "x", "documents": ["x"], field: [{}] * 50_000}
    if field == "query":
        sides = {"text_1": sides["query"], "text_2": "x"}
    response = ask(url, "/v1/rerank" if field == "documents" else "/v1/score", **sides)
    assert "--max-embedding-inputs" in refusal(response)[1]


def test_models_of_pairs_take_texts_alone() -> None:
    with fleet(tiny_scoring("bert"), task="score") as running:
        url = running.serve(store=store())
        found = refusal(ask(url, query=QUERY, documents=["x", {"ref": "pv-a"}]))
        assert found[0] == "documents[1]"
        assert "reads pairs of texts" in found[1]


def test_a_tenants_share_bounds_its_documents(bge: Fleet) -> None:
    url = bge.serve(store=store(prompt_store_tenant_bytes=40_000), api_key=["one", "two"])
    full = ask(url, "/v1/embeddings", input=["ships " * n for n in range(1, 9)], store=True)
    assert full.status_code == 429
    assert "--prompt-store-tenant-bytes" in full.text
    assert ask(url, "/v1/embeddings", TWO, input="ships", store=True).status_code == 200


def test_a_server_without_a_store_says_so(bge: Fleet) -> None:
    found = refusal(ask(bge.serve(), "/v1/embeddings", input="x", store=True), 404)
    assert "this server stores none" in found[1]
