"""The nearest tokens are those of a full comparison, and a table's own rows are told apart."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inlay.base.errors import InvalidRequestError
from inlay.client import nearest
from inlay.tensors.table import EmbeddingTable
from tests.client.models import gemma
from tests.models import tiny


def reference(rows: np.ndarray[Any, Any], table: EmbeddingTable) -> np.ndarray[Any, Any]:
    whole = table.rows(range(table.shape[0])).astype(np.float64)
    distances: np.ndarray[Any, Any] = np.linalg.norm(
        rows.astype(np.float64)[:, None, :] - whole[None, :, :], axis=2
    )
    return distances


@given(
    ids=st.lists(st.integers(0, 383), min_size=1, max_size=6),
    noise=st.sampled_from([0.0, 0.01, 1.0, 30.0]),
    top=st.integers(1, 7),
    seed=st.integers(0, 2**32 - 1),
)
def test_neighbours_are_those_of_a_full_comparison(
    ids: list[int], noise: float, top: int, seed: int
) -> None:
    table = EmbeddingTable.open(tiny("llama"))
    random = np.random.default_rng(seed)
    rows = (table.rows(ids) + noise * random.standard_normal((len(ids), table.shape[1]))).astype(
        np.float32
    )
    distances = np.sort(reference(rows, table), axis=1)[:, :top]
    found = nearest(rows, table, top)
    np.testing.assert_allclose(
        [[n.distance for n in row] for row in found], distances, rtol=1e-6, atol=1e-9
    )
    assert all(row[0].exact == (noise == 0) for row in found)


@pytest.mark.parametrize("chunk", [1, 5000, 100_000])
def test_the_size_of_the_pieces_changes_nothing(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = EmbeddingTable.open(tiny("qwen3", "bfloat16"))
    rows = np.random.default_rng(0).standard_normal((5, table.shape[1])).astype(np.float32)
    expected = nearest(rows, table, 3)
    monkeypatch.setattr("inlay.tensors.neighbours.CHUNK_BYTES", chunk)
    assert nearest(rows, table, 3) == expected


def test_rows_of_every_token_are_exact_and_name_it() -> None:
    table = EmbeddingTable.open(tiny("qwen3", "bfloat16"))
    ids = range(table.shape[0])
    for rows in (table.rows(ids), table.rows(ids).astype(np.float32)):
        found = nearest(rows, table)
        assert [row[0].token_id for row in found] == list(ids)
        assert all(row[0].exact and row[0].distance == 0 for row in found)
        assert all(row[0].cosine == pytest.approx(1) for row in found)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_scaled_rows_are_exact_in_whichever_dtype_they_were_scaled(
    dtype: str, tmp_path: Path
) -> None:
    table = EmbeddingTable.open(gemma(3, tmp_path / "model", torch.bfloat16))
    found = nearest(table.rows([5, 9, 200], dtype), table)
    assert [row[0].token_id for row in found] == [5, 9, 200]
    assert all(row[0].exact for row in found)


def test_a_row_of_zeros_has_no_direction() -> None:
    table = EmbeddingTable.open(tiny("llama"))
    (found,) = nearest(np.zeros((1, table.shape[1]), ml_dtypes.bfloat16), table)
    assert found[0].cosine == 0
    assert not found[0].exact


def test_rows_of_another_hidden_size_are_refused() -> None:
    table = EmbeddingTable.open(tiny("llama"))
    with pytest.raises(InvalidRequestError, match="hidden size 7, the table's is 48"):
        nearest(np.zeros((1, 7), np.float32), table)
