"""What the two ends of a transfer say to each other."""

from collections.abc import Collection, Sequence
from typing import TypeAlias

import msgspec

Place: TypeAlias = "tuple[int, int, int]"
"""(part, first byte, past-last byte) of a chunk."""


class Named(msgspec.Struct, frozen=True, array_like=True):
    """A part of a message that its receiver may have.

    Attributes:
        part: its number.
        name: of its content, which never changes.
        lasts: it is a stored prompt's, and may be kept beyond its use.
    """

    part: int
    name: str
    lasts: bool = False


class Offer(msgspec.Struct, frozen=True, tag="offer", array_like=True):
    """A message will come in chunks of at most `chunk` bytes: the header of `sizes[0]` bytes, then buffers.

    Attributes:
        header: the header, where it is small enough to come with the offer.
        named: the parts that the receiver may have.
    """

    transfer: int
    sizes: tuple[int, ...]
    chunk: int
    header: bytes = b""
    named: tuple[Named, ...] = ()


class Credit(msgspec.Struct, frozen=True, tag="credit", array_like=True):
    """So many chunks of the transfer may be sent in all. Said again while nothing changes: a sign of life.

    Attributes:
        present: parts that are there and have no chunks. They are the same in every credit for a chunk of the transfer.
    """

    transfer: int
    chunks: int
    present: tuple[int, ...] = ()


class Taken(msgspec.Struct, frozen=True, tag="taken", array_like=True):
    """All of the transfer has come."""

    transfer: int


class Dropped(msgspec.Struct, frozen=True, tag="dropped", array_like=True):
    """The receiver will take no more of the transfer."""

    transfer: int
    reason: str


class Withdrawn(msgspec.Struct, frozen=True, tag="withdrawn", array_like=True):
    """The sender will send no more of the transfer."""

    transfer: int


Notice: TypeAlias = Offer | Credit | Taken | Dropped | Withdrawn


def places(sizes: Sequence[int], chunk: int, present: Collection[int] = ()) -> list[Place]:
    """The chunks of parts of these sizes, in order; none spans two parts, and an empty part, or one that is `present`, has none."""
    return [
        (part, start, min(start + chunk, size))
        for part, size in enumerate(sizes)
        if part not in present
        for start in range(0, size, chunk)
    ]
