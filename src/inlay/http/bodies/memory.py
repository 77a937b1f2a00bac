"""Memory for bytes that arrive in pieces; each byte is written once, to its final place."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from inlay.messages.prompt import Buffer

_FIRST = 64 * 1024

Room: TypeAlias = Callable[[int], memoryview]
"""Returns writable memory of a number of bytes, whose pages are allocated as they are written."""


def private(num_bytes: int) -> memoryview:
    """Return private memory of this process."""
    # numpy does not clear the memory, and large arrays get huge pages where the system has them.
    return np.empty(num_bytes, np.uint8).data


class Memory:
    """Buffer for bytes that arrive in pieces.

    If their number is known, no byte is copied again. Otherwise the memory doubles when full.

    Args:
        expected: number of bytes to come, or None.
        room: gives memory for the expected bytes.
    """

    __slots__ = ("_size", "_view")

    def __init__(self, expected: int | None = None, room: Room = private) -> None:
        self._view = private(_FIRST) if expected is None else room(expected)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def write(self, piece: bytes | memoryview) -> None:
        """Append the next bytes."""
        end = self._size + len(piece)
        if end > len(self._view):
            larger = private(max(end, 2 * len(self._view)))
            larger[: self._size] = self._view[: self._size]
            self._view = larger
        self._view[self._size : end] = piece
        self._size = end

    def buffer(self) -> Buffer:
        """Return the bytes. Nothing may be written afterwards."""
        if self._size < _FIRST < len(self._view):
            # A small view would keep the whole memory alive.
            return Buffer(bytes(self._view[: self._size]))
        return Buffer(self._view[: self._size])
