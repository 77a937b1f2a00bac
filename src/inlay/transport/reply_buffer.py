"""Places in memory that one end of a connection lends the other."""

import msgspec


class BufferPlace(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of the memory that one end of a connection receives into."""

    offset: int
    size: int


class ReplyBuffer:
    """Memory that is lent for as long as this is held; then it may be used for something else.

    Attributes:
        place: of it.
        view: the memory.
    """

    __slots__ = ("__weakref__", "place", "view")

    def __init__(self, place: BufferPlace, view: memoryview) -> None:
        self.place = place
        self.view = view
