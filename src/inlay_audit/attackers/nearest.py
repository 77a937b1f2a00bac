"""The nearest token: the least that anyone tries who has rows and a table."""

import numpy as np

from inlay_audit.attacker import Guesses, Known, Knows, NotApplicableError, SentRows
from inlay_audit.attackers.lookup import Doubles, nearest_of_each
from inlay_audit.prompts import Floats


class Nearest:
    """Names for each row the nearest token of the table, by L2 distance."""

    name = "nearest"
    knows: Knows = "table"

    def fit(self, known: Known) -> None:
        """Take the table. Raises `NotApplicableError` where rows are not as wide."""
        known.check_width()
        self._table = known.table

    def guess(self, sent: SentRows) -> Guesses:
        """The nearest token of each row."""
        return nearest_of_each(sent.rows, self._table, sent.clock)


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

    def guess(self, sent: SentRows) -> Guesses:
        """The token whose distance the noise explains best."""
        return nearest_of_each([rows @ self._white for rows in sent.rows], self._table, sent.clock)


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
