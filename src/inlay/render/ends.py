"""Tokens at one end of a long text, without tokenizing the rest.

A tokenizer reads little of a text at a time, usually a word, so a cut affects only tokens near it.
The reach of a cut is measured, not assumed: the text around it is tokenized from the cut, and again
from one to four characters beyond it. Where all of these agree, the whole text is assumed to have
the same tokens. This fails only in a run that repeats a unit of more than four characters, if the
tokenizer has tokens for repetitions of it.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Literal, NamedTuple, TypeAlias

Side: TypeAlias = Literal["left", "right"]
"""The side of a text that is cut off."""

_CHARACTERS = 6
"""Average characters of a token that nearly all texts stay below."""

_LONGEST = 12
"""Maximum average characters of a token; with longer tokens, fewer than requested are found."""

_AT_LEAST = 4096
"""Minimum characters that are tokenized together."""

_ALWAYS = 256 * 1024
"""Characters that may be read even for few tokens."""

_MARGIN = 32
"""Maximum tokens that a cut may affect."""

_AROUND = 2048
"""Characters around a cut within which its effect must end."""

_BEYOND = 4
"""Positions beyond a cut that must give the same tokens.

A run of "ab" has the same tokens from every second character, and others in between.
"""

Encode: TypeAlias = Callable[[str], Sequence[int]]
"""Returns the ids of a text, without special tokens around it."""


class End(NamedTuple):
    """Ids of one end of a text; `whole` is True if they are those of the whole text."""

    ids: Sequence[int]
    whole: bool


def first_size(room: int) -> int:
    """Return the characters that hold `room` tokens of most texts, and the margin of a cut."""
    return max(_AT_LEAST, _CHARACTERS * (room + _MARGIN))


def end_of(encode: Encode, text: str, room: int, side: Side, *, size: int | None = None) -> End:
    """Return the ids of the kept end of a text: at least `room`, if the whole text has as many.

    They equal those of the whole text, with three exceptions: texts without a position where a cut
    has no effect (one letter a hundred thousand times), texts that repeat a unit of more than four
    characters that often, and texts with more than 12 characters for each token on average. For
    these, they are the ids of the part that was read, and may be fewer.

    Args:
        encode: of the tokenizer.
        text: the whole text.
        room: number of ids wanted.
        side: the side that is cut off.
        size: characters to read first; `first_size` if None.
    """
    size = first_size(room) if size is None else size
    most = max(_ALWAYS, _LONGEST * (room + _MARGIN))
    while size < min(most, len(text)):
        if settles(encode, text, size, side):
            ids = encode(part_of(text, size, side))
            if len(ids) >= room + _MARGIN:
                return End(ids, False)
        size *= 2
    size = min(size, most)
    return End(encode(part_of(text, size, side)), size >= len(text))


def part_of(text: str, size: int, side: Side) -> str:
    """Return the `size` characters that remain when `side` is cut off."""
    if len(text) <= size:
        return text
    return text[:size] if side == "right" else text[len(text) - size :]


def settles(encode: Encode, text: str, size: int, side: Side) -> bool:
    """Return True if a cut that leaves `size` characters affects only a few of their ids."""
    around = min(_AROUND, size)
    start = len(text) - size

    def ids(beyond: int) -> Sequence[int]:
        """Return the ids from the common end to a place `beyond` the cut."""
        if side == "right":
            return encode(text[size - around : size + beyond])
        return encode(text[start - beyond : start + around])[::-1]

    cut = ids(0)
    for beyond in range(1, min(_BEYOND, start) + 1):
        same = sum(
            1
            for _ in takewhile(lambda pair: pair[0] == pair[1], zip(cut, ids(beyond), strict=False))
        )
        if len(cut) - same > _MARGIN or same < min(_MARGIN, len(cut)):
            return False
    return True
