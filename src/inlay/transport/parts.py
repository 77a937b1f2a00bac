"""Large messages on their way: their parts, and how far these have come."""

from collections.abc import Callable, Container, Sequence

from inlay.messages.prompt import Buffer


class Outgoing:
    """A large message on its way out.

    Args:
        parts: its bytes in order; those that the other end has become empty.

    Attributes:
        parts: as above.
        places: memory of the other end, by number of the part that is written there.
        granted: the other end has memory for it.
        after: the number of small frames that leave before it.
        left: called once all of it has left.
    """

    __slots__ = ("_index", "_position", "after", "granted", "left", "parts", "places")

    def __init__(self, parts: list[memoryview]) -> None:
        self.parts = parts
        self.places: dict[int, memoryview] = {}
        self.granted = False
        self.after = 0
        self.left: Callable[[], None] = lambda: None
        self._index = 0
        self._position = 0

    def write(self, limit: int) -> int:
        """Write the next bytes, at most `limit` of one part, where they belong.

        Returns their number; 0 where they are to be sent, and at the end.
        """
        if self.at_end() or self._index not in self.places:
            return 0
        start, chunk = self._position, self.next_chunk(limit)
        self.places[self._index][start : self._position] = chunk
        return len(chunk)

    def next_chunk(self, limit: int) -> memoryview:
        """Return the next bytes, at most `limit` of one part; none at the end."""
        if self.at_end():
            return memoryview(b"")
        chunk = self.parts[self._index][self._position : self._position + limit]
        self._position += len(chunk)
        return chunk

    def at_end(self) -> bool:
        """Return True once all of it has left."""
        while self._index < len(self.parts) and self._position >= len(self.parts[self._index]):
            self._index += 1
            self._position = 0
        return self._index == len(self.parts)


class Incoming:
    """A large message on its way in.

    Args:
        parts: writable memory of each part's size, or the part itself.
        names: of the parts; empty for those without one.
        shared: numbers of the parts that the other end writes itself.

    Attributes:
        shared: as above.
        index: number of the part that comes next; their count at the end.
    """

    __slots__ = ("_names", "_parts", "_position", "index", "shared")

    def __init__(
        self, parts: Sequence[Buffer | memoryview], names: Sequence[str], shared: Container[int]
    ) -> None:
        self._parts = parts
        self._names = names
        self._position = 0
        self.shared = shared
        self.index = 0
        self._skip()

    def _skip(self) -> None:
        while self.index < len(self._parts):
            part = self._parts[self.index]
            if isinstance(part, memoryview) and self._position < len(part):
                return
            self.index += 1
            self._position = 0

    def place(self, length: int) -> memoryview:
        """Return where the next `length` bytes belong. Raises `ValueError` beyond a part."""
        if self.index == len(self._parts):
            raise ValueError("a chunk came after the end of its message")
        part = self._parts[self.index]
        if isinstance(part, Buffer):
            raise TypeError("a part that is here is not received")
        left = len(part) - self._position
        if length > left:
            raise ValueError(f"a chunk of {length} bytes where {left} are due")
        return part[self._position : self._position + length]

    def advance(self, length: int) -> bool:
        """Note that `length` bytes have come; True if the message is whole."""
        self._position += length
        self._skip()
        return self.index == len(self._parts)

    def buffers(self) -> list[Buffer]:
        """Return the parts."""
        return [
            part if isinstance(part, Buffer) else Buffer(part, name)
            for part, name in zip(self._parts, self._names, strict=True)
        ]
