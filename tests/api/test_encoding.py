"""Encoding of vectors.

The bytes of vLLM's `tensor2binary`, and of numpy, for every dtype and byte order.
"""

import base64
import itertools
import json
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inlay.api.openai.embeddings.encoding import DTYPES, About, Encoding, Format
from inlay.api.openai.schema.embeddings import EmbeddingRequest, TextsUsage
from inlay.base.errors import InvalidRequestError

ABOUT = About("embd-1", 7, "modèle", TextsUsage(5, 5))
FORMATS: tuple[Format, ...] = ("float", "base64")
ORDERS = ("native", "big", "little")
TORCH = {
    "float32": (torch.float32, torch.int32),
    "float16": (torch.float16, torch.int16),
    "bfloat16": (torch.bfloat16, torch.int16),
    "fp8_e4m3": (torch.float8_e4m3fn, torch.uint8),
    "fp8_e5m2": (torch.float8_e5m2, torch.uint8),
}


def wanted(row: npt.NDArray[np.float32], dtype: str, order: str) -> bytes:
    """Bytes that vLLM sends: torch's cast, byte-swapped if requested."""
    kind, plain = TORCH[dtype]
    found = torch.from_numpy(row).to(kind).view(plain).numpy()
    return (found if order in ("native", sys.byteorder) else found.byteswap()).tobytes()


@pytest.mark.parametrize(("dtype", "order"), list(itertools.product(DTYPES, ORDERS)))
@given(
    values=st.lists(st.floats(-440, 440, width=32), min_size=6, max_size=6),
)
def test_base64_and_bytes_are_those_of_torch(dtype: str, order: Any, values: list[float]) -> None:
    vectors = np.array(values, np.float32).reshape(2, 3)
    whole = b"".join(wanted(row, dtype, order) for row in vectors)
    shown = json.loads(
        Encoding("base64", dtype, order).answer(vectors, ABOUT, [{}] * len(vectors)).body
    )
    assert b"".join(base64.b64decode(item["embedding"]) for item in shown["data"]) == whole
    assert (
        Encoding("bytes_only", dtype, order).answer(vectors, ABOUT, [{}] * len(vectors)).body
        == whole
    )
    answer = Encoding("bytes", dtype, order).answer(vectors, ABOUT, [{}] * len(vectors))
    assert answer.body == whole
    ((name, header),) = answer.headers
    metadata = json.loads(header)
    assert (name, metadata["id"], metadata["model"], metadata["created"]) == (
        b"metadata",
        "embd-1",
        "modèle",
        7,
    )
    assert metadata["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    for row, item in zip(vectors, metadata["data"], strict=True):
        assert whole[item["start"] : item["end"]] == wanted(row, dtype, order)
        assert (item["shape"], item["embed_dtype"], item["endianness"]) == ([3], dtype, order)


def test_float32_and_float16_read_back_with_numpy() -> None:
    vectors = np.array([[0.25, -1.5, 3.0]], np.float32)
    for dtype, code in (("float32", "f4"), ("float16", "f2")):
        for order, sign in (("big", ">"), ("little", "<"), ("native", "=")):
            encoding = Encoding("bytes_only", dtype, order)  # type: ignore[arg-type]
            body = encoding.answer(vectors, ABOUT, [{}]).body
            assert np.frombuffer(body, sign + code).tolist() == [0.25, -1.5, 3.0]


@given(
    values=st.lists(st.floats(-440, 440, width=32), min_size=22, max_size=22),
)
def test_bits_are_those_above_zero_and_int8_is_near_with_its_factor(values: list[float]) -> None:
    vectors = np.array(values, np.float32).reshape(2, 11)
    for dtype, kind in (("ubinary", np.uint8), ("binary", np.int8)):
        body = Encoding("bytes_only", dtype).answer(vectors, ABOUT, [{}] * 2).body
        found = np.frombuffer(body, kind).reshape(2, 2).astype(int) + (
            128 if kind is np.int8 else 0
        )
        bits = np.unpackbits(found.astype(np.uint8), axis=-1)[:, :11]
        assert (bits == (vectors > 0)).all()
        for encoding in FORMATS:
            shown = json.loads(Encoding(encoding, dtype).answer(vectors, ABOUT, [{}] * 2).body)
            for item, row in zip(
                shown["data"], np.frombuffer(body, kind).reshape(2, 2), strict=True
            ):
                given_back = item["embedding"]
                if encoding == "base64":
                    given_back = np.frombuffer(base64.b64decode(given_back), kind).tolist()
                assert given_back == row.tolist()
    shown = json.loads(Encoding("float", "int8").answer(vectors, ABOUT, [{}] * 2).body)
    for item, vector in zip(shown["data"], vectors, strict=True):
        assert max(map(abs, item["embedding"])) == (127 if vector.any() else 0)
        near = np.array(item["embedding"]) / item["scale"]
        assert np.abs(near - vector).max() <= 0.51 / item["scale"]
    answer = Encoding("bytes", "int8").answer(vectors, ABOUT, [{}] * 2)
    described = json.loads(answer.headers[0][1])["data"]
    assert [each["scale"] for each in described] == [each["scale"] for each in shown["data"]]


def test_a_value_that_a_dtype_does_not_hold_is_an_error_and_not_infinite() -> None:
    vectors = np.array([[1.0, -70000.0]], np.float32)
    for dtype in ("float16", "fp8_e4m3", "fp8_e5m2"):
        with pytest.raises(InvalidRequestError, match=f"{dtype} does not hold a value of 70000"):
            Encoding("base64", dtype).answer(vectors, ABOUT, [{}] * len(vectors))
    assert Encoding("base64", "bfloat16").answer(vectors, ABOUT, [{}] * len(vectors)).body


def test_dtype_and_byte_order_are_refused_where_numbers_are_asked_for() -> None:
    for options in ({"embed_dtype": "float16"}, {"endianness": "big"}):
        with pytest.raises(InvalidRequestError, match="encoding_format is float"):
            Encoding.of(EmbeddingRequest(input="x", **options))  # type: ignore[arg-type]
    request = EmbeddingRequest(input="x", embed_dtype="float32", endianness="native")
    assert Encoding.of(request) == Encoding("float", "float32", "native")


def test_a_description_longer_than_clients_read_is_refused_before_anything_is_computed() -> None:
    most = 400
    Encoding("bytes").check_count(most)
    Encoding("bytes_only").check_count(100_000)
    with pytest.raises(InvalidRequestError, match="bytes_only takes more"):
        Encoding("bytes").check_count(most + 1)
    vectors = np.zeros((most, 16384), np.float32)
    ((_, header),) = (
        Encoding("bytes", "bfloat16", "little").answer(vectors, ABOUT, [{}] * len(vectors)).headers
    )
    assert len(header) < 65_000
