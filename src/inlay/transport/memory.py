"""Memory for large messages on their way in, bounded in bytes."""

import asyncio
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

from inlay.base.blocks import BlockPool
from inlay.transport.local.arena import Arena

_Granted: TypeAlias = Callable[[list[memoryview]], None]
_Allocate: TypeAlias = Callable[[int, int], memoryview | None]

CREDIT_SHARE = 1 / 8
"""Of the limit, at most, for what peers may send without being granted it first."""


def _allocate_none(part: int, num_bytes: int) -> None:
    return None


class ReceiveMemory:
    """Memory that peers' messages are received into; those that find no room wait in order.

    For one event loop; memory may be freed by any thread.

    Args:
        limit: bytes that may be in use at a time, those of messages that are still read included.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[Sequence[int], _Granted, _Allocate]] = deque()
        self._arenas: weakref.WeakSet[Arena] = weakref.WeakSet()
        self._blocks = BlockPool()
        self._credit = 0
        self._creditors: set[Callable[[], None]] = set()

    def set_aside(self, num_bytes: int, revoke: Callable[[], None]) -> bool:
        """Count memory as used by what a peer may send without being granted it first.

        Args:
            num_bytes: of it.
            revoke: called when others wait for memory, to have the peer return its credit.

        Returns:
            False, and nothing is counted, where there is none to spare.
        """
        most = min(self.limit - self.used, int(self.limit * CREDIT_SHARE) - self._credit)
        if self._waiting or num_bytes > most:
            return False
        self._credit += num_bytes
        self.used += num_bytes
        self._creditors.add(revoke)
        return True

    def spend(self, sizes: Sequence[int]) -> list[memoryview]:
        """Return memory of these sizes, which was set aside."""
        self._credit -= sum(sizes)
        self.used -= sum(sizes)
        return [self._take(part, size, _allocate_none) for part, size in enumerate(sizes)]

    def give_back(self, num_bytes: int, revoke: Callable[[], None]) -> None:
        """Return what is left of what was set aside, and forget `revoke`."""
        self._creditors.discard(revoke)
        self._credit -= num_bytes
        self._give_back(num_bytes)

    def may_share(self, num_bytes: int) -> bool:
        """Return True if another arena of this size may be added: all have the limit at most."""
        return sum(arena.size for arena in self._arenas) + num_bytes <= self.limit

    def add(self, arena: Arena) -> None:
        """Count an arena that messages are received into, for as long as it lives."""
        self._arenas.add(arena)

    def take(
        self, num_bytes: int, allocate: Callable[[int], memoryview | None]
    ) -> memoryview | None:
        """Return memory that `allocate` gives; None where too much is in use, or others wait."""
        if self._waiting or self.used + num_bytes > self.limit:
            return None
        view = allocate(num_bytes)
        return None if view is None else self._counted(view)

    def request(
        self, sizes: Sequence[int], granted: _Granted, allocate: _Allocate = _allocate_none
    ) -> Callable[[], None]:
        """Have `granted` called, now or later, with memory of these sizes.

        Args:
            sizes: in bytes, of the parts of a message.
            granted: takes memory for each.
            allocate: gives memory shared with another process for a part, by its number and size,
                or None where that has no room.

        Returns what withdraws the request.

        Raises:
            ValueError: more than there is in all.
        """
        if sum(sizes) > self.limit:
            raise ValueError(f"a message of {sum(sizes)} bytes; at most {self.limit} are taken")
        request = (sizes, granted, allocate)
        self._waiting.append(request)
        self._grant_waiting()
        if self._waiting:
            for revoke in tuple(self._creditors):
                revoke()

        def withdraw() -> None:
            if request in self._waiting:
                self._waiting.remove(request)
                self._grant_waiting()

        return withdraw

    def _grant_waiting(self) -> None:
        while self._waiting and self.used + sum(self._waiting[0][0]) <= self.limit:
            sizes, granted, allocate = self._waiting.popleft()
            granted([self._take(part, size, allocate) for part, size in enumerate(sizes)])

    def _take(self, part: int, size: int, allocate: _Allocate) -> memoryview:
        view = allocate(part, size) if size else None
        return self._counted(self._blocks.take(size).data if view is None else view)

    def _counted(self, view: memoryview) -> memoryview:
        self.used += len(view)
        weakref.finalize(view.obj, self._freed, len(view)).atexit = False
        return view

    def _freed(self, size: int) -> None:
        # Memory may be freed by any thread, and in the middle of anything.
        with suppress(RuntimeError):  # The event loop has ended, and this with it.
            self._loop.call_soon_threadsafe(self._give_back, size)

    def _give_back(self, size: int) -> None:
        self.used -= size
        self._grant_waiting()
