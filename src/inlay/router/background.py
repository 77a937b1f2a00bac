"""Number of background requests that a pool runs beside others.

While nobody else is served it is all there is room for. Beside others it begins at one, grows by
one each second, and is halved in a second in which others waited longer than `MOST_SLOWER` times
what they wait without background work: for their first token, or for the next one (additive
increase, multiplicative decrease; Chiu and Jain, "Analysis of the increase and decrease algorithms
for congestion avoidance in computer networks", 1989). The times without background work are those
in which at most one such request ran; they are learned again whenever that is so. Until they are
known it is one, whatever ran when others came.
"""

import time
from collections.abc import Callable
from math import inf
from statistics import fmean, median

MOST_SLOWER = 1.2
SECONDS = 1.0
"""Seconds between two changes of the number."""

_LEAST = 3
"""First tokens from whose median something is seen; a client alone may take seconds for them."""
_SAMPLES = 512
_LEARNED = 0.3
"""Weight of a new time without background work in the mean of them."""


class _Waits:
    """Waits of others for a token.

    Attributes:
        least: samples that are judged together.
        samples: seconds, those that are not judged yet.
        most: background requests that ran meanwhile.
        without: seconds without background work; None while unknown.
    """

    __slots__ = ("least", "mean", "most", "samples", "without")

    def __init__(self, mean: Callable[[list[float]], float], least: int) -> None:
        self.mean = mean
        self.least = least
        self.samples: list[float] = []
        self.most = 0
        self.without: float | None = None

    def judged(self, running: int) -> float | None:
        """Return how many times as long others wait; infinity if unknown, None without samples."""
        if len(self.samples) < self.least:
            return None
        found = self.mean(self.samples)
        if self.most <= 1:
            before = found if self.without is None else self.without
            self.without = before + _LEARNED * (found - before)
        self.samples.clear()
        self.most = running
        # A clock may say that nobody waited.
        return inf if self.without is None else found / max(self.without, 1e-9)


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
        "_clock", "_firsts", "_gaps", "_since", "_used_at", "active", "running", "size",
    )  # fmt: skip

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.size = 1
        self.running = 0
        self.active = False
        self._clock = clock
        self._since = clock()
        self._used_at = float("-inf")
        self._firsts = _Waits(median, _LEAST)
        self._gaps = _Waits(fmean, 1)

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
        for waits in (self._firsts, self._gaps):
            waits.most = max(waits.most, self.running)

    def ended(self) -> None:
        """Count one that has ended."""
        self.running -= 1

    def waited(self, seconds: float, *, first: bool) -> None:
        """Note how long another request waited for a token."""
        self._used_at = self._clock()
        samples = (self._firsts if first else self._gaps).samples
        if len(samples) < _SAMPLES:
            samples.append(seconds)

    def _change(self, now: float, places: int) -> None:
        if now - self._since < SECONDS:
            return
        self._since = now
        found = [waits.judged(self.running) for waits in (self._firsts, self._gaps)]
        slower = max((times for times in found if times is not None), default=None)
        if slower is None:
            return
        if slower == inf:
            self.size = 1
        elif slower > MOST_SLOWER:
            self.size = max(1, self.size // 2)
        else:
            self.size = min(self.size + 1, max(1, places))
