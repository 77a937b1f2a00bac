"""Figures that secret rotations, permutations and sign flips do not change; without a pair."""

from collections.abc import Sequence

import numpy as np

from inlay.audit.attacker import Known, Knows, NotApplicableError, Sent
from inlay.audit.attackers.nearest import nearest_ids
from inlay.audit.prompts import Floats, Ids


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
        self._scale = figures.std(axis=0) + 1e-12
        self._figures = figures / self._scale

    def guess(self, sent: Sent) -> Sequence[Ids]:
        """The token with the nearest figures."""
        found = []
        for rows in sent.rows:
            around = np.concatenate([rows[: self._before], rows[len(rows) - self._after :]])
            found.append(nearest_ids(_figures(rows, around) / self._scale, self._figures))
        return found


class SortedValues:
    """A row's values by size, without their signs: what permutations of the width leave."""

    name = "sorted"
    knows: Knows = "table"

    def fit(self, known: Known) -> None:
        """Sort the table."""
        known.check_width()
        self._table = np.sort(np.abs(known.table), axis=1)

    def guess(self, sent: Sent) -> Sequence[Ids]:
        """The token with the nearest values."""
        return [nearest_ids(np.sort(np.abs(rows), axis=1), self._table) for rows in sent.rows]


def _figures(rows: Floats, around: Floats) -> Floats:
    """(n, 1 + k): norms and inner products with k rows."""
    return np.concatenate([np.linalg.norm(rows, axis=1)[:, None], rows @ around.T], axis=1)
