"""Routes of text-embeddings-inference, and the fields of Jina and Voyage, against our own.

Bodies are those that huggingface_hub, LlamaIndex, Haystack, jina and voyageai send.
"""

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from inlay.api import build_app
from inlay.client import read_vectors
from inlay.http.settings import FrontendSettings
from inlay.messages.card import EmbeddingCard, ModelCard
from inlay.messages.digest import Secret
from tests import output_models as models
from tests.embedding_models import MAX_LENGTH, tiny_embedding, tiny_scoring
from tests.live import fleet
from tests.router.scripted_stages import ScriptedStage, World

TEXTS = ["the harbour counts its lanterns", "cold wind", "ships sail south"]
LONG = "cold wind " * 400


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with fleet(models.bge_m3(), task="embed") as running:
        yield running.serve()


@pytest.fixture(scope="module")
def pairs() -> Iterator[str]:
    with fleet(tiny_scoring("bert"), task="score") as running:
        yield running.serve()


@pytest.fixture(scope="module")
def classes() -> Iterator[str]:
    with fleet(tiny_scoring("bert", labels=3), task="score") as running:
        yield running.serve(max_embedding_inputs=4)


def post(url: str, path: str, headers: Any = None, **body: Any) -> httpx.Response:
    return httpx.post(url + path, json=body, headers=headers, timeout=180)


def answered(url: str, path: str, **body: Any) -> Any:
    response = post(url, path, **body)
    assert response.status_code == 200, response.text
    return response.json()


def items(url: str, **body: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = answered(url, "/v1/embeddings", **body)["data"]
    return found


def test_the_root_answers_as_the_route_of_the_model(url: str, classes: str) -> None:
    assert answered(url, "/", inputs=TEXTS) == answered(url, "/embed", inputs=TEXTS)
    assert answered(classes, "/", inputs=TEXTS[0]) == answered(classes, "/predict", inputs=TEXTS[0])
    metrics = httpx.get(url + "/metrics").text
    assert 'route="/embed"' in metrics


def test_similarities_are_scores(url: str) -> None:
    compared = {"source_sentence": TEXTS[0], "sentences": TEXTS}
    found = answered(url, "/similarity", inputs=compared)
    ours = answered(url, "/v1/score", text_1=TEXTS[0], text_2=TEXTS)["data"]
    assert found == pytest.approx([one["score"] for one in ours])
    for inputs, said in (
        ({"source_sentence": "", "sentences": TEXTS}, "inputs.source_sentence"),
        ({"source_sentence": "a", "sentences": []}, "inputs.sentences"),
        ({"source_sentence": LONG, "sentences": TEXTS}, "maximum context length"),
    ):
        response = post(url, "/similarity", inputs=inputs)
        assert response.status_code == 400
        assert said in response.json()["error"]
    cut = {"truncate": True}
    answered(url, "/similarity", inputs=compared | {"source_sentence": LONG}, parameters=cut)


def test_voyages_names_of_a_rerank_have_its_answer(url: str) -> None:
    asked: dict[str, Any] = {"query": TEXTS[0], "documents": TEXTS}
    ours = answered(url, "/v1/rerank", **asked, top_n=2)
    assert "data" not in ours
    theirs = answered(url, "/v1/rerank", **asked, top_k=2, truncation=True)
    assert theirs["data"] == ours["results"]
    assert "results" not in theirs
    assert len(answered(url, "/v1/rerank", **asked, top_k=None)["data"]) == 3
    response = post(url, "/v1/rerank", **asked, top_n=1, top_k=2)
    assert response.json()["error"]["param"] == "top_k"
    long = {"query": TEXTS[0], "documents": [LONG]}
    assert post(url, "/v1/rerank", **long, truncation=False).status_code == 400
    assert post(url, "/v1/rerank", **long, truncation=True).status_code == 200


def test_each_route_of_vectors_answers_a_bare_list(url: str) -> None:
    ours = items(url, input=TEXTS, outputs=["dense", "sparse", "tokens"])
    dense = answered(url, "/embed", inputs=TEXTS, truncate=True)
    np.testing.assert_allclose(dense, [one["embedding"] for one in ours], atol=1e-6)
    for found, one in zip(answered(url, "/embed_all", inputs=TEXTS), ours, strict=True):
        np.testing.assert_allclose(found, one["tokens"]["data"], atol=1e-6)
    for found, one in zip(answered(url, "/embed_sparse", inputs=TEXTS), ours, strict=True):
        assert [pair["index"] for pair in found] == one["sparse"]["indices"]
        values = [pair["value"] for pair in found]
        assert values == pytest.approx(one["sparse"]["values"], rel=1e-5)
    (alone,) = answered(url, "/embed", inputs=TEXTS[0])
    np.testing.assert_allclose(alone, dense[0], atol=1e-6)


def test_hugging_faces_clients_fields_mean_the_same_here() -> None:
    with fleet(tiny_embedding("bge"), task="embed") as running:
        url = running.serve()
        asked = {"inputs": TEXTS[0], "prompt_name": "query", "normalize": False}
        (found,) = answered(url, "/embed", **asked)
        (wanted,) = items(url, input=TEXTS[0], prompt_name="query", normalize=False)
        np.testing.assert_allclose(found, wanted["embedding"], atol=1e-6)
        assert abs(float(np.linalg.norm(found)) - 1) > 1e-3
        for direction, side in (("Left", "left"), ("Right", "right")):
            asked = {"inputs": [LONG], "truncate": True, "truncation_direction": direction}
            (found,) = answered(url, "/embed", **asked)
            (wanted,) = items(url, input=LONG, auto_truncate=True, truncation_side=side)
            np.testing.assert_allclose(found, wanted["embedding"], atol=1e-6)


def test_texts_are_ranked_as_a_list_and_documents_as_before(pairs: str) -> None:
    ours = answered(pairs, "/v1/rerank", query="how many ships", documents=TEXTS)["results"]
    wanted = [(one["index"], one["relevance_score"]) for one in ours]
    body = {"query": "how many ships", "texts": TEXTS}
    found = answered(pairs, "/rerank", **body)
    assert [(one["index"], one["score"]) for one in found] == wanted
    assert [set(one) for one in found] == [{"index", "score"}] * 3
    shown = answered(pairs, "/rerank", **body, return_text=True, raw_scores=True)
    assert [one["text"] for one in shown] == [TEXTS[index] for index, _ in wanted]
    assert [1 / (1 + np.exp(-one["score"])) for one in shown] == pytest.approx(
        [score for _, score in wanted], abs=1e-5
    )
    both = answered(pairs, "/rerank", query="how many ships", documents=TEXTS)
    assert both["results"] == ours


def test_classes_are_sorted_and_a_batch_has_a_list_for_each(classes: str) -> None:
    probs = [
        one["probs"] for one in answered(classes, "/classify", input=[TEXTS[0], TEXTS[1]])["data"]
    ]
    single = answered(classes, "/predict", inputs=TEXTS[0])
    batch = answered(classes, "/predict", inputs=[[TEXTS[0]], [TEXTS[1]]])
    assert [one["score"] for one in single] == pytest.approx(sorted(probs[0])[::-1])
    assert single[0]["label"] == f"LABEL_{int(np.argmax(probs[0]))}"
    assert [one["score"] for one in batch[1]] == pytest.approx(sorted(probs[1])[::-1])


def by_label(prediction: Any) -> dict[str, float]:
    return {one["label"]: one["score"] for one in prediction}


def test_two_texts_in_a_list_are_one_pair_and_one_is_a_text(pairs: str, classes: str) -> None:
    query, document = TEXTS[:2]
    (found,) = answered(pairs, "/predict", inputs=[query, document])
    (score,) = answered(pairs, "/v1/score", text_1=query, text_2=document)["data"]
    assert found["score"] == pytest.approx(score["score"], abs=1e-6)
    text, pair = (
        by_label(answered(classes, "/predict", inputs=given)) for given in ([query], TEXTS[:2])
    )
    assert text == pytest.approx(by_label(answered(classes, "/predict", inputs=query)))
    assert text != pytest.approx(pair, abs=1e-4)
    mixed = [[query, document], [query], [document, query], [document]]
    batch = answered(classes, "/predict", inputs=mixed)
    for given, one in zip(mixed, batch, strict=True):
        alone = by_label(answered(classes, "/predict", inputs=given))
        assert by_label(one) == pytest.approx(alone, abs=1e-6)
    raw = answered(classes, "/predict", inputs=[query, document], raw_scores=True)
    logits = np.array(list(by_label(raw).values()))
    np.testing.assert_allclose(
        np.exp(logits) / np.exp(logits).sum(),
        [by_label(batch[0])[label] for label in by_label(raw)],
        atol=1e-6,
    )


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (["a", "b", "c"], "inputs has 3 texts; a list holds one text, or a pair of two"),
        (["a", ["b"]], "inputs is a text and a list"),
        ([["a"], "b"], "inputs[1] has a text among lists"),
        ([["a"], ["a", "b", "c"]], "inputs[1] has 3 texts"),
        ([["a"], []], "inputs[1] has 0 texts"),
        ([["a"], ["a", ""]], "inputs[1] holds an empty string"),
        ([["a"]] * 5, "inputs has 5 inputs; at most 4 are allowed"),
        ([[]] * 5, "inputs has 5 inputs; at most 4 are allowed"),
        ([], "inputs must not be empty"),
        ([["a"], [LONG, LONG]], "inputs[1] has"),
        ([LONG, LONG], "inputs has"),
    ],
)
def test_what_is_neither_text_nor_pair_is_refused_where_it_stands(
    classes: str, inputs: Any, words: str
) -> None:
    response = post(classes, "/predict", inputs=inputs)
    assert response.status_code == 400
    assert words in response.json()["error"]


def test_a_prompt_that_the_model_has_not_is_refused_for_pairs_too(classes: str) -> None:
    for inputs in (["a", "b"], "a"):
        response = post(classes, "/predict", inputs=inputs, prompt_name="query")
        assert response.status_code == 400
        assert "has no prompt 'query'" in response.json()["error"]


def test_a_field_of_one_form_of_rerank_is_refused_in_the_other(pairs: str) -> None:
    texts = {"query": "ships", "texts": TEXTS}
    for field, value in (
        ("top_n", 1),
        ("return_documents", True),
        ("auto_truncate", True),
        ("truncation_side", "left"),
        ("use_activation", False),
    ):
        response = post(pairs, "/rerank", **texts, **{field: value})
        assert response.status_code == 400
        assert response.json()["error"].startswith(f"{field} is of a rerank with documents, and")
    silent = {"top_n": 0, "return_documents": False, "use_activation": None}
    assert answered(pairs, "/rerank", **texts, **silent) == answered(pairs, "/rerank", **texts)
    documents = {"query": "ships", "documents": TEXTS}
    for field, value in (
        ("truncate", True),
        ("truncation_direction", "Left"),
        ("raw_scores", True),
        ("return_text", True),
    ):
        error = post(pairs, "/rerank", **documents, **{field: value}).json()["error"]
        assert error["param"] == field
        assert "is of a rerank with texts, and this one has documents" in error["message"]
    unsaid = {"truncate": None, "raw_scores": False, "return_text": False}
    found, plain = (answered(pairs, "/rerank", **documents, **more) for more in (unsaid, {}))
    assert found["results"] == plain["results"]


def test_the_server_describes_its_first_model(url: str, pairs: str) -> None:
    info = httpx.get(url + "/info").json()
    assert (info["model_id"], info["max_input_length"]) == ("tiny", MAX_LENGTH)
    assert "embedding" in info["model_type"]
    assert "reranker" in httpx.get(pairs + "/info").json()["model_type"]


class Inner(ScriptedStage):
    """A part of a pipeline that gives vectors."""

    @property
    def card(self) -> ModelCard:
        return msgspec.structs.replace(super().card, embedding=EmbeddingCard(size=4))


@pytest.mark.extensions("stages")
async def test_a_part_inside_another_model_is_not_described() -> None:
    async with World.around(Inner("reader")) as world:
        app = build_app(world.router, FrontendSettings(port=0), secret=Secret(bytes(32)))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://inlay") as client:
            response = await client.get("/info")
        assert response.status_code == 404
        assert "no model of this server gives vectors or scores" in response.json()["error"]
        app.server.close()


def test_errors_have_its_form_and_name_its_fields(url: str, pairs: str) -> None:
    for path, body, words in (
        ("/embed", {"inputs": []}, "inputs"),
        ("/embed", {"inputs": [LONG], "truncate": False}, "maximum context length"),
        ("/embed", {"inputs": "x", "dimensions": 5}, "dimensions"),
        ("/embed", {"inputs": [["x", "y"]]}, "inputs[0]"),
        ("/embed", {}, "inputs"),
    ):
        response = post(url, path, **body)
        assert response.status_code == 400
        answer = response.json()
        assert answer["error_type"] == "Validation"
        assert words in answer["error"]
    answer = post(pairs, "/rerank", query="x", texts=["a", ""]).json()
    assert "texts holds an empty string" in answer["error"]
    assert "not both" in post(pairs, "/rerank", query="x", texts=["a"], documents=["a"]).text
    assert "give documents, or texts" in post(pairs, "/rerank", query="x").text


def test_jinas_and_voyages_fields_are_ours(url: str) -> None:
    plain = {"input": TEXTS}
    assert items(url, **plain, task="retrieval.passage", normalized=True, embedding_type="float")[
        0
    ]["embedding"] == pytest.approx(items(url, **plain, role="document")[0]["embedding"], abs=1e-6)
    voyage = {"input_type": "document", "truncation": True, "output_dtype": "int8"}
    found = items(url, input=[*TEXTS, LONG], **voyage)
    wanted = items(url, input=[*TEXTS, LONG], auto_truncate=True, embed_dtype="int8")
    assert [one["embedding"] for one in found] == [one["embedding"] for one in wanted]
    for body, param in (
        ({"truncation": True, "auto_truncate": False}, "truncation"),
        ({"output_dtype": "int8", "embed_dtype": "binary"}, "output_dtype"),
        ({"output_dtype": "float", "embed_dtype": "int8"}, "output_dtype"),
        ({"embedding_type": "float", "encoding_format": "base64"}, "embedding_type"),
        ({"embedding_type": "float", "embed_dtype": "int8"}, "embedding_type"),
        ({"output_dtype": "int8", "embedding_type": "float"}, "embedding_type"),
        ({"truncate": "NONE", "auto_truncate": True}, "truncate"),
        ({"truncate": "START", "truncation_side": "right"}, "truncate"),
        ({"task": "retrieval.query", "input_type": "document"}, "input_type"),
        ({"task": "text-matching"}, "task"),
    ):
        error = post(url, "/v1/embeddings", **plain, **body).json()["error"]
        assert param in (error["param"], error["message"].split()[0])


def test_nvidias_truncate_says_which_side_is_cut(url: str) -> None:
    asked = {"input": [LONG], "input_type": "passage", "encoding_format": "float"}
    (left, right) = (
        items(url, input=[LONG], role="document", auto_truncate=True, truncation_side=side)
        for side in ("left", "right")
    )
    for name, wanted in (("START", left), ("END", right)):
        (found,) = items(url, **asked, truncate=name)
        assert found["embedding"] == pytest.approx(wanted[0]["embedding"], abs=1e-6)
    refused = post(url, "/v1/embeddings", **asked, truncate="NONE")
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    short = {**asked, "input": TEXTS}
    assert len(items(url, **short, truncate="NONE")) == len(TEXTS)
    (found,) = items(url, **asked, truncate=True)
    assert found["embedding"] == pytest.approx(right[0]["embedding"], abs=1e-6)


@pytest.mark.thorough
def test_a_file_may_be_asked_for_by_its_type(url: str) -> None:
    accept = {"accept": "application/safetensors"}
    response = post(url, "/v1/embeddings", accept, input=TEXTS, outputs=["dense", "tokens"])
    assert response.headers["content-type"] == "application/safetensors"
    found = read_vectors(response.content)
    assert found.dense.shape == (3, 48)
    assert len(found.tokens) == 3
    named = post(url, "/v1/embeddings", accept, input="x", encoding_format="float")
    assert named.json()["data"]
