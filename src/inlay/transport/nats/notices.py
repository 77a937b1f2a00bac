"""What the two ends of a transfer say to each other."""

from collections.abc import Collection, Sequence
from typing import TypeAlias

import msgspec

MIN_CHUNK_BYTES = 1024
"""Bytes of a chunk at least: each takes its receiver a hundred bytes to plan.

The server's own limit on messages is larger.
"""
MAX_CHUNK_BYTES = 16 * 1024 * 1024
MAX_PARTS = 4096
"""Parts of a transfer at most: a request's rows, and the tensors beside them."""
PART_BYTES = 256
"""Overhead of a part at its receiver, in bytes, so that many small parts are counted too."""
MAX_NAMED = 128
"""Parts of a transfer that are named, at most, so that its offer is always a message of its own."""

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
    """A message will come in chunks of at most `chunk` bytes.

    The header of `sizes[0]` bytes, then buffers.

    Attributes:
        header: the header, where it is small enough to come with the offer.
        named: the parts that the receiver may have.
    """

    transfer: int
    sizes: tuple[int, ...]
    chunk: int
    header: bytes = b""
    named: tuple[Named, ...] = ()

    def refusal(self, max_bytes: int) -> str | None:
        """Say why nobody should take this offer, by its numbers alone; None where it may be taken.

        Args:
            max_bytes: that it may take its receiver.
        """
        if not 1 <= len(self.sizes) <= MAX_PARTS:
            return f"{len(self.sizes)} parts; 1 to {MAX_PARTS} are taken"
        if min(self.sizes) < 0:
            return f"a part of {min(self.sizes)} bytes"
        taken = sum(self.sizes) + PART_BYTES * len(self.sizes)
        if taken > max_bytes:
            return f"{taken} bytes; at most {max_bytes} are taken"
        if not MIN_CHUNK_BYTES <= self.chunk <= MAX_CHUNK_BYTES:
            return f"chunks of {self.chunk} bytes; {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES} are taken"
        if self.header and len(self.header) != self.sizes[0]:
            return f"a header of {len(self.header)} bytes instead of {self.sizes[0]}"
        parts = {named.part for named in self.named}
        if len(self.named) > MAX_NAMED or len(parts) < len(self.named):
            return f"{len(self.named)} names of {len(parts)} parts; at most {MAX_NAMED}, one a part, are taken"
        if not all(0 < part < len(self.sizes) for part in parts):
            return f"a name of a part that is none of {len(self.sizes)}"
        return None


class Credit(msgspec.Struct, frozen=True, tag="credit", array_like=True):
    """So many chunks of the transfer may be sent in all.

    Said again while nothing changes: a sign of life.

    Attributes:
        present: parts that are there and have no chunks. They are the same in every credit for a
            chunk of the transfer.
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
    """The chunks of parts of these sizes, in order.

    None spans two parts, and an empty part, or one that is `present`, has none.
    """
    present = frozenset(present)
    return [
        (part, start, min(start + chunk, size))
        for part, size in enumerate(sizes)
        if part not in present
        for start in range(0, size, chunk)
    ]
