"""Vectors of an answer's safetensors file, uploaded: documents as if the server had stored them."""

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from inlay.base.errors import BodyTooLargeError, InvalidRequestError, NotFoundError
from inlay.client import StoredVectors, Uploader, read_vectors
from inlay.store import StoreSettings
from inlay.tensors.named import write_arrays
from tests import output_models as models
from tests.live import SECRET, Fleet, fleet

TEXTS = ["the harbour : counts : its lanterns", "cold wind", "what is the capital of the island"]
QUERY = "cold harbour"
NAMES = ["dense", "sparse", "tokens"]
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def running() -> Iterator[Fleet]:
    with fleet(models.bge_m3(), task="embed", dtype="float32") as found:
        yield found


@pytest.fixture(scope="module")
def url(running: Fleet) -> str:
    return running.serve(store=StoreSettings().open(SECRET))


def post(url: str, path: str, **body: Any) -> httpx.Response:
    response = httpx.post(url + path, json=body, timeout=180)
    assert response.status_code == 200, response.text
    return response


def file(url: str, **body: Any) -> bytes:
    asked = {"input": TEXTS, "outputs": NAMES, "encoding_format": "safetensors", **body}
    return post(url, "/v1/embeddings", **asked).content


def ranks(url: str, documents: Any, output: str) -> list[tuple[int, Any]]:
    body = {"query": QUERY, "documents": documents, "output": output}
    found = post(url, "/v1/rerank", **body).json()["results"]
    return [(one["index"], pytest.approx(one["relevance_score"], rel=1e-4)) for one in found]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_uploaded_vectors_rank_as_their_texts(url: str, dtype: str) -> None:
    uploader = Uploader(url + "/v1")
    refs = uploader.upload_vectors(file(url, embed_dtype=dtype))
    assert len(refs) == 3
    assert all(ref.startswith("pv-") for ref in refs)
    documents = [{"ref": ref} for ref in refs]
    for name in NAMES:
        found, ours = ranks(url, documents, name), ranks(url, TEXTS, name)
        if dtype == "float32":
            assert found == ours
        else:
            assert [index for index, _ in found] == [index for index, _ in ours]
    known = uploader.get(refs[0])
    assert isinstance(known, StoredVectors)
    assert known.num_vectors > 1
    assert uploader.pin(refs[0]).pinned
    uploader.delete(refs[0])
    with pytest.raises(NotFoundError):
        uploader.get(refs[0])


def test_factors_of_int8_are_undone(url: str) -> None:
    data = file(url, outputs=["dense", "tokens"], embed_dtype="int8")
    refs = Uploader(url + "/v1").upload_vectors(data)
    ours = ranks(url, TEXTS, "tokens")
    found = ranks(url, [{"ref": ref} for ref in refs], "tokens")
    assert [index for index, _ in found] == [index for index, _ in ours]


def test_memory_is_taken_for_the_numbers_of_a_file_not_for_its_bytes(running: Fleet) -> None:
    own = running.serve(store=StoreSettings().open(SECRET), max_client_bytes=10 * MIB)
    whole = read_vectors(file(own, outputs=["tokens"], embed_dtype="int8"))
    rows = MIB // models.SIZE
    arrays: dict[str, Any] = {
        "tokens": np.ones((rows, models.SIZE), np.int8),
        "tokens.scale": np.ones(rows, np.float32),
        "tokens.offsets": np.array([0, rows], np.int64),
    }
    with pytest.raises(BodyTooLargeError, match="--max-client-bytes"):
        Uploader(own + "/v1").upload_vectors(write_arrays(arrays, whole.metadata))
    few = {name: array[: rows // 4] for name, array in arrays.items()}
    few["tokens.offsets"] = np.array([0, rows // 4], np.int64)
    assert len(Uploader(own + "/v1").upload_vectors(write_arrays(few, whole.metadata))) == 1


@pytest.mark.parametrize(
    ("change", "metadata", "said"),
    [
        ({}, {"weights_id": "0" * 32}, "whose vectors are others"),
        ({}, {"role": "judge"}, "its role is 'judge'"),
        ({"dense": np.ones((3, 5), np.float32)}, {}, "dense has the shape"),
        ({"dense": np.full((3, 1), np.nan, np.float32)}, {}, "not finite"),
        ({"dense": np.ones((3, 1), np.bool_)}, {}, "dense has no numbers"),
        ({"dense": np.array(1, np.float32)}, {}, "dense has the shape"),
        ({"tokens.offsets": np.array(1, np.int64)}, {}, "tokens.offsets are not where"),
        ({"dense": None, "sparse.values": None, "tokens": None}, {}, "it has none of"),
        ({"tokens.offsets": np.array([0, 3], np.int64)}, {}, "tokens.offsets are not where"),
        ({"tokens.offsets": np.array([0, 9, 2, 3], np.int64)}, {}, "tokens.offsets are not where"),
        ({"sparse.indices": np.array([-1], np.int32)}, {}, "sparse.indices are not an id"),
        ({"sparse.offsets": None}, {}, "sparse.offsets are not where"),
        ({"dense": "first"}, {}, "not of equally many inputs"),
    ],
)
def test_other_files_are_refused(url: str, change: Any, metadata: Any, said: str) -> None:
    whole = read_vectors(file(url))
    arrays = dict(whole.arrays)
    for name, value in change.items():
        if value is None:
            del arrays[name]
        elif isinstance(value, str):
            arrays[name] = arrays[name][:1]
        else:
            arrays[name] = value
    data = write_arrays(arrays, {**whole.metadata, **metadata})
    with pytest.raises(InvalidRequestError, match=said):
        Uploader(url + "/v1").upload_vectors(data)


def test_what_is_no_file_is_refused(url: str) -> None:
    for data in (b"", b"x" * 7, b"\xff" * 64, (1 << 62).to_bytes(8, "little") + b"{}"):
        answer = httpx.post(
            url + "/v1/prompt_embeds",
            content=data,
            headers={"content-type": "application/safetensors"},
            timeout=60,
        )
        assert answer.status_code == 400, answer.text
        assert "no file of vectors" in answer.json()["error"]["message"]


def test_more_inputs_than_a_request_may_have_are_refused(url: str) -> None:
    whole = read_vectors(file(url))
    arrays = dict(whole.arrays)
    arrays["tokens.offsets"] = np.zeros(100_000, np.int64)
    data = write_arrays(arrays, whole.metadata)
    with pytest.raises(InvalidRequestError, match="over 2048 inputs"):
        Uploader(url + "/v1").upload_vectors(data)
