"""Number of background requests that a pool runs beside others.

While nobody else is served it is all there is room for. Beside others it begins at one, grows by
one each second, and is halved in a second in which others waited longer than `MOST_SLOWER` times
what they wait without background work: for their first token, or for the next one (additive
increase, multiplicative decrease; Chiu and Jain, "Analysis of the increase and decrease algorithms
for congestion avoidance in computer networks", 1989). The times without background work are those
of seconds in which at most one such request ran; they are learned again whenever that is so.
"""

import time
from collections.abc import Callable
from statistics import fmean, median

MOST_SLOWER = 1.2
SECONDS = 1.0
"""Seconds between two changes of the number."""

_LEAST = 3
"""First tokens in a second from which their median says something."""
_SAMPLES = 512
_LEARNED = 0.3
"""Weight of a new time without background work in the mean of them."""


class BackgroundWindow:
    """Window of one pool, for the requests of this frontend.

    Args:
        clock: monotonic seconds.

    Attributes:
        size: background requests that may run beside others.
        running: background requests that run.
        active: there was background work, so what others wait is noted from then on.
    """

    __slots__ = (
        "_clock", "_first", "_firsts", "_gap", "_gaps", "_most", "_since", "_used_at", "active",
        "running", "size",
    )  # fmt: skip

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.size = 1
        self.running = 0
        self.active = False
        self._clock = clock
        self._since = clock()
        self._used_at = float("-inf")
        self._most = 0
        self._firsts: list[float] = []
        self._gaps: list[float] = []
        self._first: float | None = None
        self._gap: float | None = None

    def admits(self, count: int, others: int, places: int) -> bool:
        """Return True if so many more may run.

        Args:
            count: of them; they run together or not at all.
            others: requests of this frontend that run and are not background.
            places: requests that the pool can run.
        """
        now = self._clock()
        self.active = True
        self._change(now, places)
        if others:
            self._used_at = now
        idle = not others and now - self._used_at >= SECONDS
        return not self.running or self.running + count <= (places if idle else self.size)

    def began(self) -> None:
        """Count a background request that begins."""
        self.running += 1
        self._most = max(self._most, self.running)

    def ended(self) -> None:
        """Count one that has ended."""
        self.running -= 1

    def waited(self, seconds: float, *, first: bool) -> None:
        """Note how long another request waited for a token."""
        self._used_at = self._clock()
        samples = self._firsts if first else self._gaps
        if len(samples) < _SAMPLES:
            samples.append(seconds)

    def _change(self, now: float, places: int) -> None:
        if now - self._since < SECONDS:
            return
        first = median(self._firsts) if len(self._firsts) >= _LEAST else None
        gap = fmean(self._gaps) if self._gaps else None
        if self._most <= 1:
            self._first, self._gap = _learned(self._first, first), _learned(self._gap, gap)
        if first is not None or gap is not None:
            if _slower(first, self._first) or _slower(gap, self._gap):
                self.size = max(1, self.size // 2)
            else:
                self.size = min(self.size + 1, max(1, places))
        self._since = now
        self._most = self.running
        self._firsts.clear()
        self._gaps.clear()


def _learned(before: float | None, new: float | None) -> float | None:
    if before is None or new is None:
        return before if new is None else new
    return before + _LEARNED * (new - before)


def _slower(now: float | None, without: float | None) -> bool:
    return now is not None and without is not None and now > MOST_SLOWER * without
