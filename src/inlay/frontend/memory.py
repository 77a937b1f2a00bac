"""Where bytes that come in pieces end up: each is written once, to where it stays, or is there already."""

import numpy as np

from inlay.prompt import Buffer

_FIRST = 64 * 1024


class Memory:
    """Bytes that arrive piece by piece.

    Where their number is known no byte is copied again. Otherwise the memory doubles when it is full.

    Args:
        expected: how many bytes are to come, or None. Memory for them is asked for at once, but the system gives it only as it
            is written.
    """

    __slots__ = ("_room", "_size", "_view")

    def __init__(self, expected: int | None = None) -> None:
        # numpy's memory is not cleared first, and large pieces of it lie in huge pages where the system has them.
        self._room = np.empty(_FIRST if expected is None else expected, np.uint8)
        self._view = self._room.data
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def write(self, piece: bytes | memoryview) -> None:
        """Take the next bytes."""
        end = self._size + len(piece)
        if end > len(self._view):
            larger = np.empty(max(end, 2 * len(self._view)), np.uint8)
            larger[: self._size] = self._room[: self._size]
            self._room, self._view = larger, larger.data
        self._view[self._size : end] = piece
        self._size = end

    def buffer(self) -> Buffer:
        """What has come. Nothing may be written afterwards."""
        if self._size < _FIRST < len(self._view):
            # A little in much room would hold on to all of it.
            return Buffer(bytes(self._view[: self._size]))
        return Buffer(self._view[: self._size])


class InPlace:
    """Bytes that lie in one piece where they are to stay. As `Memory`, without any of its own."""

    __slots__ = ("_view",)

    def __init__(self) -> None:
        self._view = memoryview(b"")

    def __len__(self) -> int:
        return len(self._view)

    def write(self, piece: bytes | memoryview) -> None:
        """Take all there is. Raises `ValueError` when there is something already."""
        if len(piece) and len(self._view):
            raise ValueError(f"{len(piece)} bytes do not join {len(self._view)} elsewhere")
        if len(piece):
            self._view = memoryview(piece)

    def buffer(self) -> Buffer:
        """What has come."""
        return Buffer(self._view)
