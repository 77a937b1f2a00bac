"""Memory that two processes share: one end places buffers in it, the other views them in place."""

import mmap
import os
import tempfile
import weakref
from bisect import insort
from collections import OrderedDict
from dataclasses import dataclass

from inlay.prompt import Buffer

ALIGNMENT = 4096


@dataclass(slots=True)
class _Placement:
    buffer: "weakref.ref[Buffer]"
    key: int
    offset: int
    length: int
    holders: int


class Arena:
    """A fixed stretch of shared memory and the free parts of it.

    Only the end that created it places and frees. A buffer nobody holds any more stays where it is for as long as the `Buffer`
    itself lives and the room is not needed: a prompt that is sent again, such as a stored one, is not copied again. The
    memory is anonymous: it is gone when both ends are, however they end. Pages are taken from the system when first
    written and stay with the arena, so a repeated large prompt does not pay for page faults again.

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
        self._placed: dict[int, _Placement] = {}
        self._unheld: OrderedDict[int, None] = OrderedDict()
        self._offset_of: dict[int, int] = {}
        self._forgotten: list[int] = []

    def place(self, buffer: Buffer) -> int | None:
        """Put `buffer` into the arena and return its offset, or None when there is no room.

        A buffer (the same object) that is already there is not copied again. Each `place` needs its own `free`.
        """
        self._drop_forgotten()
        known = self._placed.get(self._offset_of.get(id(buffer), -1))
        # An id may have passed from a buffer that is gone, whose bytes the other end still reads, to this one.
        if known is not None and known.buffer() is buffer:
            known.holders += 1
            self._unheld.pop(known.offset, None)
            return known.offset
        length = -(-len(buffer) // ALIGNMENT) * ALIGNMENT
        offset = self._take(length)
        if offset is None:
            return None
        self._view[offset : offset + len(buffer)] = buffer.view
        # The callback only notes the offset: it may run anywhere, also in the middle of this object's own methods.
        forget = self._forgotten.append
        reference = weakref.ref(buffer, lambda _: forget(offset))
        self._placed[offset] = _Placement(reference, id(buffer), offset, length, 1)
        self._offset_of[id(buffer)] = offset
        return offset

    def free(self, offset: int) -> None:
        """Give back one holder's claim on what `place` put at `offset`."""
        placement = self._placed[offset]
        placement.holders -= 1
        if not placement.holders:
            self._unheld[offset] = None
            if placement.buffer() is None:
                self._release(offset)

    def _take(self, length: int) -> int | None:
        while True:
            index = next((i for i, (_, room) in enumerate(self._free) if room >= length), None)
            if index is not None:
                offset, room = self._free.pop(index)
                if room > length:
                    self._free.insert(index, (offset + length, room - length))
                return offset
            if not self._unheld:
                return None
            self._release(next(iter(self._unheld)))

    def _drop_forgotten(self) -> None:
        """Release what stands for buffers that no longer exist, unless the other end still reads it."""
        while self._forgotten:
            offset = self._forgotten.pop()
            placement = self._placed.get(offset)
            if placement is not None and placement.buffer() is None and not placement.holders:
                self._release(offset)

    def _release(self, offset: int) -> None:
        placement = self._placed.pop(offset)
        self._unheld.pop(offset, None)
        if self._offset_of.get(placement.key) == offset:
            del self._offset_of[placement.key]
        insort(self._free, (offset, placement.length))
        merged: list[tuple[int, int]] = []
        for start, length in self._free:
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged

    def read(self, offset: int, length: int) -> Buffer:
        """The bytes the other end placed at `offset`, in place. Raises `ValueError` beyond the arena."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise ValueError(f"{length} bytes at {offset} are beyond an arena of {self.size}")
        return Buffer(self._view[offset : offset + length])

    @property
    def held_bytes(self) -> int:
        """Bytes the other end may be reading."""
        return sum(placement.length for placement in self._placed.values() if placement.holders)

    @property
    def free_bytes(self) -> int:
        """Bytes no buffer occupies, held or not."""
        self._drop_forgotten()
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
