"""Where bytes that come in pieces end up.

Each is written once, to where it stays, or is there already.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from inlay.prompt import Buffer

_FIRST = 64 * 1024

Room: TypeAlias = Callable[[int], memoryview]
"""Gives writable memory of so many bytes.

The system gives pages for it only as they are written.
"""


def private(num_bytes: int) -> memoryview:
    """Memory of this process."""
    # numpy's memory is not cleared first, and large pieces of it lie in huge pages where the system
    # has them.
    return np.empty(num_bytes, np.uint8).data


class Memory:
    """Bytes that arrive piece by piece.

    Where their number is known no byte is copied again. Otherwise the memory doubles when it is
    full.

    Args:
        expected: how many bytes are to come, or None.
        room: where memory for as many as are expected comes from.
    """

    __slots__ = ("_size", "_view")

    def __init__(self, expected: int | None = None, room: Room = private) -> None:
        self._view = private(_FIRST) if expected is None else room(expected)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def write(self, piece: bytes | memoryview) -> None:
        """Take the next bytes."""
        end = self._size + len(piece)
        if end > len(self._view):
            larger = private(max(end, 2 * len(self._view)))
            larger[: self._size] = self._view[: self._size]
            self._view = larger
        self._view[self._size : end] = piece
        self._size = end

    def buffer(self) -> Buffer:
        """What has come. Nothing may be written afterwards."""
        if self._size < _FIRST < len(self._view):
            # A little in much room would hold on to all of it.
            return Buffer(bytes(self._view[: self._size]))
        return Buffer(self._view[: self._size])
