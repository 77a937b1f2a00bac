"""Costs of steps by their rows, and how many drafts pay and keep no client waiting."""

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

_C = TypeVar("_C", bound=Hashable)
_COUNT = itemgetter(2)

RISE = 0.1
"""Cost of one more row as a part of a step, until it has been measured."""

_COST_WEIGHT = 0.1
"""Weight of a new measurement in the average; the first ones of a size have more."""

_GAIN = 0.05
"""Drafts must give this part more tokens a second: to look for them costs time as well."""

_TRIED_ROWS = 4
_TRIED_SHARE = 0.25
"""A step may have so many rows, or such a part, more than the largest that has been measured."""

_LASTING = 64
"""Steps after which the time of one without drafts is measured again, where clients share it."""

_KEPT = 5
"""Times of steps without drafts of which the median counts, so that one off counts for nothing."""

WAIT = 0.25
"""Part of a step by which a client may wait longer for drafts of others."""

_COST_RETURN = 0.001
"""Part of the way back to `RISE` of sizes above a measured one: what was dear is tried again."""


class StepCosts:
    """Seconds of a decode step by its rows: moving averages of those that ran.

    Drafts cost more than rows of sequences: tokens after them are chosen one by one. So a step is
    compared with those of as many rows as it has without drafts that had none.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._measurements: Counter[int] = Counter()
        self._learned = 0
        self._without: dict[int, deque[float]] = {}
        self._last: dict[int, int] = {}

    def learn(self, rows: int, seconds: float, *, drafts: bool = False) -> None:
        """Take a measurement. One far off, as of a machine that stood still, counts little."""
        self._learned += 1
        if not drafts:
            self._without.setdefault(rows, deque(maxlen=_KEPT)).append(seconds)
            self._last[rows] = self._learned
        old = self._seconds.get(rows, 0.0)
        if not old:
            old = float(self._expected(np.array([rows]))[0]) if self._seconds else seconds
        self._measurements[rows] += 1
        weight = max(_COST_WEIGHT, 1 / (1 + self._measurements[rows]))
        now = old + weight * (min(seconds, 2 * old) - old)
        self._seconds[rows] = now
        for size, known in self._seconds.items():
            usual = now * (1 + RISE * max(0, size - rows) / rows)
            if size < rows:
                self._seconds[size] = min(known, usual)
            elif known > usual:
                self._seconds[size] = known + _COST_RETURN * (usual - known)

    def measured(self, rows: int, *, lately: bool = False) -> bool:
        """Return True if a step of `rows` rows without drafts was measured, or was `lately`."""
        last = self._last.get(rows)
        return last is not None and not (lately and self._learned - last >= _LASTING)

    def drafts_tried(self, rows: int) -> int:
        """Return how many drafts a step of `rows` rows may have: few beyond what was measured.

        What more rows cost is learned at the price of a few.
        """
        largest = max(self._seconds, default=rows)
        return max(_TRIED_ROWS, largest + max(_TRIED_ROWS, int(_TRIED_SHARE * largest)) - rows)

    def relative(self, rows: int, more: int) -> NDArray[np.float64]:
        """Return the cost of steps of `rows` and up to `more` drafts, as float64 [more + 1].

        In steps without drafts; never falling.
        """
        asked = np.arange(rows, rows + more + 1)
        if not self._seconds:
            return 1 + RISE * (asked - rows) / rows
        found = np.maximum(self._expected(asked), 1e-9)
        if rows in self._without:
            times = sorted(self._without[rows])
            found[0] = min(found[0], max(times[(len(times) - 1) // 2], 1e-9))
        found = np.maximum.accumulate(found)
        return np.asarray(found / found[0])

    def pays(self, rows: int, chance: float, most: int) -> bool:
        """Return True if up to `most` drafts may pay, each accepted with `chance`."""
        more = np.arange(most + 1)
        gain = (1 + chance * more / rows) / self.relative(rows, most)
        return bool((gain > 1 + _GAIN).any())

    def _expected(self, asked: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return seconds of steps of `asked` rows: between sizes by line, beyond them by `RISE`."""
        known, seconds = np.array(sorted(self._seconds.items())).T
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
        [
            (chance**place, key)
            for key, (chance, count) in acceptance.items()
            for place in range(1, count + 1)
        ],
        reverse=True,
    )[: max(0, room)]
    if not chances:
        return {}
    tokens = np.array(list(accumulate([chance for chance, _ in chances], initial=float(rows))))
    speed = tokens / costs.relative(rows, len(chances))
    best = int(np.argmax(speed))
    return _counted([key for _, key in chances[:best]]) if speed[best] > (1 + _GAIN) * rows else {}


def _counted(keys: Iterable[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for key in keys:
        found[key] = found.get(key, 0) + 1
    return found


def shared_lengths(
    wanted: Sequence[tuple[_C, float, int]],
    rows: Mapping[_C, int],
    costs: StepCosts,
    room: int,
) -> list[int]:
    """Return how many of the drafts that pay a step has, so that no client waits long for others'.

    A step with drafts takes longer. For a client that is made good by what its own drafts are
    expected to give; what is left may be `WAIT` of a step at most, whoever's drafts they are.
    Clients take turns, each with its likeliest draft, until that is reached.

    Args:
        wanted: of each sequence: client, probability that a draft is accepted, number of drafts.
        rows: rows of the step without drafts, by client.
        costs: of steps.
        room: maximum number of drafts of all together.
    """
    if len(rows) == 1 and sum(map(_COUNT, wanted)) <= room:
        return list(map(_COUNT, wanted))
    lines: dict[_C, list[tuple[float, int, int]]] = {}
    for place, (client, chance, count) in enumerate(wanted):
        line = lines.setdefault(client, [])
        line += ((-(chance**draft), draft, place) for draft in range(1, count + 1))
    dealt = sorted(
        (turn, negated, place, client)
        for client, line in lines.items()
        for turn, (negated, _, place) in enumerate(sorted(line))
    )[: max(0, room)]
    if len(rows) > 1:
        gained = np.zeros((len(rows), len(dealt) + 1))
        number = {client: index for index, client in enumerate(rows)}
        for column, (_, negated, _, client) in enumerate(dealt, 1):
            gained[number[client], column] = -negated
        known = np.array(list(rows.values()))[:, np.newaxis]
        gain = 1 + (gained.cumsum(1) / known).min(0)
        cost = costs.relative(int(known.sum()), len(dealt))
        dealt = dealt[: np.flatnonzero(cost <= (1 + WAIT) * gain)[-1]]
    counts = _counted(place for _, _, place, _ in dealt)
    return [counts.get(place, 0) for place in range(len(wanted))]
