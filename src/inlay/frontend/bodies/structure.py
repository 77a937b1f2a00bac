"""Bounds on the structure of JSON, counted before a parser sees it.

A parser holds the interpreter until it is done, and everybody else waits. How long depends on what
it makes: a key of an object takes about 1 us with what is done with it afterwards, a string or an
escape 50 ns, a byte of text 1 ns. No request that is served needs as many of them as would make
others wait for long, so more are refused. A body near several bounds at once still holds the
interpreter for about 100 ms. Numbers are not bounded here: a million token ids are a prompt, take
10 to 40 ms, and are bounded by the memory they take.
"""

from typing import NamedTuple

import numpy as np

from inlay.errors import InvalidRequestError
from inlay.pace import yield_gil

MAX_CONTAINERS = 100_000
"""Objects and arrays in one body."""

MAX_KEYS = 50_000
"""Keys of all objects of one body together.

A message has two, a tool call with its answer eleven.
"""

MAX_STRINGS = 250_000
"""Strings of one body, keys included."""

MAX_ESCAPES = 1_000_000
"""Backslashes of one body."""

MAX_SPACES = 4_000_000
"""Bytes of white space between the values of one body."""

_BLOCK = 1 << 20
"""Bytes looked at in one go: others have their turn between them."""


class Counts(NamedTuple):
    """Characters of a JSON text, wherever they stand.

    Attributes:
        size: bytes of the text.
        wide: it has characters outside ASCII, or may have once it is read.
    """

    size: int = 0
    objects: int = 0
    arrays: int = 0
    colons: int = 0
    commas: int = 0
    quotes: int = 0
    escapes: int = 0
    spaces: int = 0
    wide: bool = False

    def within(self) -> bool:
        """Return True if no bound is passed, even when all counted characters are structure."""
        return (
            self.objects + self.arrays <= MAX_CONTAINERS
            and self.colons <= MAX_KEYS
            and self.quotes <= 2 * MAX_STRINGS
            and self.escapes <= MAX_ESCAPES
            and self.spaces <= MAX_SPACES
        )


def count(text: bytes | bytearray) -> Counts:
    """The characters of `text`."""
    characters = np.frombuffer(text, np.uint8)
    totals = [0] * 6
    spaces = 0
    wide = False
    for start in range(0, len(characters), _BLOCK):
        block = characters[start : start + _BLOCK]
        for index, character in enumerate(b'{[:,"\\'):
            totals[index] += int(np.count_nonzero(block == character))
        spaces += int(np.count_nonzero(block <= ord(" ")))
        wide = wide or int(block.max()) >= 128
        yield_gil()
    wide = wide or (totals[-1] > 0 and b"\\u" in text)
    objects, arrays, colons, commas, quotes, escapes = totals
    return Counts(len(characters), objects, arrays, colons, commas, quotes, escapes, spaces, wide)


def check_structure(
    *texts: bytes | bytearray, counted: Counts | None = None, where: str = "the body"
) -> None:
    """Check that JSON texts together are within the bounds of this module.

    Brackets and colons in strings do not count. Strings are told apart only where there are enough
    of them to matter.

    Args:
        texts: of one request.
        counted: what `count` says of the only one of them, where that is known.
        where: they stand, for the error.

    Raises:
        InvalidRequestError: they are not.
    """
    if counted is not None and counted.within():
        return
    if counted is None and sum(map(len, texts)) <= MAX_KEYS:
        return
    containers = keys = quotes = escapes = spaces = 0
    for text in texts:
        characters = np.frombuffer(text, np.uint8)
        inside = escaped = False
        for start in range(0, len(characters), _BLOCK):
            block = characters[start : start + _BLOCK]
            strings, opened, inside, escaped = _strings(block, inside, escaped)
            structure = block[~strings]
            containers += int(np.count_nonzero((structure == ord("[")) | (structure == ord("{"))))
            keys += int(np.count_nonzero(structure == ord(":")))
            spaces += int(np.count_nonzero(structure <= ord(" ")))
            quotes += opened
            escapes += int(np.count_nonzero(block == ord("\\")))
            found = (
                (containers, MAX_CONTAINERS, "JSON objects and arrays, which no request needs"),
                (keys, MAX_KEYS, "keys in its JSON objects, which no request needs"),
                (quotes // 2, MAX_STRINGS, "JSON strings, which no request needs"),
                (escapes, MAX_ESCAPES, "backslashes; send text as UTF-8 in place of escapes"),
                (spaces, MAX_SPACES, "bytes of white space between its values; send compact JSON"),
            )
            for number, most, what in found:
                if number > most:
                    raise InvalidRequestError(f"{where} has more than {most} {what}")
            yield_gil()


def _strings(block: np.ndarray, inside: bool, escaped: bool) -> tuple[np.ndarray, int, bool, bool]:
    """Which characters of a piece of JSON are in strings, how many quotes bound strings, and how the next piece begins.

    Args:
        block: uint8 [N], N at least 1.
        inside: whether it begins in a string.
        escaped: whether its first character is escaped by what stands before the piece.

    Returns:
        bool [N], opening quotes included; the number; `inside` and `escaped` of the next piece.
    """
    places = np.arange(len(block), dtype=np.int32)
    # An odd run of backslashes escapes what follows it; a run that reaches back to the start has
    # `escaped` before it.
    before = np.maximum.accumulate(np.where(block == ord("\\"), np.int32(-1), places))
    quotes = np.flatnonzero(block == ord('"'))
    run = quotes - 1 - np.where(quotes > 0, before[quotes - 1], -1)
    run += (run == quotes) & escaped
    bounds = quotes[run % 2 == 0]
    toggles = np.zeros(len(block), np.bool_)
    toggles[bounds] = True
    strings = np.logical_xor.accumulate(toggles) ^ inside
    trailing = len(block) - 1 - int(before[-1])
    trailing += trailing == len(block) and escaped
    return strings, len(bounds), bool(strings[-1]), trailing % 2 == 1
