"""Memory that two processes share: one end places buffers in it, the other views them in place."""

import mmap
import os
import tempfile
import weakref
from bisect import insort
from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from inlay.messages.prompt import Buffer

ALIGNMENT = 4096

_ELEMENTS = 64
"""Bytes that a buffer is to be aligned to where it is read in place.

What `torch.save` and numpy align elements to.
"""

RESERVED = 3 / 4
"""Of the arena, at most, for what is still to be written: the rest is for what is placed."""


_Owner: TypeAlias = "Buffer | npt.NDArray[np.uint8]"


@dataclass(slots=True)
class _Placement:
    """The use of a part of the arena.

    The copy of a buffer, or whatever is written through an array that was handed out.
    """

    owner: "weakref.ref[_Owner]"
    key: int
    offset: int
    length: int
    holders: int
    written_in_place: bool = False

    def contains(self, offset: int) -> bool:
        return self.offset <= offset < self.offset + self.length


class Arena:
    """A fixed stretch of shared memory and the free parts of it.

    Only one end places and frees, the one that created it unless said otherwise. A buffer nobody
    holds any more stays where it is for as long as the `Buffer` itself lives and the room is not
    needed: a prompt that is sent again, such as a stored one, is not copied again. The memory is
    anonymous: it is gone when both ends are, however they end. Pages are taken from the system when
    first written and stay with the arena, so a repeated large prompt does not pay for page faults
    again.

    Attributes:
        size: bytes in all.
        reserved_bytes: those that were handed out to be written in place.
        fd: file descriptor for the other process to inherit.
    """

    def __init__(self, size: int, fd: int | None = None, *, places: bool | None = None) -> None:
        """Create an arena of `size` bytes, or with `fd` map one that is there.

        Args:
            size: bytes in all.
            fd: descriptor of its memory, which another process may have created.
            places: this end places and frees; None: if it creates it.
        """
        self.size = size
        if places is None:
            places = fd is None
        self.fd = anonymous_file(size) if fd is None else fd
        self._map = mmap.mmap(
            self.fd, size, access=mmap.ACCESS_WRITE if places else mmap.ACCESS_READ
        )
        self._view = memoryview(self._map)
        self._free: list[tuple[int, int]] = [(0, size)]
        self._placed: dict[int, _Placement] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._offset_of: dict[int, int] = {}
        self._forgotten: list[int] = []
        self.reserved_bytes = 0

    def put(self, buffer: Buffer) -> int | None:
        """Put `buffer` into the arena and return its offset, or None when there is no room.

        A buffer (the same object) that is already there is not copied again. Each `place` needs its
        own `free`.
        """
        self._drop_forgotten()
        known = self._known(buffer)
        if known is not None:
            known.holders += 1
            self._idle.pop(known.offset, None)
            return known.offset
        within = self._offset_of_view(buffer)
        if within is not None:
            return within
        length = -(-len(buffer) // ALIGNMENT) * ALIGNMENT
        offset = self._take(length)
        if offset is None:
            return None
        self._view[offset : offset + len(buffer)] = buffer.view
        self._register(buffer, id(buffer), offset, length).holders = 1
        return offset

    def reserve(self, num_bytes: int) -> memoryview | None:
        """Writable memory for a buffer that is still to be made, or None when there is no room.

        A buffer that views it is placed without being copied. It is free again when nothing views
        it and no one holds it.
        """
        self._drop_forgotten()
        length = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if not length or self.reserved_bytes + length > self.size * RESERVED:
            return None
        offset = self._take(length)
        if offset is None:
            return None
        array = np.frombuffer(self._map, np.uint8, num_bytes, offset)
        self.reserved_bytes += length
        self._register(array, id(array), offset, length).written_in_place = True
        return array.data

    def offset(self, reserved: memoryview) -> int | None:
        """Return where memory begins that `reserve` gave; None of any other."""
        known = self._known(reserved.obj)
        return None if known is None else known.offset

    def _register(self, owner: _Owner, key: int, offset: int, length: int) -> _Placement:
        # The callback only notes the offset: it may run anywhere, also in the middle of this
        # object's own methods.
        forget = self._forgotten.append
        placement = _Placement(weakref.ref(owner, lambda _: forget(offset)), key, offset, length, 0)
        self._placed[offset] = placement
        self._offset_of[key] = offset
        return placement

    def _known(self, owner: object) -> _Placement | None:
        known = self._placed.get(self._offset_of.get(id(owner), -1))
        # An id may have passed from an owner that is gone, whose bytes the other end still reads,
        # to this one.
        return known if known is not None and known.owner() is owner else None

    def _offset_of_view(self, buffer: Buffer) -> int | None:
        """Offset of a buffer that was written in place.

        None of any other, and where its elements would not be aligned.
        """
        known = self._known(buffer.view.obj)
        if known is None or not known.written_in_place:
            return None
        offset = known.offset + _address(buffer.view) - _address(known.owner())
        if offset % _ELEMENTS:
            return None
        known.holders += 1
        return offset

    def free(self, offset: int) -> None:
        """Give back one holder's claim on what `place` put at `offset`."""
        placement = self._placed.get(offset)
        if placement is None:
            placement = next(each for each in self._placed.values() if each.contains(offset))
        placement.holders -= 1
        if placement.holders:
            return
        if placement.owner() is None:
            self._release(placement.offset)
        elif not placement.written_in_place:
            self._idle[offset] = None

    def _take(self, length: int) -> int | None:
        while True:
            index = next((i for i, (_, room) in enumerate(self._free) if room >= length), None)
            if index is not None:
                offset, room = self._free.pop(index)
                if room > length:
                    self._free.insert(index, (offset + length, room - length))
                return offset
            if not self._idle:
                return None
            self._release(next(iter(self._idle)))

    def _drop_forgotten(self) -> None:
        """Release memory of buffers that no longer exist, unless the other end still reads it."""
        while self._forgotten:
            offset = self._forgotten.pop()
            placement = self._placed.get(offset)
            if placement is not None and placement.owner() is None and not placement.holders:
                self._release(offset)

    def _release(self, offset: int) -> None:
        placement = self._placed.pop(offset)
        self._idle.pop(offset, None)
        if placement.written_in_place:
            self.reserved_bytes -= placement.length
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
        """The bytes the other end placed at `offset`, in place.

        Raises `ValueError` beyond the arena.
        """
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


def _address(memory: object) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)  # type: ignore[call-overload]


def anonymous_file(size: int) -> int:
    """Return a descriptor of memory that processes can share; pages come when written."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("inlay")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd
