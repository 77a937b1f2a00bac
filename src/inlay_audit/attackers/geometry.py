"""Figures that secret rotations, permutations and sign flips do not change; without a pair."""

from collections.abc import Sequence

import numpy as np

from inlay_audit.attacker import Known, Knows, NotApplicableError, SentRows
from inlay_audit.attackers.nearest import Doubles, nearest_of_each, whitener
from inlay_audit.prompts import Floats, Ids

_AT_A_TIME = 8192
"""Rows of the table that are cast to float64 together."""
_ROUNDING = 1e-6
"""Of a figure, by which float32 rows may change it."""
_LEAST_VARIANCE = 1e-9


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
        table, template = known.table, known.template
        self._before, self._after = len(template.before), len(template.after)
        around = table[np.concatenate([template.before, template.after])]
        figures = _figures(table, around)
        self._mean = figures.mean(axis=0)
        # A figure that is the same for all tokens says nothing but how rows were rounded.
        least = _ROUNDING * np.sqrt(np.square(figures).mean(axis=0)) + 1e-30
        scale = np.maximum(figures.std(axis=0), least)
        white = whitener((figures - self._mean) / scale, _LEAST_VARIANCE)
        self._white = white / scale[:, None]
        self._figures = self._centred(figures)

    def _centred(self, figures: Doubles) -> Doubles:
        """Figures about their mean, in units of their spread; those that go together count once."""
        centred: Doubles = (figures - self._mean) @ self._white
        return centred

    def guess(self, sent: SentRows) -> Sequence[Ids]:
        """The token with the nearest figures."""
        found = []
        for rows in sent.rows:
            around = np.concatenate([rows[: self._before], rows[len(rows) - self._after :]])
            found.append(self._centred(_figures(rows, around)))
        return nearest_of_each(found, self._figures)


class SortedValues:
    """A row's values by size, without their signs: what permutations of the width leave."""

    name = "sorted"
    knows: Knows = "table"

    def fit(self, known: Known) -> None:
        """Sort the table."""
        known.check_width()
        self._table = np.sort(np.abs(known.table), axis=1)

    def guess(self, sent: SentRows) -> Sequence[Ids]:
        """The token with the nearest values."""
        return nearest_of_each([np.sort(np.abs(rows), axis=1) for rows in sent.rows], self._table)


def _figures(rows: Floats, around: Floats) -> Doubles:
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
