"""Memory of one request: parsed JSON, decoded tensors and rows, reserved beforehand."""

import sys
from collections.abc import Iterable

import msgspec

from inlay.frontend.bodies.admission import Reservation, bytes_alive
from inlay.frontend.bodies.limits import EmbedsLimits
from inlay.frontend.bodies.structure import Counts, check_structure, count
from inlay.pace import yield_gil
from inlay.prompt import Prompt

_MADE = {"objects": 176, "arrays": 64, "colons": 48, "commas": 64}
"""Maximum bytes of the objects that the parser makes for each such character.

Measured with CPython 3.11 and msgspec.
"""

_WIDE = 7
"""Maximum bytes of a character while a string with non-ASCII characters is parsed.

4 for the character, and 3 for growing the buffer.
"""

_SMALL = 4096
"""Bytes of JSON below which the worst case is assumed instead of counting."""

_WORST = 24


class RequestMemory:
    """Accounting of one request's memory, from its body to its prompts.

    Safe to call from any thread, by one at a time.

    Args:
        reservation: of the request; it holds the body.
        limits: of its embeddings.

    Attributes:
        json: bytes of the parsed JSON, without the extracted embeddings.
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
        """Reserve the maximum memory of parsing `rest` as JSON.

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
        """Reserve a reassembled body of `size` bytes, beside its extracted pieces.

        Raises as `Reservation.grow_to`.
        """
        self._body += size
        self._reservation.grow_to(self._body)

    def on_decoded(self, sizes: Iterable[int]) -> None:
        """Count embeddings that were decoded while the body arrived, of `sizes` bytes each.

        Their memory is reserved as that of the body.

        Raises:
            BodyTooLargeError: the request's embeddings are over the limit.
        """
        self._arrived = sum(sizes)
        self._check_total()

    def decoding(self, sizes: Iterable[int]) -> None:
        """Reserve embeddings that are decoded from the JSON, of `sizes` bytes each.

        Raises as `check_total` and as `Reservation.grow_to`.
        """
        self._inline = sum(sizes)
        self._check_total()
        self._reservation.grow_to(self._body + self._parsed + self._inline)

    def body_freed(self, kept: int = 0) -> None:
        """Release the body, but for embeddings decoded as it arrived and `kept` bytes of files."""
        self._body = kept + self._arrived
        self._reservation.shrink_to(self._body + self._parsed + self._inline)

    def check_total(self, sizes: Iterable[int]) -> None:
        """Count embeddings of files or stored prompts, which take no further memory.

        Raises:
            BodyTooLargeError: the request's embeddings are over the limit.
        """
        self._whole += sum(sizes)
        self._check_total()

    def settle(self, prompts: Iterable[Prompt], kept: int) -> None:
        """Release all but the rows of `prompts` and the `kept` bytes of the parsed request."""
        self._reservation.shrink_to(bytes_alive(prompts) + kept)

    def _check_total(self) -> None:
        self._limits.check_total(self._arrived + self._inline + self._whole)


def parsed_size(counts: Counts) -> int:
    """Return the maximum bytes of parsing a JSON text, from the counts of its characters."""
    made: int = sum(getattr(counts, name) * size for name, size in _MADE.items())
    return counts.size * (_WIDE if counts.wide else 1) + made


def size_of(request: msgspec.Struct, *without: str) -> int:
    """Return the approximate bytes of a parsed request, without the fields `without`."""
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
