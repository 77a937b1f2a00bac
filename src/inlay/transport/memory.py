"""Memory for large messages on their way in, bounded in bytes."""

import asyncio
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np


class ReceiveMemory:
    """Memory that peers' messages are received into; those that find no room wait in order.

    For one event loop; memory may be freed by any thread.

    Args:
        limit: bytes that may be in use at a time, those of messages that are still read included.
        allocate: gives memory shared with another process, or None where that has no room.
    """

    def __init__(
        self, limit: int, allocate: Callable[[int], memoryview | None] = lambda num_bytes: None
    ) -> None:
        self.limit = limit
        self.used = 0
        self._allocate = allocate
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[Sequence[int], Callable[[list[memoryview]], None]]] = deque()

    def request(
        self, sizes: Sequence[int], granted: Callable[[list[memoryview]], None]
    ) -> Callable[[], None]:
        """Have `granted` called, now or later, with memory of these sizes.

        Returns what withdraws the request.

        Raises:
            ValueError: more than there is in all.
        """
        if sum(sizes) > self.limit:
            raise ValueError(f"a message of {sum(sizes)} bytes; at most {self.limit} are taken")
        request = (sizes, granted)
        self._waiting.append(request)
        self._grant_waiting()

        def withdraw() -> None:
            if request in self._waiting:
                self._waiting.remove(request)
                self._grant_waiting()

        return withdraw

    def _grant_waiting(self) -> None:
        while self._waiting and self.used + sum(self._waiting[0][0]) <= self.limit:
            sizes, granted = self._waiting.popleft()
            granted([self._take(size) for size in sizes])

    def _take(self, size: int) -> memoryview:
        view = self._allocate(size) if size else None
        if view is None:
            view = np.empty(size, np.uint8).data
        self.used += size
        weakref.finalize(view.obj, self._freed, size).atexit = False
        return view

    def _freed(self, size: int) -> None:
        # Memory may be freed by any thread, and in the middle of anything.
        with suppress(RuntimeError):  # The event loop has ended, and this with it.
            self._loop.call_soon_threadsafe(self._give_back, size)

    def _give_back(self, size: int) -> None:
        self.used -= size
        self._grant_waiting()
