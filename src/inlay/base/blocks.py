"""Large blocks of memory that are used again.

The system clears the pages of new memory when they are first written, which takes about as long as
a copy of them.
"""

import asyncio
import threading
import weakref
from contextlib import suppress
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

KEPT_BYTES = 64 * 1024 * 1024
"""Bytes that a pool keeps at most."""
KEPT_SECONDS = 5.0
"""Seconds after which an unused block is given back, or twice as many."""
MIN_BYTES = 512 * 1024
"""Bytes of a block, at least: smaller ones are the allocator's."""

_Bytes: TypeAlias = npt.NDArray[np.uint8]


class BlockPool:
    """Gives memory, and keeps for a while what is freed. Made in an event loop.

    Args:
        max_bytes: kept at most.
    """

    def __init__(self, max_bytes: int = KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._kept: list[tuple[_Bytes, int]] = []
        self._age = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def kept_bytes(self) -> int:
        """Bytes of the blocks that nobody uses."""
        with self._lock:
            return sum(len(block) for block, _ in self._kept)

    def take(self, num_bytes: int) -> _Bytes:
        """Return memory with any content, uint8 [num_bytes]. In any thread.

        It is used again once neither the array nor a view of it is left.
        """
        if num_bytes < MIN_BYTES:
            return np.empty(num_bytes, np.uint8)
        block = self._fitting(num_bytes)
        if block is None:
            # Of numpy, which asks for huge pages of memory: fewer come when it is written.
            block = np.empty(num_bytes, np.uint8)
        # Not of the array itself: a view of a view would hold that, and not this one.
        array = np.frombuffer(block.data, np.uint8, num_bytes)
        weakref.finalize(array, self._freed, block).atexit = False
        return array

    def _fitting(self, num_bytes: int) -> _Bytes | None:
        with self._lock:
            # What was used last is the likelier one to be in a cache.
            for index in reversed(range(len(self._kept))):
                if num_bytes <= len(self._kept[index][0]) <= num_bytes + num_bytes // 4:
                    return self._kept.pop(index)[0]
        return None

    def _freed(self, block: _Bytes) -> None:
        # By any thread, and in the middle of anything.
        with suppress(RuntimeError):  # The event loop has ended, and this with it.
            self._loop.call_soon_threadsafe(self._keep, block)

    def _keep(self, block: _Bytes) -> None:
        with self._lock:
            self._kept.append((block, self._age))
            kept = sum(len(each) for each, _ in self._kept)
            while kept > self._max_bytes:
                kept -= len(self._kept.pop(0)[0])
        if self._timer is None:
            self._timer = self._loop.call_later(KEPT_SECONDS, self._tick)

    def _tick(self) -> None:
        with self._lock:
            self._kept = [pair for pair in self._kept if pair[1] == self._age]
            self._age += 1
            left = bool(self._kept)
        self._timer = self._loop.call_later(KEPT_SECONDS, self._tick) if left else None
