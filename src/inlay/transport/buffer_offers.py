"""Large parts of messages: what is offered, granted, named and lent."""

import secrets
from weakref import ref

import msgspec

from inlay.messages.prompt import Buffer


class BufferOffer(msgspec.Struct, frozen=True, array_like=True):
    """A large message that is to be sent.

    Attributes:
        sizes: in bytes of its parts, the header first.
        names: of the parts; empty for those without one.
        accepts_credit: the sender knows what credit is; older versions do not.
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    accepts_credit: bool = False


class BufferLocations(msgspec.Struct, frozen=True, array_like=True):
    """A grant by an end whose memory the other can write to.

    Attributes:
        present: numbers of the parts that are there already.
        offsets: in that memory, by number of a part: it is written there, and not sent.
    """

    present: tuple[int, ...]
    offsets: dict[int, int]


encode = msgspec.msgpack.Encoder().encode
decode_offer = msgspec.msgpack.Decoder(BufferOffer).decode
decode_present = msgspec.msgpack.Decoder(tuple[int, ...]).decode
decode_places = msgspec.msgpack.Decoder(BufferLocations).decode


NAMED_BYTES = 64 * 1024
"""Bytes of a buffer from which on it is sent once, however many messages hold it."""
OWN_NAME = "~"
"""Begins the names that a connection gives; what they name is not kept beyond its use."""


class BufferNames:
    """Names of large buffers that have none, so that what several messages share is sent once."""

    def __init__(self) -> None:
        self._prefix = f"{OWN_NAME}{secrets.token_hex(8)}."
        self._next = 0
        self._known: dict[int, tuple[ref[Buffer], str]] = {}

    def is_known(self, buffer: Buffer) -> bool:
        """Return True if the other end may have the buffer: by its own name, or sent before."""
        return bool(buffer.name) or id(buffer) in self._known

    def of(self, buffer: Buffer) -> str:
        """Return the name of a buffer; of a small one, that no name is worth it."""
        if buffer.name or len(buffer) < NAMED_BYTES:
            return buffer.name
        key = id(buffer)
        known = self._known.get(key)
        if known is None:
            self._next += 1
            dead = ref(buffer, lambda _: self._known.pop(key, None))
            known = self._known[key] = dead, f"{self._prefix}{self._next}"
        return known[1]


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
