"""Rate limit of one client: a token bucket."""

from collections.abc import Callable


class TokenBucket:
    """Token bucket that fills at `rate` tokens a minute and holds one minute's tokens.

    A request takes one token. After a minute without requests, a client may send `rate` requests
    at once, and `rate` a minute from then on.

    Args:
        rate: tokens a minute, more than 0.
        clock: monotonic seconds.
    """

    __slots__ = ("_clock", "_level", "_seen", "rate")

    def __init__(self, rate: float, clock: Callable[[], float]) -> None:
        self.rate = rate
        self._clock = clock
        self._level = self.capacity
        self._seen = clock()

    @property
    def capacity(self) -> float:
        """Maximum number of tokens: at least one, or no request could ever be made."""
        return max(1.0, self.rate)

    @property
    def full(self) -> bool:
        """True if it is full, as a new bucket is."""
        self._fill()
        return self._level >= self.capacity

    def set_rate(self, rate: float) -> None:
        """Change the rate."""
        self._fill()
        self.rate = rate
        self._level = min(self._level, self.capacity)

    def take(self) -> float:
        """Take a token. Return 0, or the seconds until there will be one."""
        self._fill()
        # Tolerance for rounding: a client that waits exactly `Retry-After` is admitted.
        if self._level >= 1.0 - 1e-9:
            self._level = max(0.0, self._level - 1.0)
            return 0.0
        return (1.0 - self._level) * 60.0 / self.rate

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(self.capacity, self._level + (now - self._seen) * self.rate / 60.0)
        self._seen = now
