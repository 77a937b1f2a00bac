"""A batch that one frontend owns: its record, changed by compare-and-set under a lease.

The lease is judged by revisions: its holder renews it every `RENEW_SECONDS`, and whoever has seen
one revision for `SILENT_SECONDS` of its own running time may take it. Nobody compares clocks.
A holder that was taken for dead loses its next compare-and-set, and stops.
"""

import asyncio
from collections.abc import Callable
from typing import Self

import msgspec

from inlay.store.shared import Storage
from inlay_batches.records import BatchRecord, Lease, decode, encode

RENEW_SECONDS = 5.0
SILENT_SECONDS = 15.0

replace = msgspec.structs.replace


class LeaseLostError(Exception):
    """Another frontend has the batch, or it was deleted."""


class HeldBatch:
    """The record of a batch, as its owner sees and changes it.

    Attributes:
        key: of the record.
        record: as it was last read or written.
    """

    def __init__(self, storage: Storage, key: str, revision: int, record: BatchRecord) -> None:
        self._storage = storage
        self._revision = revision
        self._lock = asyncio.Lock()
        self.key = key
        self.record = record

    @classmethod
    async def take(
        cls, storage: Storage, key: str, revision: int, record: BatchRecord, holder: str
    ) -> Self | None:
        """Take a batch that nobody holds any more; None if another was first.

        Raises `OverloadedError`.
        """
        mine = replace(record, lease=Lease(holder, record.lease.epoch + 1))
        if not await storage.swap(key, encode(mine), revision):
            return None
        revision, kept = await storage.find(key)
        found = None if kept is None else decode(key, kept)
        if not isinstance(found, BatchRecord) or found.lease != mine.lease:
            return None
        return cls(storage, key, revision, found)

    async def change(self, change: Callable[[BatchRecord], BatchRecord]) -> BatchRecord:
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
                if await self._storage.swap(self.key, encode(changed), self._revision):
                    # Others may have changed it since; a replica may not know of the change yet.
                    revision, found = await self._look(changed.lease)
                    if revision > self._revision:
                        self._revision, self.record = revision, found
                    else:
                        self.record = changed
                    return self.record
                self._revision, self.record = await self._look(self.record.lease)

    async def _look(self, lease: Lease) -> tuple[int, BatchRecord]:
        revision, kept = await self._storage.find(self.key)
        found = None if kept is None else decode(self.key, kept)
        if not isinstance(found, BatchRecord) or found.lease != lease:
            raise LeaseLostError
        return revision, found
