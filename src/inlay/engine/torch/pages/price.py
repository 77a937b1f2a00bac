"""Price of pages: they are fetched where that takes less time than computing them."""

from collections.abc import Callable

from inlay.base import liveness
from inlay.base.address import Address

PATIENCE_SECONDS = 10.0
"""Seconds that a fetch may take whose price is not known."""
LEAST_SECONDS = 0.5
"""Seconds that any fetch may take which was worth to begin."""
KNOWN_SECONDS = 60.0
"""Seconds after which a source that was slow is tried again."""
_LEAST_POSITIONS = 64
"""Positions of a step from which on its time is that of a prompt."""
_WEIGHT = 0.3
"""Weight of the last measurement in a moving average."""


class WorkerPrice:
    """Measures how fast prompts are computed here, and how fast each source gives pages.

    Sources are peers by their addresses, and tiers by their names. With b bytes a position, B bytes
    a second from a source and r positions a second here, a fetch
    is worth it where B > b * r.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = liveness.now) -> None:
        self._clock = clock
        self._positions_per_second: float | None = None
        self._bytes_per_second: dict[Address | str, tuple[float, float]] = {}

    def computed(self, positions: int, seconds: float) -> None:
        """Record a step that computed so many positions. In any thread."""
        if positions >= _LEAST_POSITIONS and seconds > 0:
            rate, before = positions / seconds, self._positions_per_second
            self._positions_per_second = (
                rate if before is None else before + _WEIGHT * (rate - before)
            )

    def fetched(self, source: Address | str, num_bytes: int, seconds: float) -> None:
        """Record the bytes of a fetch that gave some, or that took too long."""
        rate = num_bytes / max(seconds, 1e-6)
        before, _ = self._bytes_per_second.get(source, (rate, 0.0))
        now = self._clock()
        self._bytes_per_second = {
            other: known
            for other, known in self._bytes_per_second.items()
            if now - known[1] < KNOWN_SECONDS
        } | {source: (before + _WEIGHT * (rate - before), now)}

    def is_worth(self, source: Address | str, positions: int, num_bytes: int) -> bool:
        """True if a source is expected to give pages in less time than they take to be computed.

        What was not measured yet, or long ago, is tried.
        """
        known, computing = self._bytes_per_second.get(source), self._computing(positions)
        if known is None or computing is None or self._clock() - known[1] >= KNOWN_SECONDS:
            return True
        return num_bytes < computing * known[0]

    def of(self, source: Address | str, positions: int, num_bytes: int) -> float | None:
        """Return the seconds that a source takes for pages, in those that computing takes.

        None where either is not known.
        """
        known, computing = self._bytes_per_second.get(source), self._computing(positions)
        if known is None or not computing:
            return None
        return num_bytes / max(known[0], 1e-6) / computing

    def timeout_for(self, positions: int, deadline: float | None) -> float:
        """Return the seconds a fetch may take: what computing takes, and half of what is left."""
        computing = self._computing(positions)
        most = PATIENCE_SECONDS if computing is None else computing
        most = min(PATIENCE_SECONDS, max(LEAST_SECONDS, most))
        return most if deadline is None else min(most, deadline / 2)

    def _computing(self, positions: int) -> float | None:
        rate = self._positions_per_second
        return None if rate is None else positions / rate
