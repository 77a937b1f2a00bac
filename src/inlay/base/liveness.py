"""Clock for judging the silence of others: seconds in which this process itself ran.

A process that stood still (a paused machine, a host without memory, a container over its share of
CPU) finds afterwards that all others were silent, as none could reach it and most stood still with
it. So the silence of another process is measured here: time in which the own event loop did not run
does not count, and what lies in sockets is read before the limit can be reached.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

TICK_SECONDS = 0.25
MOST_SECONDS = 0.5
"""Seconds that one tick counts at most: in a later one the event loop did not run meanwhile."""
_REMEMBERED = 256


class LivenessClock:
    """Counts the seconds in which the running event loop ran.

    One an event loop: `clock` gives it.
    """

    def __init__(self) -> None:
        self._ticked = _time()
        self._counted = self._ticked
        self._stalls: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)
        self._schedule()

    def _schedule(self) -> None:
        asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        now = _time()
        passed = now - self._ticked
        self._counted += min(passed, MOST_SECONDS)
        if passed > MOST_SECONDS:
            self._stalls.append((now, passed - MOST_SECONDS))
        self._ticked = now
        self._schedule()

    def now(self) -> float:
        """Seconds, monotonic; a difference of two is how long the event loop ran between them."""
        return self._counted + min(_time() - self._ticked, MOST_SECONDS)

    def lost(self, seconds: float) -> float:
        """Of the last `seconds`, how many the event loop did not run."""
        now = _time()
        still = max(0.0, now - self._ticked - MOST_SECONDS)
        found = still + sum(lost for at, lost in self._stalls if now - at < seconds)
        return min(found, seconds)


_clocks: "WeakKeyDictionary[asyncio.AbstractEventLoop, LivenessClock]" = WeakKeyDictionary()


def clock() -> LivenessClock:
    """The running event loop's clock, which begins to count with the first call."""
    loop = asyncio.get_running_loop()
    found = _clocks.get(loop)
    if found is None:
        found = _clocks[loop] = LivenessClock()
    return found


def now() -> float:
    """`LivenessClock.now` of the running event loop's clock."""
    return clock().now()


class Timer:
    """Calls `act` once, after `seconds` in which the running event loop ran."""

    def __init__(self, seconds: float, act: Callable[[], object]) -> None:
        self._act = act
        self._clock = clock()
        self._ends = self._clock.now() + seconds
        self._arm(seconds)

    def _arm(self, seconds: float) -> None:
        self._handle = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        left = self._ends - self._clock.now()
        if left > 0:
            self._arm(left)
        else:
            self._act()

    def reset(self, seconds: float) -> None:
        """Call it `seconds` from now instead; not after it was called or cancelled."""
        sooner = self._clock.now() + seconds < self._ends
        self._ends = self._clock.now() + seconds
        if sooner:
            self._handle.cancel()
            self._arm(max(0.0, seconds))

    def cancel(self) -> None:
        """Do not call it."""
        self._handle.cancel()


@asynccontextmanager
async def timeout(seconds: float) -> AsyncIterator[Timer]:
    """End the block with `TimeoutError` after `seconds` in which the event loop ran.

    Otherwise as `asyncio.timeout`.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        timer = Timer(seconds, lambda: limit.reschedule(loop.time()))
        try:
            yield timer
        finally:
            timer.cancel()


def _time() -> float:
    return asyncio.get_running_loop().time()
