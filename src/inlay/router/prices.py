"""Price of a prompt position whose KV page is fetched, in positions to compute."""

import time
from collections.abc import Callable
from typing import NamedTuple

KNOWN_SECONDS = 60.0
"""Seconds after which a measured price is forgotten, so that what was slow is tried again."""
LEAST_POSITIONS = 64
"""Positions from which on the time to a first token is that of the prompt."""
_WEIGHT = 0.3
"""Weight of the last measurement in a moving average."""
_LEAST, _MOST = 0.01, 10.0


class RouterPrice:
    """Moving averages of the seconds that a position takes to be computed, and to be fetched.

    With b bytes a position, r positions computed and B bytes fetched a second it is b * r / B; both
    rates are measured from what is sent and the first token of the answer.

    Args:
        initial: while nothing is measured.
        clock: monotonic seconds.
    """

    def __init__(self, initial: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._initial = initial
        self._clock = clock
        self._computing: _MovingAverages | None = None
        self._fetching: _MovingAverages | None = None
        self._fetched_at = 0.0

    @property
    def value(self) -> float:
        """The price; 1 is that of computing."""
        if self._computing is None or self._fetching is None:
            return self._initial
        if self._clock() - self._fetched_at > KNOWN_SECONDS:
            return self._initial
        return min(max(self._fetching.seconds / self._computing.seconds, _LEAST), _MOST)

    def computed(self, positions: int, seconds: float) -> None:
        """A worker with nothing else to compute took so long for positions it had to compute."""
        if positions >= LEAST_POSITIONS:
            self._computing = _MovingAverages.after(self._computing, positions, seconds)

    def fetched(self, positions: int, seconds: float, computed: int = 0) -> None:
        """The same for positions that it fetched, or might have, and some that it computed."""
        if positions < max(LEAST_POSITIONS, 2 * computed):
            return
        if computed:
            if self._computing is None:
                return
            seconds = max(seconds - computed * self._computing.seconds, 0.0)
        if self._clock() - self._fetched_at > KNOWN_SECONDS:
            self._fetching = None
        self._fetching = _MovingAverages.after(self._fetching, positions, seconds)
        self._fetched_at = self._clock()


class _MovingAverages(NamedTuple):
    """Moving averages of positions and of what they took: what is short counts for less."""

    average_positions: float
    average_seconds: float

    @classmethod
    def after(
        cls, before: "_MovingAverages | None", positions: int, seconds: float
    ) -> "_MovingAverages":
        if before is None:
            return cls(positions, seconds)
        return cls(
            before.average_positions + _WEIGHT * (positions - before.average_positions),
            before.average_seconds + _WEIGHT * (seconds - before.average_seconds),
        )

    @property
    def seconds(self) -> float:
        """Of a position."""
        return self.average_seconds / self.average_positions
