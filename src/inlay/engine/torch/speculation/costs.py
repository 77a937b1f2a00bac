"""Times of steps by their number of rows, and how many drafts pay."""

from collections.abc import Iterable, Mapping
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

RISE = 0.1
"""Cost of one more row as a part of a step, until it has been measured."""

_WEIGHT = 0.1
"""Weight of a new measurement in the average."""

_RETURN = 0.001
"""Part of the way back to `RISE` of sizes above a measured one: what was dear is tried again."""


class StepCosts:
    """Seconds of a decode step by its rows: moving averages of those that ran."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def learn(self, rows: int, seconds: float) -> None:
        """Take a measurement. One far off, as of a machine that stood still, counts little."""
        old = self._seconds.get(rows, 0.0)
        if not old:
            old = float(self._expected(np.array([rows]))[0]) if self._seconds else seconds
        now = old + _WEIGHT * (min(seconds, 2 * old) - old)
        self._seconds[rows] = now
        for size, known in self._seconds.items():
            usual = now * (1 + RISE * max(0, size - rows) / rows)
            if size < rows:
                self._seconds[size] = min(known, usual)
            elif known > usual:
                self._seconds[size] = known + _RETURN * (usual - known)

    def measured(self, rows: int) -> bool:
        """Return True if a step of `rows` rows has been measured."""
        return rows in self._seconds

    def relative(self, rows: int, more: int) -> NDArray[np.float64]:
        """Return the cost of steps of `rows` to `rows + more` rows, as float64 [more + 1].

        In steps of `rows` rows; never falling.
        """
        asked = np.arange(rows, rows + more + 1)
        if not self._seconds:
            return 1 + RISE * (asked - rows) / rows
        found = np.maximum.accumulate(np.maximum(self._expected(asked), 1e-9))
        return np.asarray(found / found[0])

    def _expected(self, asked: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return seconds of steps of `asked` rows: between sizes by line, beyond them by `RISE`."""
        known = np.array(sorted(self._seconds))
        seconds = np.array([self._seconds[row] for row in known.tolist()])
        above, below = np.maximum(asked - known[-1], 0), np.maximum(known[0] - asked, 0)
        rise = RISE * (seconds[-1] * above / known[-1] - seconds[0] * below / known[0])
        return np.asarray(np.interp(asked, known, seconds) + rise)


def best_lengths(
    acceptance: Mapping[int, tuple[float, int]], rows: int, costs: StepCosts, room: int
) -> dict[int, int]:
    """Return how many drafts of each sequence give the most tokens a second.

    The j-th draft of a sequence whose drafts are accepted with probability a gives a^j tokens.
    Those with the highest chance are taken as long as tokens over cost rise.

    Args:
        acceptance: by key of a sequence: the probability a, and how many drafts there are.
        rows: rows of the step without drafts.
        costs: of steps.
        room: maximum number of drafts of all together.
    """
    chances = sorted(
        (
            (chance**place, key)
            for key, (chance, count) in acceptance.items()
            for place in range(1, count + 1)
        ),
        reverse=True,
    )[: max(0, room)]
    if not chances:
        return {}
    tokens = np.array(list(accumulate((chance for chance, _ in chances), initial=float(rows))))
    best = int(np.argmax(tokens / costs.relative(rows, len(chances))))
    return _counted(key for _, key in chances[:best])


def _counted(keys: Iterable[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for key in keys:
        found[key] = found.get(key, 0) + 1
    return found
