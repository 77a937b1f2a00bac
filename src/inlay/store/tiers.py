"""The tiers of one process: where an entry's content goes, and how it comes back to memory."""

import threading

import numpy as np

from inlay.messages.prompt import Buffer
from inlay.store.disk import DiskTier
from inlay.store.entry import PAGE, Entry, cost
from inlay.store.index import StoreIndex


class StoreTiers:
    """Memory, and behind it the disk if there is one.

    Args:
        ledger: the index of the entries.
        disk: the files, or None.
        lock: guards the index; never held during IO.
    """

    __slots__ = ("_disk", "_index", "_lock")

    def __init__(self, ledger: StoreIndex, disk: DiskTier | None, lock: threading.Lock) -> None:
        self._index = ledger
        self._disk = disk
        self._lock = lock

    def admit(self, entry: Entry, data: Buffer, adopt: bool) -> None:
        """Bring a new entry into memory, or if that has no room to disk.

        Args:
            entry: admitted by the index, not yet in it.
            data: its content.
            adopt: `data` will never change, and need not be copied where it fills its memory.

        Raises:
            OverloadedError: there is no room.
        """
        size = cost(len(data))
        if self._make_room(size):
            try:
                own = data if adopt and _fills_its_memory(data) else _copy(data)
            except BaseException:
                with self._lock:
                    self._index.release(size)
                raise
            with self._lock:
                self._index.hold(entry, own)
                self._index.add(entry)
            if self._disk is not None:
                self._disk.save_later(entry)
        elif self._disk is not None and self._disk.save(entry, data):
            with self._lock:
                self._index.add(entry)
        else:
            raise self._index.full(len(data))

    def _make_room(self, num_bytes: int) -> bool:
        """Reserve memory, saving or evicting what stands in the way.

        False when pinned entries do.
        """
        if num_bytes > self._index.limits.memory_bytes:
            return False
        while True:
            with self._lock:
                if self._index.reserve(num_bytes):
                    return True
                unsaved = None if self._disk is None else self._index.oldest_unsaved()
                if unsaved is None and not self._index.evict_unsaved(num_bytes):
                    return False
            if self._disk is not None and unsaved is not None:
                self._disk.save(unsaved)

    def load(self, entry: Entry) -> Buffer | None:
        """Read a content back, into memory where it has room without evicting anyone.

        Returns:
            None where no file has it.

        Raises:
            OverloadedError: its file cannot be read now.
        """
        size = cost(entry.description.num_bytes)
        with self._lock:
            reserved = self._index.reserve(size, sparing=entry)
        data = None
        try:
            data = None if self._disk is None else self._disk.load(entry)
        finally:
            with self._lock:
                if reserved and (data is None or entry.gone or entry.data is not None):
                    self._index.release(size)
                elif reserved and data is not None:
                    self._index.hold(entry, data)
        return data


def _fills_its_memory(data: Buffer) -> bool:
    """True if keeping `data` keeps no more than a page alive beyond it."""
    return memoryview(data.view.obj).nbytes - len(data) <= PAGE


def _copy(data: Buffer) -> Buffer:
    """`data` in memory of its own; numpy copies without the interpreter's lock."""
    return Buffer(np.frombuffer(data.view, np.uint8).copy().data)
