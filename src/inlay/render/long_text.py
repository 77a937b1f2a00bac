"""Tokenization of a long text a piece at a time.

A tokenizer takes up to 460 bytes of memory and 2.5 us for each character that it is given at once,
and cannot be stopped. So a long text is cut where that changes nothing: the text around a cut has
the same tokens whole and in its two parts. Memory is bounded so whatever a text holds, and reserved
(`memory_for`); tokenizing ends between pieces when nobody waits for it (`check_wanted`).
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain, islice
from typing import NamedTuple, TypeAlias

from inlay.base.errors import InvalidRequestError
from inlay.base.pace import reserved, yield_gil
from inlay.messages.fields import check_length

Encode: TypeAlias = Callable[[str], Sequence[int]]
"""Returns the ids of a text, without special tokens around it."""

PIECE = 64 * 1024
"""Characters of a piece, about."""

LONG = 3 * PIECE // 2
"""Characters of a text beyond which it is cut."""

UNSPLIT = 4 * PIECE
"""Characters that are tokenized together where no cut is found, as within one word."""

MEMORY_OF_A_CHARACTER = 460
"""Bytes that tokenizing takes at most."""

_AROUND = 512
"""Characters on each side of a cut whose tokens must not change."""

_WORDS = re.compile(r"[A-Za-z](?= [A-Za-z])")
_AT_WORDS, _AT_ANY = 4, 6
"""Places that are tried near the end of a piece: between words, and any."""


class TextPiece(NamedTuple):
    """A piece of a text; `end` is where the next one begins, maybe beyond a space between them."""

    text: str
    end: int


def memory_for(*texts: str) -> AbstractContextManager[None]:
    """Reserve the memory of tokenizing `texts` at once, as `inlay.base.pace.reserved`."""
    return reserved(MEMORY_OF_A_CHARACTER * sum(map(len, texts)))


def pieces_of(encode: Encode, text: str) -> Iterator[TextPiece]:
    """Yield the pieces of a text, whose ids one after the other are the text's.

    Args:
        encode: of the tokenizer.
        text: of any length.

    Raises:
        InvalidRequestError: more than `UNSPLIT` characters cannot be cut.
        Unwanted: as `check_wanted`.
    """
    start = 0
    while len(text) - start > LONG:
        cut = _cut(encode, text, start)
        if cut is None:
            break
        at, following = cut
        yield TextPiece(text[start:at], following)
        start = following
    if len(text) - start > UNSPLIT:
        raise InvalidRequestError(
            f"a text of {len(text)} characters has more than {UNSPLIT} without a place where the "
            f"model's tokenizer splits them, from character {start} on; allowed: {UNSPLIT}",
            param="prompt",
        )
    yield TextPiece(text[start:], len(text))


def encode_long(encode: Encode, text: str, limit: int | None = None) -> list[int]:
    """Return the ids of a text.

    Args:
        encode: of the tokenizer.
        text: of any length.
        limit: ids beyond which the rest of the text is not tokenized; None for no limit.

    Raises:
        ContextLengthError: the beginning of the text has more ids than `limit`.
        InvalidRequestError: as `pieces_of`.
        Unwanted: as `check_wanted`.
    """
    ids: list[int] = []
    for piece in pieces_of(encode, text):
        ids += encode(piece.text)
        if piece.end < len(text):
            check_limit(len(ids), limit, piece.end, text)
    return ids


def check_limit(count: int, limit: int | None, end: int, text: str) -> None:
    """Raise `ContextLengthError` if the ids of a text up to `end` are more than `limit`."""
    if limit is not None:
        says = f"the first {end} of {len(text)} characters take {count}"
        check_length(count, limit, says=says)


def _cut(encode: Encode, text: str, start: int) -> tuple[int, int] | None:
    """Return where a piece from `start` ends and where the next one begins; None if nowhere."""
    for target in range(start + PIECE, min(len(text), start + UNSPLIT), PIECE):
        words = _WORDS.finditer(text, target, target + _AROUND)
        between = (found.end() for found in islice(words, _AT_WORDS))
        for at in chain(between, range(target, target + _AT_ANY)):
            # Tokenizers that begin a text with a space do so without the one at the cut.
            for following in (at, at + 1) if text[at : at + 1] == " " else (at,):
                yield_gil()
                if _is_neutral(encode, text, at, following):
                    return at, following
    return None


def _is_neutral(encode: Encode, text: str, at: int, following: int) -> bool:
    before, behind = text[at - _AROUND : at], text[following : following + _AROUND]
    return [*encode(before), *encode(behind)] == [*encode(before + text[at:following] + behind)]
