"""What a body becomes, counted before it is made: parsed JSON, decoded tensors, rows."""

import sys
from collections.abc import Iterable

import msgspec

from inlay.frontend.bodies.admission import Reservation, bytes_alive
from inlay.frontend.bodies.limits import EmbedsLimits
from inlay.frontend.bodies.structure import Counts, check_structure, count
from inlay.pace import yield_gil
from inlay.prompt import Prompt

_MADE = {"objects": 176, "arrays": 64, "colons": 48, "commas": 64}
"""Bytes that what stands before or after such a character takes, at most.

Measured with CPython 3.11 and msgspec.
"""

_WIDE = 7
"""Bytes a character may take, while it is read, in a string that holds one outside ASCII.

4, and those of growing a buffer.
"""

_SMALL = 4096
"""Bytes under which the worst is assumed instead of counting."""

_WORST = 24


class RequestMemory:
    """The memory of one request, from its body to its prompts.

    Safe to call from any thread, by one at a time.

    Args:
        reservation: of the request, whose body it holds.
        limits: of its embeddings.

    Attributes:
        json: bytes of the JSON that was parsed, the embeddings that were taken out of it not
            counted.
    """

    __slots__ = (
        "_arrived",
        "_body",
        "_inline",
        "_limits",
        "_parsed",
        "_reservation",
        "_whole",
        "json",
    )

    def __init__(self, reservation: Reservation, limits: EmbedsLimits) -> None:
        self._reservation = reservation
        self._limits = limits
        self._body = reservation.size
        self._parsed = 0
        self._arrived = 0
        self._inline = 0
        self._whole = 0
        self.json = 0

    def parsing(self, rest: bytes | bytearray) -> None:
        """Hold what parsing `rest` as JSON takes at most.

        Raises:
            BodyTooLargeError: it is over `--max-json-bytes`.
            InvalidRequestError: as `check_structure`.
            InlayError: as `Reservation.grow_to`.
        """
        self._limits.check_json(len(rest))
        self.json = max(self.json, len(rest))
        if len(rest) < _SMALL:
            size = len(rest) * _WORST
        else:
            counts = count(rest)
            check_structure(rest, counted=counts)
            size = parsed_size(counts)
        self._parsed = max(self._parsed, size)
        self._reservation.grow_to(self._body + self._parsed)

    def on_reassembled(self, size: int) -> None:
        """Hold a body of `size` bytes beside what it was cut up into.

        Raises as `Reservation.grow_to`.
        """
        self._body += size
        self._reservation.grow_to(self._body)

    def on_decoded(self, sizes: Iterable[int]) -> None:
        """Count embeddings that were decoded as the body came, to `sizes` bytes each.

        They are held in the place of the body.

        Raises:
            BodyTooLargeError: the request has too much of them.
        """
        self._arrived = sum(sizes)
        self._check_total()

    def decoding(self, sizes: Iterable[int]) -> None:
        """Hold the embeddings in the JSON, of `sizes` decoded bytes each.

        Raises as `whole` and as `Reservation.grow_to`.
        """
        self._inline = sum(sizes)
        self._check_total()
        self._reservation.grow_to(self._body + self._parsed + self._inline)

    def body_freed(self, kept: int = 0) -> None:
        """Hold no more of the body than was decoded as it came, and `kept` bytes, which are embeddings as they are."""
        self._body = kept + self._arrived
        self._reservation.shrink_to(self._body + self._parsed + self._inline)

    def check_total(self, sizes: Iterable[int]) -> None:
        """Count embeddings that came as they are, or had come before.

        Nothing is made of them that must be held.

        Raises:
            BodyTooLargeError: the request has too much of them.
        """
        self._whole += sum(sizes)
        self._check_total()

    def settle(self, prompts: Iterable[Prompt], kept: int) -> None:
        """Hold no more than the rows of `prompts`, and the `kept` bytes of the request that live as long as its answer."""
        self._reservation.shrink_to(bytes_alive(prompts) + kept)

    def _check_total(self) -> None:
        self._limits.check_total(self._arrived + self._inline + self._whole)


def parsed_size(counts: Counts) -> int:
    """Bytes that parsing a JSON text takes at most, by its characters."""
    made: int = sum(getattr(counts, name) * size for name, size in _MADE.items())
    return counts.size * (_WIDE if counts.wide else 1) + made


def size_of(request: msgspec.Struct, *without: str) -> int:
    """Bytes of memory that a parsed request takes, about, its fields `without` not counted."""
    fields = (getattr(request, name) for name in request.__struct_fields__ if name not in without)
    items: list[object] = [value for value in fields if value is not None]
    size = 0
    while items:
        yield_gil()
        item = items.pop()
        size += sys.getsizeof(item)
        if isinstance(item, dict):
            items.extend(item)
            items.extend(item.values())
        elif isinstance(item, list):
            items.extend(item)
    return size
