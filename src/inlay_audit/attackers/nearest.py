"""The nearest token: the least that anyone tries who has rows and a table."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from inlay_audit.attacker import Known, Knows, NotApplicableError, SentRows
from inlay_audit.prompts import Floats, Ids

Values: TypeAlias = npt.NDArray[np.floating[Any]]
"""Numbers in float32, or in float64 where points lie close together far from 0."""
Doubles: TypeAlias = npt.NDArray[np.float64]

CHUNK = 1 << 24
"""Elements of a matrix of distances at most: 64 MB."""


def scores(rows: Values, points: Values, halves: Values | None = None) -> Values:
    """Negative half squared distances (n, v) of (n, h) to (v, h), but for a constant of a row.

    `halves` are half the points' squared norms, (v,), where they are known.
    """
    found: Values = rows @ points.T
    found -= (_halves(points) if halves is None else halves)[None, :]
    return found


def _halves(points: Values) -> Values:
    found: Values = 0.5 * np.einsum("vh,vh->v", points, points)
    return found


def nearest_ids(rows: Values, points: Values) -> Ids:
    """Index of the nearest of `points` for each of `rows`; memory is bounded by `CHUNK`."""
    step = max(1, CHUNK // max(len(points), 1))
    halves = _halves(points)
    found = [
        scores(rows[start : start + step], points, halves).argmax(axis=1)
        for start in range(0, len(rows), step)
    ]
    return np.concatenate(found).astype(np.int64) if found else np.zeros(0, np.int64)


def nearest_of_each(prompts: Sequence[Values], points: Values) -> list[Ids]:
    """`nearest_ids` of the rows of each prompt, of all of them together and of equal rows once.

    One pass over a large table costs as much for a few rows as for many.
    """
    rows = np.ascontiguousarray(np.concatenate(prompts))
    whole = rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).ravel()
    _, first, back = np.unique(whole, return_index=True, return_inverse=True)
    ends = np.cumsum([len(each) for each in prompts])[:-1]
    return np.split(nearest_ids(rows[first], points)[back], ends)


class Nearest:
    """Names for each row the nearest token of the table, by L2 distance."""

    name = "nearest"
    knows: Knows = "table"

    def fit(self, known: Known) -> None:
        """Take the table. Raises `NotApplicableError` where rows are not as wide."""
        known.check_width()
        self._table = known.table

    def guess(self, sent: SentRows) -> Sequence[Ids]:
        """The nearest token of each row."""
        return nearest_of_each(sent.rows, self._table)


class WhitenedNearest:
    """The same by Mahalanobis distance: directions full of noise count less.

    The noise's covariance is that of the differences between rows and the tokens' own; with a known
    mechanism it is known without any pair.
    """

    name = "whitened"
    knows: Knows = "pairs"

    def fit(self, known: Known) -> None:
        """Estimate the covariance."""
        known.check_width()
        pairs = known.pairs
        noise = (pairs.rows - known.table[pairs.ids]).astype(np.float64)
        if not noise.any():
            raise NotApplicableError("there is no noise: as nearest")
        self._white = whitener(noise, 1e-6 * float(known.table.var()))
        self._offset = noise.mean(axis=0).astype(np.float32)
        self._table = (known.table + self._offset) @ self._white

    def guess(self, sent: SentRows) -> Sequence[Ids]:
        """The token whose distance the noise explains best."""
        return nearest_of_each([rows @ self._white for rows in sent.rows], self._table)


def whitener(noise: Doubles, floor: float) -> Floats:
    """A matrix (h, h) after which `noise` (N, h) has unit covariance.

    `floor` is the least variance of a direction, for noise that has none in some.
    """
    centred = noise - noise.mean(axis=0)
    covariance = centred.T @ centred / len(centred)
    # With few samples the small eigenvalues are too small: some of the mean is mixed in.
    mixed = min(1.0, 0.2 * noise.shape[1] / len(noise))
    variances, directions = np.linalg.eigh(covariance)
    variances = (1 - mixed) * variances + mixed * variances.mean()
    white: Floats = (directions / np.sqrt(np.maximum(variances, floor))).astype(np.float32)
    return white
