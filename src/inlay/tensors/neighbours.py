"""Which token of the table a row is nearest to.

What a reader of someone else's prompt would try first.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from inlay.base.errors import InvalidRequestError
from inlay.tensors.products import product
from inlay.tensors.rows import ModelDType
from inlay.tensors.table import EmbeddingTable

CHUNK_BYTES = 8 * 1024 * 1024
"""Bytes that a piece of the table, and its distances to all rows, take in memory at most.

Each in float32.
"""

_SPARE = 4
"""Candidates kept beyond those asked for, as the first pass rounds."""


@dataclass(frozen=True)
class Neighbour:
    """A token near a row.

    Attributes:
        token_id: of the table's row.
        distance: L2, in float32.
        cosine: of the angle between the two; 0 where either is all zeros.
        exact: the row is the table's own, element by element in the table's dtype or in its own.
    """

    token_id: int
    distance: float
    cosine: float
    exact: bool


def nearest(
    rows: npt.NDArray[Any], table: EmbeddingTable, top: int = 1, *, threads: bool = True
) -> list[list[Neighbour]]:
    """For each row the `top` nearest tokens by L2 distance, nearest first.

    The table is read in chunks, so memory is that of `rows` and of a few chunks.

    Args:
        rows: (n, hidden), any float dtype.
        table: of the model the rows are meant for.
        top: how many for each row.
        threads: use all cores; False for the calling thread alone, as in a server.

    Raises:
        InvalidRequestError: the hidden sizes differ.
    """
    vocab, hidden = table.shape
    if rows.shape[1] != hidden:
        raise InvalidRequestError(f"rows of hidden size {rows.shape[1]}, the table's is {hidden}")
    wanted = rows.astype(np.float32)
    squares = np.einsum("nh,nh->n", wanted, wanted)[:, None]
    keep = min(top, vocab)
    best_ids = np.zeros((len(wanted), 0), np.int64)
    best = np.zeros((len(wanted), 0), np.float32)
    for start, piece in _pieces(table, CHUNK_BYTES // (4 * max(hidden, len(wanted), 1))):
        # |a - b|^2 = |a|^2 - 2ab + |b|^2 costs one matrix product; what it loses to rounding
        # `_ranked` makes good.
        products = wanted @ piece.T if threads else product(wanted, piece)
        found = squares - 2 * products + np.einsum("vh,vh->v", piece, piece)[None, :]
        ids = np.broadcast_to(np.arange(start, start + len(piece)), found.shape)
        best = np.concatenate([best, found], axis=1)
        best_ids = np.concatenate([best_ids, ids], axis=1)
        if best.shape[1] > keep + _SPARE:
            nearer = np.argpartition(best, keep + _SPARE - 1, axis=1)[:, : keep + _SPARE]
            best = np.take_along_axis(best, nearer, axis=1)
            best_ids = np.take_along_axis(best_ids, nearer, axis=1)
    return [_ranked(row, ids, table, keep) for row, ids in zip(rows, best_ids, strict=True)]


def _pieces(table: EmbeddingTable, num_rows: int) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
    """Iterate over (first id, scaled rows) of the table, at most `num_rows` at a time."""
    step = max(1, num_rows)
    for first, chunk in table.chunks():
        for start in range(0, len(chunk), step):
            piece = chunk[start : start + step].astype(np.float32)
            piece *= np.float32(table.scale)
            yield first + start, piece


def _ranked(
    row: npt.NDArray[Any], ids: npt.NDArray[np.int64], table: EmbeddingTable, keep: int
) -> list[Neighbour]:
    candidates = table.rows(ids)
    exact = (row.astype(candidates.dtype) == candidates).all(axis=1)
    if table.scale != 1 and row.dtype.name in get_args(ModelDType):
        # A model served in a wider dtype scales after the cast, which rounds differently.
        exact |= (row == table.rows(ids, row.dtype.name)).all(axis=1)
    wide = candidates.astype(np.float64)
    target = row.astype(np.float64)
    distances = np.linalg.norm(wide - target, axis=1)
    lengths = np.linalg.norm(wide, axis=1) * np.linalg.norm(target)
    cosines = np.divide(
        np.einsum("nh,h->n", wide, target), lengths, out=np.zeros(len(ids)), where=lengths > 0
    )
    found = [
        Neighbour(int(id_), float(distance), float(cosine), bool(same))
        for id_, distance, cosine, same in zip(ids, distances, cosines, exact, strict=True)
    ]
    return sorted(found, key=lambda neighbour: (neighbour.distance, neighbour.token_id))[:keep]
