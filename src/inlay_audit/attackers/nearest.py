"""The nearest token: the least that anyone tries who has rows and a table."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from inlay_audit.attacker import Known, Knows, NotApplicableError, Sent
from inlay_audit.prompts import Floats, Ids

Values: TypeAlias = npt.NDArray[np.floating[Any]]
"""Numbers in float32, or in float64 where points lie close together far from 0."""
Doubles: TypeAlias = npt.NDArray[np.float64]

CHUNK = 1 << 24
"""Elements of a matrix of distances at most: 64 MB."""


def scores(rows: Values, points: Values) -> Values:
    """Negative half squared distances (n, v) of (n, h) to (v, h), but for a constant of a row."""
    found: Values = rows @ points.T
    found -= 0.5 * np.einsum("vh,vh->v", points, points)[None, :]
    return found


def nearest_ids(rows: Values, points: Values) -> Ids:
    """Index of the nearest of `points` for each of `rows`; memory is bounded by `CHUNK`."""
    step = max(1, CHUNK // max(len(points), 1))
    found = [
        scores(rows[start : start + step], points).argmax(axis=1)
        for start in range(0, len(rows), step)
    ]
    return np.concatenate(found).astype(np.int64) if found else np.zeros(0, np.int64)


class Nearest:
    """Names for each row the nearest token of the table, by L2 distance."""

    name = "nearest"
    knows: Knows = "table"

    def fit(self, known: Known) -> None:
        """Take the table. Raises `NotApplicableError` where rows are not as wide."""
        known.check_width()
        self._table = known.table

    def guess(self, sent: Sent) -> Sequence[Ids]:
        """The nearest token of each row."""
        return [nearest_ids(rows, self._table) for rows in sent.rows]


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

    def guess(self, sent: Sent) -> Sequence[Ids]:
        """The token whose distance the noise explains best."""
        return [nearest_ids(rows @ self._white, self._table) for rows in sent.rows]


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
