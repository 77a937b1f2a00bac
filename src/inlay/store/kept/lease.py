"""Records that one frontend owns, changed by compare-and-set under a lease.

The lease is judged by revisions: its holder renews it every `RENEW_SECONDS`, and whoever has seen
one revision for `SILENT_SECONDS` of its own running time may take it. Nobody compares clocks.
A holder that was taken for dead loses its next compare-and-set, and stops.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Generic, Protocol, Self, TypeVar

import msgspec

from inlay.store.shared import Storage

RENEW_SECONDS = 5.0
SILENT_SECONDS = 15.0

replace = msgspec.structs.replace
_encode = msgspec.msgpack.Encoder().encode


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """Holder of a record: nobody where `holder` is empty. Each taking counts `epoch` up."""

    holder: str = ""
    epoch: int = 0


class Leased(Protocol):
    """A record with a lease, a frozen `msgspec.Struct`."""

    @property
    def lease(self) -> Lease: ...


R = TypeVar("R", bound=Leased)


class LeaseLostError(Exception):
    """Another frontend has the record, or it was deleted."""


class Held(Generic[R]):
    """A record, as its owner sees and changes it.

    Attributes:
        key: of the record.
        record: as it was last read or written.
    """

    def __init__(
        self,
        storage: Storage,
        key: str,
        revision: int,
        record: R,
        decode: Callable[[str, bytes], R | None],
    ) -> None:
        """Use `take`; `decode` returns None for a record of another kind."""
        self._storage = storage
        self._revision = revision
        self._decode = decode
        self._lock = asyncio.Lock()
        self.key = key
        self.record = record

    @classmethod
    async def take(
        cls,
        storage: Storage,
        key: str,
        revision: int,
        record: R,
        holder: str,
        decode: Callable[[str, bytes], R | None],
    ) -> Self | None:
        """Take a record that nobody holds any more; None if another was first.

        Raises `OverloadedError`.
        """
        mine = with_lease(record, Lease(holder, record.lease.epoch + 1))
        if not await storage.swap(key, _encode(mine), revision):
            return None
        revision, kept = await storage.find(key)
        found = None if kept is None else decode(key, kept)
        if found is None or found.lease != mine.lease:
            return None
        return cls(storage, key, revision, found, decode)

    async def change(self, change: Callable[[R], R]) -> R:
        """Change the record, on top of what others have changed in it; return it.

        `change` may be called again, with a record that has its change already: an answer of the
        storage may have been lost.

        Raises:
            LeaseLostError: it is not ours any more; nothing was changed.
            OverloadedError: the storage does not answer; whether it was changed is not known.
        """
        async with self._lock:
            while True:
                changed = change(self.record)
                if changed == self.record:
                    return changed
                if await self._storage.swap(self.key, _encode(changed), self._revision):
                    # Others may have changed it since; a replica may not know of the change yet.
                    revision, found = await self._look(changed.lease)
                    if revision > self._revision:
                        self._revision, self.record = revision, found
                    else:
                        self.record = changed
                    return self.record
                self._revision, self.record = await self._look(self.record.lease)

    async def look(self) -> R:
        """Return the record as it is now. Raises as `change`."""
        async with self._lock:
            revision, found = await self._look(self.record.lease)
            if revision > self._revision:
                self._revision, self.record = revision, found
            return self.record

    async def _look(self, lease: Lease) -> tuple[int, R]:
        revision, kept = await self._storage.find(self.key)
        found = None if kept is None else self._decode(self.key, kept)
        if found is None or found.lease != lease:
            raise LeaseLostError
        return revision, found


def with_lease(record: R, lease: Lease) -> R:
    """Return a record with another lease."""
    struct: Any = record
    changed: R = replace(struct, lease=lease)
    return changed
