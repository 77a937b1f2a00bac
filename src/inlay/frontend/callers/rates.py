"""How often one may ask: a token bucket."""

from collections.abc import Callable


class TokenBucket:
    """Fills evenly, `rate` tokens a minute, and holds one minute's worth at most.

    A request takes one.

    Whoever has been quiet for a minute may ask `rate` times at once, and `rate` times a minute from
    then on.

    Args:
        rate: tokens a minute, more than 0.
        clock: seconds that only grow.
    """

    __slots__ = ("_clock", "_level", "_seen", "rate")

    def __init__(self, rate: float, clock: Callable[[], float]) -> None:
        self.rate = rate
        self._clock = clock
        self._level = self.capacity
        self._seen = clock()

    @property
    def capacity(self) -> float:
        """Tokens at most: at least one, or no request could ever be made."""
        return max(1.0, self.rate)

    @property
    def full(self) -> bool:
        """Whether it is as a new one would be."""
        self._fill()
        return self._level >= self.capacity

    def set_rate(self, rate: float) -> None:
        """Fill at another rate from now on."""
        self._fill()
        self.rate = rate
        self._level = min(self._level, self.capacity)

    def take(self) -> float:
        """Take a token: 0 when there was one, else the seconds until there will be."""
        self._fill()
        # A client told to come back in 3 s is let in after 3 s, whatever rounding has lost.
        if self._level >= 1.0 - 1e-9:
            self._level = max(0.0, self._level - 1.0)
            return 0.0
        return (1.0 - self._level) * 60.0 / self.rate

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(self.capacity, self._level + (now - self._seen) * self.rate / 60.0)
        self._seen = now
