"""One end of a long text as ids, without tokenizing the rest.

A tokenizer looks at little of a text at a time, most often at a word, so that a place where a text
is cut has no influence on its tokens some way off. How far it reaches is seen and not supposed:
what lies around the cut is tokenized from it, and again from one to four characters beyond it. From
where on all of them have the same tokens, the whole text is taken to have them too. That is so but
in a run that repeats more than four characters, of which the tokenizer knows repetitions as tokens.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Literal, NamedTuple, TypeAlias

Side: TypeAlias = Literal["left", "right"]
"""Which side of a text is cut off."""

_CHARACTERS = 6
"""Characters a token stands for, in nearly all texts."""

_LONGEST = 12
"""Characters a token may stand for, in the mean.

Of a text of longer ones fewer tokens are found than are asked for.
"""

_AT_LEAST = 4096
"""Characters that are tokenized together at least."""

_ALWAYS = 256 * 1024
"""Characters that are looked at for the sake of few tokens."""

_MARGIN = 32
"""Tokens over which a cut may have influence."""

_AROUND = 2048
"""Characters in which its influence must end."""

_BEYOND = 4
"""Places beyond a cut that must lead to the same.

A run of "ab" has the same tokens from each second character on, and others between.
"""

Encode: TypeAlias = Callable[[str], Sequence[int]]
"""The ids of a text without the special tokens around it."""


class End(NamedTuple):
    """Ids of one end of a text; `whole` where they are all of it."""

    ids: Sequence[int]
    whole: bool


def first_size(room: int) -> int:
    """Characters that hold `room` tokens of most texts, and what a cut has influence on."""
    return max(_AT_LEAST, _CHARACTERS * (room + _MARGIN))


def end_of(encode: Encode, text: str, room: int, side: Side, *, size: int | None = None) -> End:
    """The ids of the end of a text that is kept: `room` at least, where the whole text has as many.

    They are those that the whole text has there, but where no place is found at which a cut has no
    influence (a single letter a hundred thousand times), where more than four characters are
    repeated that often, or where tokens stand for more than 12 characters in the mean. Then they
    are those of what was looked at, and may be fewer.

    Args:
        encode: of the tokenizer.
        text: whole.
        room: ids that are of interest.
        side: which side of the text is not.
        size: characters to look at first; `first_size` if None.
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
    """The `size` characters that stay when `side` is cut off."""
    if len(text) <= size:
        return text
    return text[:size] if side == "right" else text[len(text) - size :]


def settles(encode: Encode, text: str, size: int, side: Side) -> bool:
    """Whether a cut that leaves `size` characters of `text` has no influence on more than a few of their ids."""
    around = min(_AROUND, size)
    start = len(text) - size

    def ids(beyond: int) -> Sequence[int]:
        """From what both have on to the cut, or to a place beyond it."""
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


__all__ = ["End", "Side", "end_of", "first_size", "part_of", "settles"]
