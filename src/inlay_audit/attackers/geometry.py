"""Figures that secret rotations, permutations and sign flips do not change; without a pair."""

from collections.abc import Sequence

import numpy as np

from inlay_audit.attacker import (
    Clock,
    Guesses,
    Known,
    Knows,
    NotApplicableError,
    SentRows,
    in_order,
)
from inlay_audit.attackers.lookup import Doubles, nearest_of_each
from inlay_audit.attackers.nearest import whitener
from inlay_audit.prompts import Floats, Ids

_AT_A_TIME = 8192
"""Rows of the table that are cast to float64 together."""
_ROUNDING = 1e-6
"""Of a figure, by which float32 rows may change it."""
_LEAST_VARIANCE = 1e-9
_MOST_ROWS = 2048
"""Rows that are compared with each other."""
_AGREEING = 0.05
"""Share of the other rows that must agree with a row for it to be believed."""
_BELIEVED = (8, 24, 64, 128)
"""Rows that are believed, each time all are read again."""


class Signature:
    """Norms, and inner products with the template's rows of the same prompt.

    Orthogonal maps change neither, however secret, and a new one for each prompt does not help.
    """

    name = "signature"
    knows: Knows = "table"

    def fit(self, known: Known) -> None:
        """Take the same figures of every token of the table."""
        if not known.keeps_rows:
            raise NotApplicableError("the template's rows cannot be found")
        template = known.template
        self._before, self._after = len(template.before), len(template.after)
        around = known.table[np.concatenate([template.before, template.after])]
        self._figures = _Figures(known.table, around)

    def guess(self, sent: SentRows) -> Guesses:
        """The token with the nearest figures."""
        around = [
            np.concatenate([rows[: self._before], rows[len(rows) - self._after :]])
            for rows in sent.rows
        ]
        return self._figures.nearest(sent.rows, around, sent.clock)


class GramMatrix:
    """Rows whose products with each other prove their tokens, and what these say of the others.

    A rotation that all prompts share changes no product among their rows. Tokens begin as
    `Signature` reads them. The rows whose products with the others are the table's own are
    believed; products with them are further figures of every row, by which all are read again.
    Where rounding to 16 bits spoils the few figures of `Signature`, these are enough.
    """

    name = "gram"
    knows: Knows = "table"

    def fit(self, known: Known) -> None:
        """Take what `Signature` does. Raises `NotApplicableError` where rows are not as wide."""
        known.check_width()
        self._signature = Signature()
        self._signature.fit(known)
        self._table = known.table

    def guess(self, sent: SentRows) -> Guesses:
        """The token with the nearest products."""
        found = dict(self._signature.guess(sent))
        for count in _BELIEVED:
            yield from found.items()
            # A row that came twice proves nothing to itself.
            rows, first = np.unique(np.concatenate(sent.rows), axis=0, return_index=True)
            ids = np.concatenate(in_order(found.items()))[first]
            sure = np.argsort(self._doubts(rows[:_MOST_ROWS], ids[:_MOST_ROWS]))[:count]
            figures = _Figures(self._table, self._table[ids[sure]])
            found = dict(figures.nearest(sent.rows, [rows[sure]] * len(sent.rows), sent.clock))
        yield from found.items()

    def _doubts(self, rows: Floats, ids: Ids) -> Doubles:
        """Distances of a row's products from those of its token, (n,), in units of both norms.

        A low quantile of those with the other rows: the tokens of most of these may be wrong.
        """
        own = self._table[ids].astype(np.float64)
        given = rows.astype(np.float64)
        norms = np.linalg.norm(given, axis=1) + 1e-30
        away = np.abs(given @ given.T - own @ own.T) / np.outer(norms, norms)
        np.fill_diagonal(away, np.inf)
        found: Doubles = np.quantile(away, _AGREEING, axis=1)
        return found


class SortedValues:
    """A row's values by size, without their signs: what permutations of the width leave."""

    name = "sorted"
    knows: Knows = "table"

    def fit(self, known: Known) -> None:
        """Sort the table."""
        known.check_width()
        self._table = np.sort(np.abs(known.table), axis=1)

    def guess(self, sent: SentRows) -> Guesses:
        """The token with the nearest values."""
        shapes = [np.sort(np.abs(rows), axis=1) for rows in sent.rows]
        return nearest_of_each(shapes, self._table, sent.clock)


class _Figures:
    """Norms and inner products with some rows, of every token of a table.

    Args:
        table: the embedding table, (vocabulary, h).
        around: those rows as the table has them, (k, h).
    """

    def __init__(self, table: Floats, around: Floats) -> None:
        figures = _measured(table, around)
        self._mean = figures.mean(axis=0)
        # A figure that is the same for all tokens says nothing but how rows were rounded.
        least = _ROUNDING * np.sqrt(np.square(figures).mean(axis=0)) + 1e-30
        scale = np.maximum(figures.std(axis=0), least)
        white = whitener((figures - self._mean) / scale, _LEAST_VARIANCE)
        self._white = white / scale[:, None]
        self._tokens = self._centred(figures)

    def nearest(self, prompts: Sequence[Floats], around: Sequence[Floats], clock: Clock) -> Guesses:
        """The token with the nearest figures, of each row of prompts.

        Args:
            prompts: rows as they were sent, (n, h) of each prompt.
            around: the rows that products are with, as they were sent, (k, h) for each prompt.
            clock: as that of `SentRows`.
        """
        found = [
            self._centred(_measured(rows, known))
            for rows, known in zip(prompts, around, strict=True)
        ]
        return nearest_of_each(found, self._tokens, clock)

    def _centred(self, figures: Doubles) -> Doubles:
        """Figures about their mean, in units of their spread; those that go together count once."""
        centred: Doubles = (figures - self._mean) @ self._white
        return centred


def _measured(rows: Floats, around: Floats) -> Doubles:
    """(n, 1 + k): norms and inner products with k rows.

    In float64: norms may differ by a thousandth of themselves, and inner products by less.
    """
    known = around.astype(np.float64)
    found = np.empty((len(rows), 1 + len(known)))
    for start in range(0, len(rows), _AT_A_TIME):
        some = rows[start : start + _AT_A_TIME].astype(np.float64)
        found[start : start + len(some), 0] = np.linalg.norm(some, axis=1)
        found[start : start + len(some), 1:] = some @ known.T
    return found
