"""BERT's WordPiece tokenization with a fast path that looks words up.

WordPiece takes the longest token a word begins with, so a word that is a token is exactly that
token: more than nine in ten words of English text are. Looking a word up takes a sixth of the
library's time. All other words are tokenized by the library, one by one: BERT's normalisation and
splitting of a word do not depend on anything beyond the next space. If there are many of them, the
library gets the whole texts instead.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

Encode = Callable[[Sequence[str]], Sequence[Sequence[int]]]
"""Returns the ids of each text, without special tokens."""

_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""Control characters, which BERT removes, so that the text around them is one word."""

_BETWEEN_SPACES = re.compile(r"[^ \t\n\r]+")
_WORDS = re.compile(r"[A-Za-z0-9]+|[!-/:-@\[-`{-~]")
"""ASCII words and punctuation."""

_LONG = 32 * 1024
"""Maximum characters of a text whose words are looked up.

Splitting holds the interpreter's lock, for at most 4 ms as measured; the library releases it.
"""

_DEAR = 4
"""Cost of a word alone in the library, relative to a word within a text, as measured."""


class WordPieces:
    """Table of the words that are tokens.

    Args:
        vocabulary: ids by token; only ASCII words and punctuation are used.
        added: added tokens, which are matched in a text before it is split.
        lowercase: True if words are made lower case.
    """

    def __init__(
        self, vocabulary: Mapping[str, int], added: Collection[str], *, lowercase: bool
    ) -> None:
        self._ids = {word: id_ for word, id_ in vocabulary.items() if _WORDS.fullmatch(word)}
        self._added = re.compile("|".join(map(re.escape, added))) if added else None
        self._lowercase = lowercase

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "WordPieces | None":
        """Return the table of a BERT tokenizer; None for any other."""
        # From the tokenizer's parts, because serialising a large vocabulary is slow.
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
        """Return the ids of each text, without special tokens.

        `library` is called at most once, for all words that are not in the table.
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
        """Split a text into ASCII words, punctuation, and other words between spaces.

        The whole text is one item if it cannot be split.
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
