"""Batch tokenization of texts and pairs for embedding and scoring models, with truncation."""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple, TypeAlias

from tokenizers import Encoding, Tokenizer

from inlay.base.errors import InvalidRequestError
from inlay.render.ends import End, Side, end_of, first_size, part_of
from inlay.render.long_text import LONG, check_limit, encode_long, memory_for, pieces_of
from inlay.render.word_pieces import WordPieces

_CHARACTERS = 32
"""Characters for each kept token beyond which a text of a pair is cut before tokenization.

It saves the time and memory of tokenizing the rest.
"""

_PROBE = "a"


class Pair(NamedTuple):
    """Ids of a pair of texts; the second text begins at `second_from`."""

    ids: tuple[int, ...]
    second_from: int


Range: TypeAlias = tuple[int, int] | None
"""First character of a token and the one behind its last; None of a special token."""


class TextEncoder:
    """Tokenizer of many texts at once. Thread-safe.

    Args:
        tokenizer: of the model.
        max_positions: of long texts, what is beyond it is not tokenized; None for no limit.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_positions: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._limit = max_positions
        self._words = WordPieces.of(tokenizer)
        bare = tokenizer.encode(_PROBE, add_special_tokens=False).ids
        whole = tokenizer.encode(_PROBE, add_special_tokens=True).ids
        start = next(
            (n for n in range(len(whole) - len(bare) + 1) if whole[n : n + len(bare)] == bare),
            len(whole),
        )
        self._before, self._after = whole[:start], whole[start + len(bare) :]

    @property
    def special_ids(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer puts before and after a text."""
        return self._before, self._after

    def encode(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        keep: int | None = None,
        side: Side = "right",
    ) -> list[tuple[int, ...]]:
        """Return the ids of each text.

        Args:
            texts: any texts.
            add_special_tokens: add those the tokenizer puts around a text; truncation keeps them.
            keep: maximum ids, or None for all.
            side: the side of a text that is cut off.

        Raises:
            InvalidRequestError: a text holds unpaired surrogates, or as `encode_long`.
            ContextLengthError: all ids of a long text are wanted, and it has too many.
        """
        before, after = (self._before, self._after) if add_special_tokens else ([], [])
        if keep is None:
            short = [text for text in texts if len(text) <= LONG]
            rest = iter(self._ids(short, add_special_tokens=add_special_tokens))
            return [
                tuple(next(rest))
                if len(text) <= LONG
                else (*before, *encode_long(self._alone, text, self._limit), *after)
                for text in texts
            ]
        room = max(0, keep - len(before) - len(after))
        found = []
        for ids in self._cut(texts, room, side):
            kept = (
                ids
                if len(ids) <= room
                else ids[:room]
                if side == "right"
                else ids[len(ids) - room :]
            )
            found.append((*before, *kept, *after)[:keep])
        return found

    def end(self, text: str, *, add_special_tokens: bool, keep: int, side: Side) -> End:
        """Return at least `keep` ids of one end of a text, with the special tokens there.

        Exceptions as in `end_of`.
        """
        found = end_of(self._bare, text, keep, side)
        before, after = (self._before, self._after) if add_special_tokens else ([], [])
        if found.whole:
            return End((*before, *found.ids, *after), True)
        return End((*before, *found.ids) if side == "right" else (*found.ids, *after), False)

    def ranges(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        keep: int | None = None,
        side: Side = "right",
    ) -> list[list[Range]]:
        """Return the range of characters of each id that `encode` returns.

        Arguments and errors as `encode`.
        """
        before, after = (self._before, self._after) if add_special_tokens else ([], [])
        room = None if keep is None else max(0, keep - len(before) - len(after))
        found = []
        for text in texts:
            part = text if room is None else part_of(text, _enough(room), side)
            start = outside = len(text) - len(part) if side == "left" else 0
            own: list[Range] = []
            for piece in pieces_of(self._alone, part):
                with memory_for(piece.text):
                    offsets = self._tokenizer.encode(piece.text, add_special_tokens=False).offsets
                own += [(start + first, start + stop) for first, stop in offsets]
                start = outside + piece.end
            if room is not None and len(own) > room:
                own = own[:room] if side == "right" else own[len(own) - room :]
            whole = [*[None] * len(before), *own, *[None] * len(after)]
            found.append(whole if keep is None else whole[:keep])
        return found

    def _cut(self, texts: Sequence[str], room: int, side: Side) -> list[Sequence[int]]:
        """Return the ids of each text without special tokens; of a long text, those of `end_of`."""
        size = first_size(room)
        # Short texts, the usual case, are tokenized together.
        short = iter(
            self._ids([text for text in texts if len(text) <= size], add_special_tokens=False)
        )
        return [
            next(short) if len(text) <= size else end_of(self._bare, text, room, side).ids
            for text in texts
        ]

    def _bare(self, text: str) -> Sequence[int]:
        return self._alone(text) if len(text) <= LONG else encode_long(self._alone, text)

    def _alone(self, text: str) -> Sequence[int]:
        return self._ids([text], add_special_tokens=False)[0]

    def clipped(self, texts: Sequence[str], tokens: Sequence[int]) -> list[str]:
        """Return the first `tokens` tokens of each text as text; 0 keeps the whole text.

        Special tokens are not counted. As vLLM's `truncate_text_to_tokens`, but a text is first cut
        to the characters that certainly hold its tokens.

        Raises:
            InvalidRequestError: a text holds unpaired surrogates.
        """
        return [
            self._clipped(text, most) if most else text
            for text, most in zip(texts, tokens, strict=True)
        ]

    def _clipped(self, text: str, most: int) -> str:
        text = part_of(text, _enough(most), "right")
        if len(text) > LONG:
            start = count = 0
            for piece in pieces_of(self._alone, text):
                own = len(self._alone(piece.text))
                if count + own > most:
                    kept = self._clipped(piece.text, most - count) if count < most else ""
                    return text[:start] + kept
                start, count = piece.end, count + own
            return text
        while text:
            try:
                with memory_for(text):
                    encoding = self._tokenizer.encode(text, add_special_tokens=False)
            except TypeError as error:
                raise _surrogates() from error
            if len(encoding.ids) <= most:
                break
            end = min(encoding.offsets[most - 1][1], encoding.offsets[most][0])
            # A cut text may have more tokens on its own; it gets shorter in each round.
            text = text[: min(end, len(text) - 1)]
        return text

    def pairs(
        self, pairs: Sequence[tuple[str, str]], *, keep: int | None = None, side: Side = "right"
    ) -> list[Pair]:
        """Return the ids of each pair of texts, with the special tokens around and between them.

        Args:
            pairs: any texts.
            keep: maximum ids, or None for all; the longer text is cut first.
            side: the side of a text that is cut off.

        Raises:
            InvalidRequestError: a text holds unpaired surrogates.
        """
        parts = [
            pair
            if keep is None
            else (part_of(pair[0], _enough(keep), side), part_of(pair[1], _enough(keep), side))
            for pair in pairs
        ]
        short = [pair for pair in parts if sum(map(len, pair)) <= LONG]
        try:
            with memory_for(*chain(*short)):
                made = self._tokenizer.encode_batch_fast(short)
            encodings = iter(made)
            found = []
            for (first, second), part in zip(pairs, parts, strict=True):
                encoding = next(encodings) if sum(map(len, part)) <= LONG else None
                if encoding is None or (keep is not None and len(encoding.ids) > keep):
                    encoding = self._one_by_one(first, second, keep, side)
                found.append(_pair(encoding.ids, encoding.type_ids))
        except TypeError as error:
            raise _surrogates() from error
        return found

    def _one_by_one(self, first: str, second: str, keep: int | None, side: Side) -> Encoding:
        """Return the ids of a pair whose texts are tokenized apart, for their length or to cut."""
        if keep is None:
            one, two = self._encoding(first), self._encoding(second)
            return self._tokenizer.post_process(one, two)
        # A tokenizer's own truncation is a setting of the whole object, which other threads use.
        room = max(0, keep - self._tokenizer.num_special_tokens_to_add(True))
        one, two = (
            self._encoding(part_of(text, _enough(room), side), keep=True)
            for text in (first, second)
        )
        first_length, second_length = _shared(len(one.ids), len(two.ids), room)
        one.truncate(first_length, direction=side)
        two.truncate(second_length, direction=side)
        return self._tokenizer.post_process(one, two)

    def _encoding(self, text: str, *, keep: bool = False) -> Encoding:
        """Tokenize a text of any length; raises as `encode_long` unless an end of it is kept."""
        found = Encoding()
        for piece in pieces_of(self._alone, text):
            with memory_for(piece.text):
                more = self._tokenizer.encode(piece.text, add_special_tokens=False)
            found = Encoding.merge([found, more]) if len(found.ids) else more
            if not keep and piece.end < len(text):
                check_limit(len(found.ids), self._limit, piece.end, text)
        return found

    def _ids(self, texts: Sequence[str], *, add_special_tokens: bool) -> Sequence[Sequence[int]]:
        if self._words is None:
            return self._tokenized(texts, add_special_tokens=add_special_tokens)
        found = self._words.encode(texts, partial(self._tokenized, add_special_tokens=False))
        return (
            [[*self._before, *ids, *self._after] for ids in found] if add_special_tokens else found
        )

    def _tokenized(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        try:
            with memory_for(*texts):
                encodings = self._tokenizer.encode_batch_fast(
                    list(texts), add_special_tokens=add_special_tokens
                )
                return [encoding.ids for encoding in encodings]
        except TypeError as error:
            raise _surrogates() from error


def _enough(room: int) -> int:
    """Return the characters that certainly hold `room` ids, unless tokens are very long."""
    return _CHARACTERS * (room + 32)


def _shared(one: int, two: int, room: int) -> tuple[int, int]:
    """Return the ids that two texts of `one` and `two` ids keep, `room` in all.

    As "longest_first" of the tokenizers library.
    """
    small, large = sorted((one, two))
    large = small if small > room else max(small, room - small)
    if small + large > room:
        small = room // 2
        large = small + room % 2
    return (large, small) if one > two else (small, large)


def _pair(ids: list[int], types: list[int]) -> Pair:
    return Pair(tuple(ids), types.index(1) if 1 in types else len(ids))


def _surrogates() -> InvalidRequestError:
    return InvalidRequestError(
        "text must be valid Unicode, without unpaired surrogates", param="input"
    )
