"""The nearest of many points: of a whole table, or of candidates that provably hold the answer."""

from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from inlay_audit.attacker import NO_LIMIT, Clock
from inlay_audit.prompts import Ids

Values: TypeAlias = npt.NDArray[np.floating[Any]]
"""Numbers in float32, or in float64 where points lie close together far from 0."""
Doubles: TypeAlias = npt.NDArray[np.float64]

_TOGETHER = 2048
"""Rows that are looked up at a time."""
_BLOCK = 8192
"""Points that they are compared with at a time: 64 MB, which mostly stays in the CPU's cache."""
_GATHERED = 1 << 22
"""Elements of points that are gathered at a time."""
LARGE_TABLE = 1 << 15
"""Points from which on candidates are found first."""
_FEW = 32
"""Rows below which reading the points takes longer than any product with them."""


class FindCandidates(Protocol):
    """Finds pairs of a row and a point among which each row's `count` best points are.

    Args:
        rows: (n, h).
        points: (v, h).
        bias: (v,) added to each product; -inf for points that are out of question.
        reach: the largest norm of a point.
        count: at least 1.

    Returns:
        (m,) rows, ascending, and (m,) points; None where they would be too many.
    """

    def __call__(
        self, rows: Values, points: Values, bias: Values, reach: float, count: int
    ) -> tuple[Ids, Ids] | None: ...


def best_points(
    rows: Values, points: Values, count: int = 1, before: Values | None = None
) -> tuple[Ids, Values]:
    """The `count` points, of all at most, with the least squared distance from each row.

    The candidates of a large table are found in bfloat16 where the CPU multiplies it (with torch);
    the error of that has a bound, so they hold the best in any case. Results are those of the whole
    table, but for ties within the rounding of their dtype.

    Args:
        rows: (n, h).
        points: (v, h).
        count: of points.
        before: (v,) added to the scores, such as log probabilities; -inf leaves a point out.

    Returns:
        (n, count) indices, the best first, and their scores: negative half squared distances, but
        for a constant of a row.
    """
    count = min(count, len(points))
    halves: Values = 0.5 * np.einsum("vh,vh->v", points, points)
    bias: Values = -halves if before is None else before - halves
    find = _candidates() if len(points) >= LARGE_TABLE and len(rows) >= _FEW else None
    ids = np.zeros((len(rows), count), np.int64)
    values = np.zeros((len(rows), count), rows.dtype)
    for start in range(0, len(rows), _TOGETHER):
        some = rows[start : start + _TOGETHER]
        reach = float(np.sqrt(2 * halves.max()))
        pairs = None if find is None else find(some, points, bias, reach, count)
        found = (
            _of_all(some, points, bias, count)
            if pairs is None
            else _of_pairs(some, points, bias, count, *pairs)
        )
        ids[start : start + len(some)], values[start : start + len(some)] = found
    return ids, values


def _of_all(rows: Values, points: Values, bias: Values, count: int) -> tuple[Ids, Values]:
    ids = np.zeros((len(rows), 0), np.int64)
    best = np.zeros((len(rows), 0), rows.dtype)
    for start in range(0, len(points), _BLOCK):
        some = rows @ points[start : start + _BLOCK].T
        some += bias[start : start + _BLOCK]
        places = _largest(some, count)
        ids = np.concatenate([ids, start + places], axis=1)
        best = np.concatenate([best, np.take_along_axis(some, places, axis=1)], axis=1)
        # Of equals the first stays: it is in front.
        kept = _largest(best, count)
        ids = np.take_along_axis(ids, kept, axis=1)
        best = np.take_along_axis(best, kept, axis=1)
    order = np.lexsort((ids, -best), axis=1)
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(best, order, axis=1)


def _largest(values: Values, count: int) -> Ids:
    """Places of the `count` largest values of each row, in no order."""
    if count == 1:
        return np.asarray(values.argmax(axis=1)[:, None], np.int64)
    if count >= values.shape[1]:
        return np.broadcast_to(np.arange(values.shape[1]), values.shape)
    return np.asarray(np.argpartition(values, -count, axis=1)[:, -count:], np.int64)


def _of_pairs(
    rows: Values, points: Values, bias: Values, count: int, of: Ids, ids: Ids
) -> tuple[Ids, Values]:
    scored = np.empty(len(ids), rows.dtype)
    step = max(1, _GATHERED // rows.shape[1])
    for start in range(0, len(ids), step):
        some = slice(start, start + step)
        np.einsum("mh,mh->m", rows[of[some]], points[ids[some]], out=scored[some])
    scored += bias[ids]
    order = np.lexsort((ids, -scored, of))
    firsts = np.searchsorted(of, np.arange(len(rows)))
    best = order[firsts[:, None] + np.arange(count)]
    return ids[best], scored[best]


@cache
def _candidates() -> FindCandidates | None:
    """None where the CPU multiplies float32 as fast as anything."""
    if find_spec("torch") is None:
        return None
    module = import_module("inlay_audit.neural.candidates")
    return module.find if module.pays() else None


def nearest_ids(rows: Values, points: Values) -> Ids:
    """Index of the nearest of `points` for each of `rows`."""
    return best_points(rows, points)[0][:, 0]


def nearest_of_each(
    prompts: Sequence[Values], points: Values, clock: Clock = NO_LIMIT
) -> Iterator[tuple[int, Ids]]:
    """`nearest_ids` of the rows of each prompt, of all of them together and of equal rows once.

    One pass over a large table costs as much for a few rows as for many.

    Args:
        prompts: rows, (m, h) each.
        points: (v, h).
        clock: asked before each further batch of rows.

    Yields:
        The prompt's index and (m,) ids, in order.
    """
    rows = np.ascontiguousarray(np.concatenate(prompts))
    whole = rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).ravel()
    _, first, back = np.unique(whole, return_index=True, return_inverse=True)
    # In the order in which they first came, so that one prompt after the other is done.
    order = np.argsort(first)
    places = np.split(np.argsort(order)[back], np.cumsum([len(each) for each in prompts])[:-1])
    ids = np.zeros(len(first), np.int64)
    index = 0
    for start in range(0, len(first), _TOGETHER):
        if start:
            clock.check()
        some = order[start : start + _TOGETHER]
        ids[start : start + len(some)] = nearest_ids(rows[first[some]], points)
        while index < len(prompts) and places[index].max(initial=-1) < start + len(some):
            yield index, ids[places[index]]
            index += 1
