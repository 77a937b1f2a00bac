"""Files of `write` are read back by `read` and by the formats' own libraries."""

import io
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from inlay.base.errors import EmbeddingsError
from inlay.tensors import read, write
from tests.examples import examples

DTYPES = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
ARRAY: np.ndarray[Any, Any] = np.arange(48, dtype=np.float32).reshape(3, 16)


@given(
    bits=hnp.arrays(
        np.uint8,
        st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5).map(lambda n: n * 8)),
    ),
    dtype=st.sampled_from(sorted(DTYPES)),
    format=st.sampled_from(["torch", "safetensors", "npy"]),
    table_id=st.none()
    | st.text(st.characters(min_codepoint=1, max_codepoint=127), min_size=1, max_size=128),
)
@settings(max_examples=examples(200), derandomize=True, deadline=None)
def test_what_is_written_is_read(bits: Any, dtype: str, format: Any, table_id: str | None) -> None:
    array = bits.view(DTYPES[dtype])
    if format == "npy" and (
        table_id is not None or DTYPES[dtype] not in (np.float64, np.float32, np.float16)
    ):
        with pytest.raises(EmbeddingsError, match="npy format"):
            write(array, format, table_id=table_id)
        return
    got = read(write(array, format, table_id=table_id))
    assert (got.dtype, got.shape, got.format, got.table_id) == (
        dtype,
        array.shape,
        format,
        table_id,
    )
    assert bytes(got.data.view) == array.tobytes()


@pytest.mark.parametrize("table_id", [None, "a-table"])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_torch_reads_what_is_written_for_it(
    dtype: str, table_id: str | None, tmp_path: Any
) -> None:
    container = write(ARRAY.astype(DTYPES[dtype]), "torch", table_id=table_id)
    path = tmp_path / "embeds.pt"
    path.write_bytes(container)
    for got in (
        torch.load(io.BytesIO(container), weights_only=True),  # noqa: TID251
        torch.load(path, weights_only=True, mmap=True),  # noqa: TID251
    ):
        assert got.dtype == getattr(torch, dtype)
        assert torch.equal(got.float(), torch.from_numpy(ARRAY).to(got.dtype).float())


def test_storages_are_aligned_as_torch_aligns_them() -> None:
    container = write(ARRAY, "torch", table_id="a-table")
    assert container.index(ARRAY.tobytes()) % 64 == 0


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_safetensors_reads_what_is_written_for_it(dtype: str, tmp_path: Any) -> None:
    array = ARRAY.astype(DTYPES[dtype])
    container = write(array, "safetensors", table_id="a-table")
    (got,) = safetensors.torch.load(container).values()
    assert got.dtype == getattr(torch, dtype)
    assert got.view(torch.uint8).numpy().tobytes() == array.tobytes()
    path = tmp_path / "embeds.safetensors"
    path.write_bytes(container)
    with safetensors.safe_open(path, "np") as opened:
        assert opened.metadata() == {"embedding_table_id": "a-table"}


def test_numpy_reads_what_is_written_for_it() -> None:
    assert np.array_equal(np.load(io.BytesIO(write(ARRAY, "npy"))), ARRAY)


@pytest.mark.parametrize("format", ["torch", "safetensors", "npy"])
def test_the_smallest_tensor_makes_a_file_that_servers_take(format: Any) -> None:
    container = write(np.ones((1, 1), np.float16), format)
    assert len(container) >= 100
    assert read(container).shape == (1, 1)


@pytest.mark.parametrize("format", ["torch", "safetensors", "npy"])
@pytest.mark.parametrize(
    "array",
    [
        ARRAY.T,
        ARRAY[:, ::2],
        ARRAY[::-1],
        np.asfortranarray(ARRAY),
        ARRAY.astype(">f4"),
        np.broadcast_to(ARRAY[0], (5, 16)),
    ],
    ids=["transposed", "strided", "reversed", "Fortran", "big endian", "broadcast"],
)
def test_any_layout_is_written_in_c_order(array: Any, format: Any) -> None:
    got = read(write(array, format))
    assert got.dtype == "float32"
    assert got.array.tolist() == array.tolist()


@pytest.mark.parametrize("format", ["torch", "safetensors", "npy"])
@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 2), np.int32), "dtype int32; allowed: float64"),
        (np.zeros((2, 2), np.complex64), "dtype complex64"),
        (np.zeros((2, 2), ml_dtypes.float8_e4m3b11fnuz), "dtype float8_e4m3b11fnuz"),
        (np.zeros((0, 16), np.float32), r"shape \(0, 16\); at least one element"),
        (np.zeros((1,) * 9, np.float32), "at most 8 dimensions"),
    ],
)
def test_what_no_server_takes_is_not_written(array: Any, message: str, format: Any) -> None:
    with pytest.raises(EmbeddingsError, match=message):
        write(array, format)


@pytest.mark.parametrize("table_id", ["", "é", "a" * 129])
def test_a_table_id_is_short_ascii(table_id: str) -> None:
    with pytest.raises(EmbeddingsError, match="embedding table id"):
        write(ARRAY, "torch", table_id=table_id)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(EmbeddingsError, match="unknown format 'gguf'"):
        write(ARRAY, "gguf")  # type: ignore[arg-type]
