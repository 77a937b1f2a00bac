"""Rows of known texts, sent through the same transform, and the maps that they teach."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inlay_audit.attacker import (
    NO_LIMIT,
    Clock,
    Guesses,
    Known,
    Knows,
    NotApplicableError,
    SentRows,
)
from inlay_audit.attackers.lookup import Doubles, best_points, nearest_ids, nearest_of_each
from inlay_audit.attackers.nearest import whitener
from inlay_audit.prompts import Floats, Ids

_PENALTIES = (1e-4, 1e-2, 1.0, 100.0)
_HELD_OUT = 0.2
_STILL_OWN = 0.5
"""Share of a row that rows are still of, on average, where all that was done to them is noise."""


class Codebook:
    """The mean row of each token that was seen: reads any key that is one row to one token."""

    name = "codebook"
    knows: Knows = "pairs"

    def fit(self, known: Known) -> None:
        """Average the rows of each token."""
        rows, ids = known.pairs
        self._ids, places, counts = np.unique(ids, return_inverse=True, return_counts=True)
        sums = np.zeros((len(self._ids), rows.shape[1]), np.float64)
        np.add.at(sums, places, rows)
        self._means = (sums / counts[:, None]).astype(np.float32)

    def guess(self, sent: SentRows) -> Guesses:
        """The token with the nearest mean."""
        for index, places in nearest_of_each(sent.rows, self._means, sent.clock):
            yield index, self._ids[places]


class Procrustes:
    """The rotation that best takes the table's rows to those that were sent, taken back."""

    name = "procrustes"
    knows: Knows = "pairs"

    def fit(self, known: Known) -> None:
        """Find the rotation."""
        rows, ids = known.pairs
        product = rows.astype(np.float64).T @ known.table[ids].astype(np.float64)
        left, _, right = np.linalg.svd(product, full_matrices=False)
        self._back = (left @ right).astype(np.float32)
        self._table = known.table

    def guess(self, sent: SentRows) -> Guesses:
        """The nearest token after the rotation was taken back."""
        return nearest_of_each([rows @ self._back for rows in sent.rows], self._table, sent.clock)


class Ridge:
    """The affine map from rows to the table's rows with the least error, by ridge regression."""

    name = "ridge"
    knows: Knows = "pairs"

    def fit(self, known: Known) -> None:
        """Solve for the map; its penalty is chosen on rows that were left out."""
        rows, ids = known.pairs
        wanted = known.table[ids].astype(np.float64)
        inputs = _with_one(rows)
        train = int(len(rows) * (1 - _HELD_OUT))
        if train < 2:
            raise NotApplicableError("there are too few pairs")
        solved = [_ridge(inputs[:train], wanted[:train], penalty) for penalty in _PENALTIES]
        errors = [
            float(np.square(inputs[train:] @ each - wanted[train:]).mean()) for each in solved
        ]
        best = _PENALTIES[int(np.argmin(errors))]
        self._map = _ridge(inputs, wanted, best).astype(np.float32)
        self._table = known.table

    def guess(self, sent: SentRows) -> Guesses:
        """The token nearest to the mapped row."""
        mapped = [rows @ self._map[:-1] + self._map[-1] for rows in sent.rows]
        return nearest_of_each(mapped, self._table, sent.clock)


@dataclass(frozen=True, eq=False)
class Emission:
    """Likelihood of a row for each token: an affine map of its own row, and Gaussian noise.

    Covers rotations, projections and every noise that is the same for all tokens.

    Attributes:
        white: (width, h); makes the noise of rows as large in all directions, with variance 1.
        offset: (width,); the noise's mean.
        points: (vocabulary, h); each token's own row under the map, then under `white`.
    """

    white: Floats
    offset: Floats
    points: Floats

    @classmethod
    def of(cls, known: Known) -> "Emission":
        """The emission that pairs teach, estimated once for all attackers that use it.

        Without rows of known tokens it is that of the nearest tokens.
        """
        found = known.cached.get("emission")
        if not isinstance(found, cls):
            found = known.cached["emission"] = cls._fitted(known)
        return found

    @classmethod
    def of_template(cls, known: Known) -> "Emission":
        """The emission without any pair: the table's own rows, with noise of one variance.

        The variance is that of the template's rows, which stand around every text.

        Raises:
            NotApplicableError: the template's rows are not the table's own with noise: they are of
                another width, under a key or without noise, or there is no template.
        """
        known.check_width()
        before, after = known.template.before, known.template.after
        ids = np.concatenate([before, after])
        if not len(ids):
            raise NotApplicableError(
                "the prompts have no token around a text, to measure the noise by"
            )
        own = known.table[ids]
        rows = np.stack(
            [
                np.concatenate([one[: len(before)], one[len(one) - len(after) :]])
                for one in known.sent
            ]
        )
        # Noise adds to the row that was there; a key takes it away.
        if float((rows * own).sum()) < _STILL_OWN * len(rows) * float(np.square(own).sum()):
            raise NotApplicableError("the template's rows are not near the table's: there is a key")
        spread = float(np.square(rows - own).mean())
        if spread <= _least_variance(known.table):
            raise NotApplicableError("there is no noise: as nearest")
        return cls._plain(known.table, np.zeros(known.table.shape[1], np.float32), spread)

    @classmethod
    def _plain(cls, table: Floats, offset: Floats, spread: float) -> "Emission":
        deviation = np.float32(spread**0.5)
        return cls(np.eye(table.shape[1], dtype=np.float32) / deviation, offset, table / deviation)

    @classmethod
    def _fitted(cls, known: Known) -> "Emission":
        table = known.table
        try:
            rows, ids = known.pairs
        except NotApplicableError:
            known.check_width()
            rows, ids = _read_by_nearest(known)
        floor = _least_variance(rows)
        # Where rows are the table's own and all directions have as much noise, a map of (h, h) that
        # is learned of a few thousand pairs only adds to it.
        inputs = _with_one(table[ids])
        if table.shape[1] == rows.shape[1]:
            own = (rows - table[ids]).astype(np.float64)
            offset = own.mean(axis=0)
            noise = float(np.square(own - offset).mean())
            spread = max(noise, floor)
            # Nats a row of noise with one variance, but for a constant.
            surprise = 0.5 * rows.shape[1] * (noise / spread + np.log(spread))
            if surprise <= _surprise_of_map(inputs, rows, floor):
                return cls._plain(table, offset.astype(np.float32), spread)
        solved = _ridge(inputs, rows.astype(np.float64), 1e-4)
        white = whitener(rows - inputs @ solved, floor)
        points = (table @ solved[:-1].astype(np.float32)) @ white
        return cls(white, solved[-1].astype(np.float32), points)

    def of_words(self, rows: Floats, words: Ids) -> Floats:
        """Log likelihoods of tokens `words` (w,) in rows (n, h): (n, w), but for a row's constant.

        The same constant as that of `likeliest`.
        """
        points = self.points[words]
        halves: Floats = 0.5 * np.einsum("wh,wh->w", points, points)
        found: Floats = self._white(rows) @ points.T
        found -= halves
        return found

    def likeliest(
        self, rows: Floats, count: int, before: Floats | None = None
    ) -> tuple[Ids, Floats]:
        """The `count` likeliest tokens of rows (n, h), of the vocabulary at most.

        Args:
            rows: rows.
            count: of tokens.
            before: (vocabulary,) log probability of each token before its row is seen; the same for
                all unless given.

        Returns:
            (n, count) ids, the likeliest first, and log likelihoods, but for a row's constant.
        """
        ids, likely = best_points(self._white(rows), self.points, count, before)
        return ids, likely.astype(np.float32, copy=False)

    def best(self, prompts: Sequence[Floats], clock: Clock = NO_LIMIT) -> Guesses:
        """The most likely token of each row of prompts."""
        return nearest_of_each([self._white(rows) for rows in prompts], self.points, clock)

    def _white(self, rows: Floats) -> Floats:
        return np.asarray((rows - self.offset) @ self.white, np.float32)


class LeastSquares:
    """The most likely token by `Emission`: the map is undone and the noise whitened at once."""

    name = "least-squares"
    knows: Knows = "pairs"

    def fit(self, known: Known) -> None:
        """Estimate map and noise from pairs."""
        _ = known.pairs
        self._emission = Emission.of(known)

    def guess(self, sent: SentRows) -> Guesses:
        """The most likely token of each row."""
        return self._emission.best(sent.rows, sent.clock)


def _surprise_of_map(inputs: Doubles, rows: Floats, floor: float) -> float:
    """Nats a row that was left out of fitting a map and the noise's covariance, likewise."""
    train = int(len(rows) * (1 - _HELD_OUT))
    if train < 2 or train == len(rows):
        return float("inf")
    solved = _ridge(inputs[:train], rows[:train].astype(np.float64), 1e-4)
    noise = rows - inputs @ solved
    white = whitener(noise[:train], floor).astype(np.float64)
    _, scale = np.linalg.slogdet(white)
    return float(0.5 * np.square(noise[train:] @ white).sum(axis=1).mean() - scale)


def _least_variance(rows: Floats) -> float:
    """A thousandth of a row's own spread: no key is exact to more than rounding."""
    return 1e-6 * float(rows.var())


def _read_by_nearest(known: Known) -> tuple[Floats, Ids]:
    rows = np.concatenate(known.sent)
    return rows, nearest_ids(rows, known.table)


def _with_one(rows: Floats) -> Doubles:
    return np.concatenate([rows, np.ones((len(rows), 1))], axis=1).astype(np.float64)


def _ridge(
    inputs: Doubles,
    wanted: Doubles,
    penalty: float,
) -> Doubles:
    """Solve least squares with a penalty on all but the last input, in units of their variance."""
    gram = inputs.T @ inputs
    weight = penalty * float(np.trace(gram[:-1, :-1])) / (len(gram) - 1)
    diagonal = np.full(len(gram), weight + 1e-12)
    diagonal[-1] = 1e-12 * len(inputs)
    return np.asarray(np.linalg.solve(gram + np.diag(diagonal), inputs.T @ wanted), np.float64)
