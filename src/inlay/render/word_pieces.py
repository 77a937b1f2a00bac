"""WordPiece as BERT's tokenizers do it, most of it by looking words up.

WordPiece takes the longest token a word begins with, so a word that is a token is that token and
nothing else: more than nine words in ten of English text are. Looking one up takes a sixth of the
time that the tokenizers library takes for it. All other words are left to the library, one by one:
what BERT's way to normalise and to split makes of a word does not depend on what is beyond the next
space. Where there are many of them, it is given whole texts, as if no word had been looked up.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

Encode = Callable[[Sequence[str]], Sequence[Sequence[int]]]
"""The ids of each of some texts, without special tokens."""

_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""Are taken out, and what was around them is one word."""

_BETWEEN_SPACES = re.compile(r"[^ \t\n\r]+")
_WORDS = re.compile(r"[A-Za-z0-9]+|[!-/:-@\[-`{-~]")
"""Words and marks of ASCII."""

_LONG = 32 * 1024
"""Characters up to which words are looked up.

While a text is taken apart no other thread has a turn, for 4 ms at most, as measured; the
library lets them work.
"""

_DEAR = 4
"""A word on its own takes the library so many times what it takes within a text, as measured."""


class WordPieces:
    """The words that are tokens.

    Args:
        vocabulary: ids by token; those that are no word or mark of ASCII are not looked for.
        added: tokens that are found in a text as they are, before it is split.
        lowercase: whether words are made lower case.
    """

    def __init__(
        self, vocabulary: Mapping[str, int], added: Collection[str], *, lowercase: bool
    ) -> None:
        self._ids = {word: id_ for word, id_ in vocabulary.items() if _WORDS.fullmatch(word)}
        self._added = re.compile("|".join(map(re.escape, added))) if added else None
        self._lowercase = lowercase

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "WordPieces | None":
        """Those of a tokenizer of BERT's kind; None of any other."""
        # Asked of the parts, not read from all of it as text: that takes a while for a large
        # vocabulary.
        model, normalizer = tokenizer.model, tokenizer.normalizer
        added = tokenizer.get_added_tokens_decoder().values()
        if (
            not isinstance(model, models.WordPiece)
            or not isinstance(normalizer, normalizers.BertNormalizer)
            or not isinstance(tokenizer.pre_tokenizer, pre_tokenizers.BertPreTokenizer)
            or tokenizer.truncation is not None
            or tokenizer.padding is not None
            or any(token.normalized for token in added)
        ):
            return None
        longest = model.max_input_chars_per_word
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        return cls(
            {word: id_ for word, id_ in vocabulary.items() if len(word) <= longest},
            [token.content for token in added],
            lowercase=normalizer.lowercase,
        )

    def encode(self, texts: Sequence[str], library: Encode) -> list[list[int]]:
        """The ids of each text, without special tokens.

        `library` is asked at most once, for all that is not looked up.
        """
        found: list[list[int]] = []
        gaps: list[tuple[int, list[str], list[int | None]]] = []
        for index, text in enumerate(texts):
            words = self._words(text)
            ids = list(map(self._ids.get, words))
            if None in ids:
                gaps.append((index, words, ids))
            found.append(ids)  # type: ignore[arg-type]  # those with a gap are replaced
        if gaps:
            others = list(
                dict.fromkeys(
                    word
                    for _, words, ids in gaps
                    for word, id_ in zip(words, ids, strict=True)
                    if id_ is None
                )
            )
            if _DEAR * len(others) > sum(len(words) for _, words, _ in gaps):
                wholes = library([texts[index] for index, _, _ in gaps])
                for (index, _, _), ids_of_text in zip(gaps, wholes, strict=True):
                    found[index] = list(ids_of_text)
                return found
            known = dict(zip(others, library(others), strict=True))
            for index, words, ids in gaps:
                whole: list[int] = []
                for word, id_ in zip(words, ids, strict=True):
                    if id_ is None:
                        whole += known[word]
                    else:
                        whole.append(id_)
                found[index] = whole
        return found

    def _words(self, text: str) -> list[str]:
        """What is looked up: words and marks; what lies between two spaces and is not all ASCII.

        Or the whole text.
        """
        if (
            len(text) > _LONG
            or _CONTROLS.search(text)
            or (self._added is not None and self._added.search(text))
        ):
            return [text]
        if text.isascii():
            return _WORDS.findall(text.lower() if self._lowercase else text)
        words: list[str] = []
        for part in _BETWEEN_SPACES.findall(text):
            if part.isascii():
                words += _WORDS.findall(part.lower() if self._lowercase else part)
            else:
                words.append(part)
        return words


__all__ = ["WordPieces"]
