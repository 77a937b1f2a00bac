"""Memory that two processes share: one end places buffers in it, the other views them in place."""

import mmap
import os
import tempfile
from bisect import insort

from inlay.prompt import Buffer

ALIGNMENT = 4096


class Arena:
    """A fixed stretch of shared memory and the free parts of it.

    Only the end that created it places and frees. The memory is anonymous: it is gone when both ends are, however they
    end. Pages are taken from the system when first written and stay with the arena, so a repeated large prompt does not pay
    for page faults again.

    Attributes:
        size: bytes in all.
        fd: file descriptor for the other process to inherit.
    """

    def __init__(self, size: int, fd: int | None = None) -> None:
        """Create an arena of `size` bytes, or with `fd` map the one another process created."""
        self.size = size
        created = fd is None
        self.fd = _anonymous_file(size) if fd is None else fd
        self._map = mmap.mmap(self.fd, size, access=mmap.ACCESS_WRITE if created else mmap.ACCESS_READ)
        self._view = memoryview(self._map)
        self._free: list[tuple[int, int]] = [(0, size)]
        self._placed: dict[int, tuple[Buffer, int, int, int]] = {}
        self._owner: dict[int, int] = {}

    def place(self, buffer: Buffer) -> int | None:
        """Put `buffer` into the arena and return its offset, or None when there is no room.

        A buffer (the same object) that is already there is not copied again: each `place` needs its own `free`.
        """
        known = self._placed.get(id(buffer))
        if known is not None:
            _, offset, length, holders = known
            self._placed[id(buffer)] = (buffer, offset, length, holders + 1)
            return offset
        length = -(-len(buffer) // ALIGNMENT) * ALIGNMENT
        index = next((i for i, (_, room) in enumerate(self._free) if room >= length), None)
        if index is None:
            return None
        offset, room = self._free.pop(index)
        if room > length:
            self._free.insert(index, (offset + length, room - length))
        self._view[offset : offset + len(buffer)] = buffer.view
        self._placed[id(buffer)] = (buffer, offset, length, 1)
        self._owner[offset] = id(buffer)
        return offset

    def free(self, offset: int) -> None:
        """Give back one holder's claim on what `place` put at `offset`."""
        key = self._owner[offset]
        buffer, _, length, holders = self._placed[key]
        if holders > 1:
            self._placed[key] = (buffer, offset, length, holders - 1)
            return
        del self._placed[key], self._owner[offset]
        insort(self._free, (offset, length))
        self._merge()

    def _merge(self) -> None:
        merged: list[tuple[int, int]] = []
        for offset, length in self._free:
            if merged and merged[-1][0] + merged[-1][1] == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((offset, length))
        self._free = merged

    def read(self, offset: int, length: int) -> Buffer:
        """The bytes the other end placed at `offset`, in place. Raises `ValueError` beyond the arena."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise ValueError(f"{length} bytes at {offset} are beyond an arena of {self.size}")
        return Buffer(self._view[offset : offset + length])

    @property
    def free_bytes(self) -> int:
        """Bytes no buffer occupies."""
        return sum(length for _, length in self._free)

    def close(self) -> None:
        """Close the descriptor. The mapping goes with the last buffer that views it."""
        os.close(self.fd)


def _anonymous_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("inlay")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd
