"""Bounds on the structure of JSON, checked before it is parsed.

A JSON parser holds the interpreter's lock until it is done, and all other requests wait. A key of
an object takes about 1 us with its later processing, a string or an escape 50 ns, a byte of text 1
ns. Requests that need many more than usual are refused. A body near several bounds at once still
holds the lock for about 100 ms. Numbers are not bounded here: a million token ids are a prompt,
take 10 to 40 ms, and are bounded by their memory.
"""

from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from inlay.base.errors import InvalidRequestError
from inlay.base.pace import yield_gil

MAX_CONTAINERS = 100_000
"""Maximum objects and arrays in one body."""

MAX_KEYS = 50_000
"""Maximum keys of all objects in one body.

A message has two, a tool call with its answer eleven.
"""

MAX_STRINGS = 250_000
"""Maximum strings in one body, keys included."""

MAX_ESCAPES = 1_000_000
"""Maximum backslashes in one body."""

MAX_SPACES = 4_000_000
"""Maximum bytes of white space between the values of one body."""

Bytes: TypeAlias = npt.NDArray[np.uint8]
Mask: TypeAlias = npt.NDArray[np.bool_]
Places: TypeAlias = npt.NDArray[np.intp]

_BLOCK = 1 << 18
"""Bytes counted at a time; other threads may run in between."""


class Counts(NamedTuple):
    """Counts of characters in a JSON text, inside and outside strings.

    Attributes:
        size: bytes of the text.
        wide: True if it has, or may have after parsing, characters outside ASCII.
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
    """Count the characters of `text`."""
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

    Brackets and colons inside strings do not count; strings are only located if the plain counts
    are over a bound.

    Args:
        texts: of one request.
        counted: result of `count` for the only text, if known.
        where: name of the texts in the error.

    Raises:
        InvalidRequestError: a bound is exceeded.
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
            bounds, escaped = _bounds(block, escaped)
            outside = partial(_outside, bounds, inside)
            containers += outside((block == ord("[")) | (block == ord("{")))
            keys += outside(block == ord(":"))
            spaces += outside(block <= ord(" "))
            quotes += len(bounds)
            inside ^= len(bounds) % 2 == 1
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


def _bounds(block: Bytes, escaped: bool) -> tuple[Places, bool]:
    """Locate the quotes that begin or end a string in a piece of JSON.

    Args:
        block: uint8 [N], N at least 1.
        escaped: True if its first character is escaped.

    Returns:
        places of the quotes, ascending; `escaped` of the next piece.
    """
    quotes, slashes = (np.flatnonzero(block == ord(each)) for each in '"\\')
    if escaped:
        quotes, slashes = quotes[quotes > 0], slashes[slashes > 0]
    if not len(slashes):
        return quotes, False
    # The same for all of one run; a run of odd length escapes the character behind it.
    runs = slashes - np.arange(len(slashes))
    behind = np.append(quotes, len(block))
    before = np.searchsorted(slashes, behind)
    last = before - 1
    length = before - np.searchsorted(runs, runs[last])
    odd = (before > 0) & (slashes[last] == behind - 1) & (length % 2 == 1)
    return quotes[~odd[:-1]], bool(odd[-1])


def _outside(bounds: Places, inside: bool, found: Mask) -> int:
    """Count what is `found` in a piece of JSON outside of strings.

    Args:
        bounds: result of `_bounds`.
        inside: True if the piece begins inside a string.
        found: bool [N].
    """
    at_bound = len(bounds) > 0 and bounds[0] == 0
    starts = bounds if at_bound else np.append(0, bounds)
    counts = np.add.reduceat(found.view(np.uint8), starts, dtype=np.uint32)
    return int(counts[int(inside != at_bound) :: 2].sum())
