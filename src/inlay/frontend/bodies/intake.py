"""What a body becomes, counted before it is made: parsed JSON, decoded tensors, rows."""

import sys
from collections.abc import Iterable

import msgspec
import numpy as np

from inlay.errors import InvalidRequestError
from inlay.frontend.bodies.admission import Reservation, bytes_alive
from inlay.frontend.bodies.limits import EmbedsLimits
from inlay.prompt import Prompt

_WEIGHTS = {b",": 64, b":": 48, b"[": 64, b"{": 176}
"""Bytes that what stands before or after such a character takes, at most: measured with CPython 3.11 and msgspec."""

_WIDE = 7
"""Bytes a character may take, while it is read, in a string that holds one outside ASCII: 4, and those of growing a buffer."""

MAX_CONTAINERS = 100_000
"""Objects and arrays in one body: what a parser makes of more would hold up everybody else for tenths of a second."""

_BLOCK = 1 << 20

_SMALL = 4096
"""Bytes under which the worst is assumed instead of counting."""

_WORST = 24


class Intake:
    """The memory of one request, from its body to its prompts. Safe to call from any thread, by one at a time.

    Args:
        reservation: of the request, whose body it holds.
        limits: of its embeddings.

    Attributes:
        json: bytes of the JSON that was parsed, the embeddings that were taken out of it not counted.
    """

    __slots__ = ("_arrived", "_body", "_inline", "_limits", "_parsed", "_reservation", "_whole", "json")

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
            InvalidRequestError: it has more objects and arrays than any request needs.
            InlayError: as `Reservation.grow_to`.
        """
        check_containers(rest)
        self.json = max(self.json, len(rest))
        self._parsed = max(self._parsed, parsed_size(rest))
        self._reservation.grow_to(self._body + self._parsed)

    def put_together(self, size: int) -> None:
        """Hold a body of `size` bytes beside what it was cut up into. Raises as `Reservation.grow_to`."""
        self._body += size
        self._reservation.grow_to(self._body)

    def arrived(self, sizes: Iterable[int]) -> None:
        """Count embeddings that were decoded as the body came, to `sizes` bytes each: they are held in the place of the body.

        Raises:
            BodyTooLargeError: the request has too much of them.
        """
        self._arrived = sum(sizes)
        self._check_total()

    def decoding(self, sizes: Iterable[int]) -> None:
        """Hold the embeddings in the JSON, of `sizes` decoded bytes each. Raises as `whole` and as `Reservation.grow_to`."""
        self._inline = sum(sizes)
        self._check_total()
        self._reservation.grow_to(self._body + self._parsed + self._inline)

    def body_freed(self, kept: int = 0) -> None:
        """Hold no more of the body than was decoded as it came, and `kept` bytes, which are embeddings as they are."""
        self._body = kept + self._arrived
        self._reservation.shrink_to(self._body + self._parsed + self._inline)

    def whole(self, sizes: Iterable[int]) -> None:
        """Count embeddings that came as they are, or had come before: nothing is made of them that must be held.

        Raises:
            BodyTooLargeError: the request has too much of them.
        """
        self._whole += sum(sizes)
        self._check_total()

    def prepared(self, prompts: Iterable[Prompt], kept: int) -> None:
        """Hold no more than the rows of `prompts`, and the `kept` bytes of the request that live as long as its answer."""
        self._reservation.shrink_to(bytes_alive(prompts) + kept)

    def _check_total(self) -> None:
        self._limits.check_total(self._arrived + self._inline + self._whole)


def check_containers(text: bytes | bytearray) -> None:
    """Raise `InvalidRequestError` when JSON has more than `MAX_CONTAINERS` objects and arrays.

    Brackets in strings do not count. Strings are only told apart where there are enough brackets to matter.
    """
    if len(text) <= MAX_CONTAINERS:
        return
    characters = np.frombuffer(text, np.uint8)
    if sum(np.count_nonzero(characters == ord(bracket)) for bracket in "[{") <= MAX_CONTAINERS:
        return
    count = 0
    inside = escaped = False
    for start in range(0, len(characters), _BLOCK):
        block = characters[start : start + _BLOCK]
        strings, inside, escaped = _strings(block, inside, escaped)
        count += int(np.count_nonzero(((block == ord("[")) | (block == ord("{"))) & ~strings))
        if count > MAX_CONTAINERS:
            raise InvalidRequestError(
                f"the body has more than {MAX_CONTAINERS} JSON objects and arrays, which no request needs"
            )


def _strings(block: np.ndarray, inside: bool, escaped: bool) -> tuple[np.ndarray, bool, bool]:
    """Which characters of a piece of JSON are in strings, their opening quotes included, and how the next piece begins.

    Args:
        block: uint8 [N], N at least 1.
        inside: whether it begins in a string.
        escaped: whether its first character is escaped by what stands before the piece.
    """
    places = np.arange(len(block), dtype=np.int32)
    # An odd run of backslashes escapes what follows it; a run that reaches back to the start has `escaped` before it.
    before = np.maximum.accumulate(np.where(block == ord("\\"), np.int32(-1), places))
    quotes = np.flatnonzero(block == ord('"'))
    run = quotes - 1 - np.where(quotes > 0, before[quotes - 1], -1)
    run += (run == quotes) & escaped
    toggles = np.zeros(len(block), np.bool_)
    toggles[quotes[run % 2 == 0]] = True
    strings = np.logical_xor.accumulate(toggles) ^ inside
    trailing = len(block) - 1 - int(before[-1])
    trailing += trailing == len(block) and escaped
    return strings, bool(strings[-1]), trailing % 2 == 1


def parsed_size(text: bytes | bytearray) -> int:
    """Bytes that parsing `text` as JSON takes at most, from one look at its characters."""
    if len(text) < _SMALL:
        return len(text) * _WORST
    characters = np.frombuffer(text, np.uint8)
    wide = not text.isascii() or bool(np.any(characters[1:][characters[:-1] == ord("\\")] == ord("u")))
    objects = sum(
        weight * np.count_nonzero(characters == character[0]) for character, weight in _WEIGHTS.items()
    )
    return len(text) * (_WIDE if wide else 1) + int(objects)


def size_of(request: msgspec.Struct, *without: str) -> int:
    """Bytes of memory that a parsed request takes, about, its fields `without` not counted."""
    fields = (getattr(request, name) for name in request.__struct_fields__ if name not in without)
    items: list[object] = [value for value in fields if value is not None]
    size = 0
    while items:
        item = items.pop()
        size += sys.getsizeof(item)
        if isinstance(item, dict):
            items.extend(item)
            items.extend(item.values())
        elif isinstance(item, list):
            items.extend(item)
    return size
