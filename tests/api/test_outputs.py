"""Named outputs over HTTP: sparse vectors, vectors and classes of tokens, and what they score."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import safetensors.numpy

from inlay.base.errors import InvalidRequestError
from inlay.client import Vectors, read_vectors
from tests import embedding_reference as reference
from tests import output_models as models
from tests.embedding_models import tiny_embedding
from tests.live import fleet

TEXTS = ["the harbour : counts : its lanterns", "cold wind", "what is the capital of the island"]


@pytest.fixture(scope="module")
def bge() -> Iterator[str]:
    with fleet(models.bge_m3(), task="embed") as running:
        yield running.serve(embedding_cache_bytes=1_000_000)


@pytest.fixture(scope="module")
def colbert() -> Iterator[str]:
    with fleet(models.stanford(), task="embed") as running:
        yield running.serve()


@pytest.fixture(scope="module")
def splade() -> Iterator[str]:
    with fleet(models.splade(), task="embed") as running:
        yield running.serve()


@pytest.fixture(scope="module")
def tagger() -> Iterator[str]:
    with fleet(models.tagger(), task="embed") as running:
        yield running.serve()


def answered(url: str, path: str = "/v1/embeddings", **body: Any) -> dict[str, Any]:
    response = httpx.post(url + path, json=body, timeout=180)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def items(url: str, path: str = "/v1/embeddings", **body: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = answered(url, path, **body)["data"]
    return found


def ids_of(path: Path, text: str) -> list[int]:
    found: list[int] = reference.tokenizer_of(path)(text)["input_ids"]
    return found


def test_several_outputs_of_one_request_are_those_of_a_request_each(bge: str) -> None:
    names = ["tokens", "sparse", "dense"]
    together = items(bge, input=TEXTS, outputs=names)
    for name, key in (("dense", "embedding"), ("sparse", "sparse"), ("tokens", "tokens")):
        alone = items(bge, input=TEXTS, outputs=[name])
        assert [each[key] for each in alone] == [each[key] for each in together]
        assert set(alone[0]) == {"index", "object", key, "input_tokens", "truncated"}
    assert items(bge, input=TEXTS) == items(bge, input=TEXTS, outputs=["dense"])
    shown = httpx.get(bge + "/v1/models").json()["data"][0]["embedding"]["outputs"]
    assert [each["name"] for each in shown] == ["dense", "tokens", "sparse"]


def test_what_is_cached_of_one_output_is_not_computed_for_another(bge: str) -> None:
    def computed() -> float:
        lines = httpx.get(bge + "/metrics").text.splitlines()
        (line,) = [each for each in lines if each.startswith("inlay:embedding_cache_misses_total")]
        return float(line.split()[-1])

    text = "north wind sail"
    items(bge, input=text)
    before = computed()
    items(bge, input=text, outputs=["dense", "sparse"])
    assert computed() == before + 1


def test_vectors_of_tokens_have_ids_and_characters(bge: str) -> None:
    (item,) = items(bge, input=TEXTS[0], outputs=["tokens"])
    tokens, ids = item["tokens"], ids_of(models.bge_m3(), TEXTS[0])
    assert item["input_tokens"] == len(ids)
    # BGE-M3 has none for the first position.
    assert tokens["token_ids"] == ids[1:]
    assert tokens["shape"] == [len(ids) - 1, models.SIZE]
    assert np.array(tokens["data"]).shape == (len(ids) - 1, models.SIZE)
    assert np.allclose(np.linalg.norm(tokens["data"], axis=1), 1, atol=1e-5)
    words = [TEXTS[0][each[0] : each[1]] for each in tokens["ranges"] if each is not None]
    assert words == TEXTS[0].split()
    assert tokens["ranges"][-1] is None
    (packed,) = items(bge, input=TEXTS[0], outputs=["tokens"], encoding_format="base64")
    found = np.frombuffer(base64.b64decode(packed["tokens"]["data"]), "<f4")
    assert np.allclose(found.reshape(tokens["shape"]), tokens["data"], atol=1e-6)
    (raw,) = items(bge, input=[ids], outputs=["tokens"], normalize=False)
    assert "ranges" not in raw["tokens"]
    assert not np.allclose(np.linalg.norm(raw["tokens"]["data"], axis=1), 1, atol=1e-2)


def test_sparse_vectors_are_indices_and_weights(splade: str) -> None:
    (item,) = items(splade, input=TEXTS[0])
    assert "embedding" not in item
    sparse = item["sparse"]
    assert sparse["indices"] == sorted(set(sparse["indices"]))
    assert len(sparse["indices"]) == len(sparse["values"])
    (some,) = items(splade, input=TEXTS[0], max_active=4)
    best = sorted(np.argsort(sparse["values"])[-4:])
    assert some["sparse"]["indices"] == [sparse["indices"][place] for place in best]
    (packed,) = items(splade, input=TEXTS[0], encoding_format="base64", embed_dtype="float16")
    indices = np.frombuffer(base64.b64decode(packed["sparse"]["indices"]), "<i4")
    values = np.frombuffer(base64.b64decode(packed["sparse"]["values"]), "<f2")
    assert indices.tolist() == sparse["indices"]
    assert np.allclose(values, sparse["values"], rtol=1e-3)


def test_classes_of_tokens_have_labels_and_characters(tagger: str) -> None:
    (item,) = items(tagger, input=TEXTS[0])
    found = item["token_labels"]
    assert [TEXTS[0][each["range"][0] : each["range"][1]] for each in found] == TEXTS[0].split()
    assert {each["label"] for each in found} <= set(models.LABELS)
    ids = ids_of(models.tagger(), TEXTS[0])
    assert [ids[each["position"]] for each in found] == [each["token_id"] for each in found]
    (pooled,) = items(tagger, "/pooling", input=TEXTS[0], task="token_classify")
    probs = np.array(pooled["data"])
    assert probs.shape == (len(ids), len(models.LABELS))
    assert np.allclose(probs.sum(axis=1), 1, atol=1e-5)
    for each in found:
        assert each["score"] == pytest.approx(probs[each["position"]].max(), abs=1e-6)


def test_a_model_of_tokens_alone_gives_them_as_vllm_does(colbert: str) -> None:
    (item,) = items(colbert, input=TEXTS[0], role="query")
    assert item["tokens"]["shape"] == [models.QUERY_LENGTH, models.SIZE]
    assert np.array(item["embedding"]).shape == (models.QUERY_LENGTH, models.SIZE)
    (pooled,) = items(colbert, "/pooling", input=TEXTS[0], task="token_embed", role="query")
    assert pooled["data"] == item["embedding"]
    document = items(colbert, input=TEXTS[0])[0]["tokens"]
    assert document == items(colbert, input=TEXTS[0], role="document")[0]["tokens"]
    colon = reference.tokenizer_of(models.stanford()).get_vocab()[":"]
    assert colon not in document["token_ids"]
    with openai.OpenAI(base_url=colbert + "/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="tiny", input=TEXTS[0], encoding_format="base64")
        flat = np.frombuffer(base64.b64decode(answer.data[0].embedding), "<f4")  # type: ignore[arg-type]
        assert flat.size == document["shape"][0] * models.SIZE


def by_hand(url: str, query: str, document: str, *, mean: bool) -> float:
    one, other = (
        np.array(items(url, input=text, outputs=["tokens"], role=role)[0]["tokens"]["data"])
        for text, role in ((query, "query"), (document, "document"))
    )
    best = (one @ other.T).max(axis=1)
    return float(best.mean() if mean else best.sum())


def test_documents_are_ranked_by_max_sim(colbert: str, bge: str) -> None:
    query = "what counts lanterns"
    for url, options, mean in ((colbert, {}, False), (bge, {"output": "tokens"}, True)):
        wanted = [by_hand(url, query, text, mean=mean) for text in TEXTS]
        found = answered(url, "/v1/score", text_1=query, text_2=TEXTS, **options)["data"]
        assert [each["score"] for each in found] == pytest.approx(wanted, abs=1e-4)
        paired = answered(url, "/v1/score", text_1=[query] * 3, text_2=TEXTS, **options)["data"]
        assert [each["score"] for each in paired] == pytest.approx(wanted, abs=1e-4)
        ranked = answered(url, "/v1/rerank", query=query, documents=TEXTS, **options)["results"]
        assert [each["index"] for each in ranked] == np.argsort(wanted)[::-1].tolist()


@pytest.mark.thorough
def test_sparse_vectors_score_by_their_product(splade: str) -> None:
    def dense(text: str) -> dict[int, float]:
        found = items(splade, input=text)[0]["sparse"]
        return dict(zip(found["indices"], found["values"], strict=True))

    query = dense("cold island")
    wanted = [
        sum(weight * dense(text).get(index, 0.0) for index, weight in query.items())
        for text in TEXTS
    ]
    found = answered(splade, "/v1/score", text_1="cold island", text_2=TEXTS)["data"]
    assert [each["score"] for each in found] == pytest.approx(wanted, rel=1e-4)


def test_each_input_says_how_long_it_is_and_whether_it_was_cut() -> None:
    with fleet(tiny_embedding("bert"), task="embed") as running:
        url = running.serve()
        texts = ["cold wind", "cold wind sail", "cold wind sail south north"]
        for side in ("right", "left"):
            found = items(url, input=texts, truncate_prompt_tokens=5, truncation_side=side)
            assert [each["input_tokens"] for each in found] == [4, 5, 5]
            assert [each["truncated"] for each in found] == [False, False, True]
        ids = [[5] * 4, [6] * 6]
        found = items(url, input=ids, truncate_prompt_tokens=4)
        assert [each["truncated"] for each in found] == [False, True]


def test_vectors_can_be_had_in_bits_and_bytes(bge: str) -> None:
    names = ["dense", "tokens"]
    (plain,) = items(bge, input=TEXTS[0], outputs=names)
    (bits,) = items(bge, input=TEXTS[0], outputs=names, embed_dtype="ubinary")
    for one, other in (
        (plain["embedding"], bits["embedding"]),
        (plain["tokens"]["data"], bits["tokens"]["data"]),
    ):
        assert np.packbits(np.array(one) > 0, axis=-1).tolist() == other
    assert bits["tokens"]["shape"] == list(np.array(bits["tokens"]["data"]).shape)
    (small,) = items(bge, input=TEXTS[0], outputs=names, embed_dtype="int8")
    for one, other in ((plain["embedding"], small), (plain["tokens"]["data"], small["tokens"])):
        key = "embedding" if other is small else "data"
        near = np.array(other[key]) / np.array(other["scale"])[..., None]
        assert np.allclose(near, one, atol=0.01)
    response = httpx.post(
        bge + "/v1/embeddings",
        json={"input": "cold", "outputs": ["dense", "sparse"], "embed_dtype": "int8"},
    )
    assert response.json()["error"]["param"] == "embed_dtype"
    assert "of dense and tokens" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "phrase"),
    [
        ("/v1/embeddings", {"outputs": ["labels"]}, "outputs[0]", "labels"),
        ("/v1/embeddings", {"outputs": []}, "outputs", "names nothing"),
        ("/v1/embeddings", {"outputs": ["sparse"]}, "outputs", "gives tokens; 'sparse' was"),
        ("/v1/embeddings", {"outputs": ["dense"]}, "outputs", "gives tokens; 'dense' was"),
        ("/v1/embeddings", {"dimensions": 4}, "dimensions", "of dense vectors"),
        ("/v1/embeddings", {"max_active": 4}, "max_active", "of sparse vectors"),
        ("/v1/embeddings", {"max_active": 0}, "max_active", "1"),
        ("/v1/embeddings", {"encoding_format": "bytes"}, "encoding_format", "float, base64"),
        ("/v1/embeddings", {"role": "query", "input_type": "document"}, "role", "different"),
        ("/v1/embeddings", {"input": ["cold"] * 3000}, "input", "at most 2048"),
        ("/v1/embeddings", {"input": [[9999]]}, "input[0]", "out of vocabulary"),
        ("/pooling", {"task": "embed"}, "task", "it does token_embed"),
    ],
)
def test_what_a_model_does_not_give_is_refused_by_name(
    colbert: str, path: str, body: dict[str, Any], param: str, phrase: str
) -> None:
    response = httpx.post(colbert + path, json={"input": "cold wind"} | body, timeout=60)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], phrase in error["message"]) == (param, True), error


def test_more_numbers_than_json_holds_are_refused_with_the_format_that_does(
    colbert: str,
) -> None:
    long = ["the hill " * 9 + f"{word} cold" for word in ("x", "y")] * 1000
    body = {"input": long}
    response = httpx.post(colbert + "/v1/embeddings", json=body, timeout=60)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "encoding_format"
    assert "base64" in response.json()["error"]["message"]
    assert len(items(colbert, input=long, encoding_format="base64")) == 2000
    refused = {"text_1": "a", "text_2": "b", "output": "dense"}
    response = httpx.post(colbert + "/v1/score", json=refused, timeout=60)
    assert "gives tokens" in response.json()["error"]["message"]


def as_file(url: str, **body: Any) -> Vectors:
    response = httpx.post(
        f"{url}/v1/embeddings", json={**body, "encoding_format": "safetensors"}, timeout=180
    )
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/safetensors"
    return read_vectors(response.content)


def test_one_file_has_all_outputs_as_json_has_them(bge: str) -> None:
    body: dict[str, Any] = {"input": TEXTS, "outputs": ["dense", "sparse", "tokens"]}
    shown = items(bge, **body)
    file = as_file(bge, **body)
    assert np.array_equal(file.dense, np.array([one["embedding"] for one in shown], np.float32))
    assert file.arrays["input_tokens"].tolist() == [one["input_tokens"] for one in shown]
    starts = file.arrays["tokens.offsets"].tolist()
    for number, (one, tokens, sparse) in enumerate(
        zip(shown, file.tokens, file.sparse, strict=True)
    ):
        assert np.array_equal(tokens, np.array(one["tokens"]["data"], np.float32))
        ids = file.arrays["tokens.ids"][starts[number] : starts[number + 1]]
        assert ids.tolist() == one["tokens"]["token_ids"]
        assert sparse.indices.tolist() == one["sparse"]["indices"]
        assert np.array_equal(sparse.values, np.array(one["sparse"]["values"], np.float32))
    assert file.metadata["model"] == "tiny"
    assert file.metadata["prompt_tokens"] == str(sum(one["input_tokens"] for one in shown))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "binary"])
def test_a_file_has_the_dtype_that_is_asked_for(bge: str, dtype: str) -> None:
    outputs = ["dense", "tokens"]
    whole = as_file(bge, input=TEXTS, outputs=outputs)
    small = as_file(bge, input=TEXTS, outputs=outputs, embed_dtype=dtype)
    if dtype == "binary":
        bits = np.packbits(whole.dense > 0, axis=1) - np.uint8(128)
        assert np.array_equal(small.arrays["dense"], bits.view(np.int8))
        return
    assert small.arrays["tokens"].dtype.name == dtype
    far = np.abs(small.dense.astype(np.float32) - whole.dense).max()
    assert 0 < far < 0.01 * np.abs(whole.dense).max()


def test_models_of_one_output_give_files_and_safetensors_reads_them(
    splade: str, colbert: str
) -> None:
    sparse = as_file(splade, input=TEXTS, max_active=3)
    assert [len(one.indices) <= 3 for one in sparse.sparse] == [True] * 3
    with pytest.raises(InvalidRequestError, match="has no dense; it has input_tokens, sparse"):
        sparse.dense  # noqa: B018
    body = {"input": TEXTS, "role": "query", "encoding_format": "safetensors"}
    data = httpx.post(f"{colbert}/v1/embeddings", json=body, timeout=180).content
    assert read_vectors(data).metadata["role"] == "query"
    found = safetensors.numpy.load(data)
    assert found.keys() == read_vectors(data).arrays.keys()
    for name, array in found.items():
        assert np.array_equal(array, read_vectors(data).arrays[name])


def test_pooling_gives_files_and_bytes_to_those_who_accept_them(bge: str) -> None:
    def asked(path: str, media: str, **body: Any) -> httpx.Response:
        headers = {"accept": media}
        return httpx.post(bge + path, json={"input": TEXTS, **body}, headers=headers, timeout=180)

    whole = as_file(bge, input=TEXTS, outputs=["dense", "tokens"])
    for task, name in (("embed", "dense"), ("token_embed", "tokens")):
        answer = asked("/pooling", "application/safetensors", task=task)
        assert answer.headers["content-type"] == "application/safetensors"
        found = read_vectors(answer.content)
        assert {key for key in found.arrays if key.startswith(name)} == {
            key for key in whole.arrays if key.startswith(name)
        }
        np.testing.assert_allclose(found.arrays[name], whole.arrays[name], atol=1e-6)
    for path in ("/pooling", "/v1/embeddings"):
        answer = asked(path, "application/octet-stream")
        assert answer.headers["content-type"] == "application/octet-stream"
        assert "metadata" in answer.headers
        rows = np.frombuffer(answer.content, np.float32).reshape(len(TEXTS), -1)
        np.testing.assert_allclose(rows, whole.dense, atol=1e-6)
        assert asked(path, "*/*").headers["content-type"].startswith("application/json")


def test_files_are_refused_where_they_hold_no_answer(tagger: str, bge: str) -> None:
    for url, path, body, says in (
        (tagger, "/v1/embeddings", {}, "token_labels are classes"),
        (tagger, "/pooling", {}, "token_classify gives classes"),
        (bge, "/v1/embeddings", {"endianness": "big"}, "safetensors is little endian"),
    ):
        asked = {"input": TEXTS, "encoding_format": "safetensors", **body}
        response = httpx.post(url + path, json=asked, timeout=180)
        assert response.status_code == 400
        assert says in response.json()["error"]["message"]


@pytest.mark.thorough
def test_sparse_vectors_that_memory_does_not_hold_name_the_field_that_cuts_them() -> None:
    with fleet(models.splade(), task="embed") as running:
        url = running.serve(max_client_bytes=500_000)
        body: dict[str, Any] = {"input": ["cold wind"] * 1500}
        refused = httpx.post(f"{url}/v1/embeddings", json=body, timeout=180)
        assert refused.status_code != 200
        assert "max_active keeps the largest" in refused.json()["error"]["message"]
        body = {"input": ["cold wind"] * 1500, "max_active": 4}
        assert httpx.post(f"{url}/v1/embeddings", json=body, timeout=180).status_code == 200
