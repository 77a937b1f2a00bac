"""WordPiece as BERT's tokenizers do it, most of it by looking words up.

WordPiece takes the longest token a word begins with, so a word that is a token is that token and nothing else: more than nine
words in ten of English text are. Looking one up takes a sixth of the time that the tokenizers library takes for it. All other words are
left to the library, one by one: what BERT's way to normalise and to split makes of a word does not depend on what is beyond
the next space.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence

from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer

Encode = Callable[[Sequence[str]], Sequence[Sequence[int]]]
"""The ids of each of some texts, without special tokens."""

_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""Are taken out, and what was around them is one word."""

_BETWEEN_SPACES = re.compile(r"[^ \t\n\r]+")
_WORDS = re.compile(r"[A-Za-z0-9]+|[!-/:-@\[-`{-~]")
"""Words and marks of ASCII."""


class WordPieces:
    """The words that are tokens.

    Args:
        vocabulary: ids by token; those with another character than ASCII's are not looked for.
        added: tokens that are found in a text as they are, before it is split.
        lowercase: whether words are made lower case.
    """

    def __init__(self, vocabulary: Mapping[str, int], added: Collection[str], *, lowercase: bool) -> None:
        self._ids = {word: id_ for word, id_ in vocabulary.items() if word.isascii()}
        self._added = re.compile("|".join(map(re.escape, added))) if added else None
        self._lowercase = lowercase

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "WordPieces | None":
        """Those of a tokenizer of BERT's kind; None of any other."""
        # Asked first: what follows takes a second for a vocabulary of many languages.
        if not (isinstance(tokenizer.normalizer, BertNormalizer) and isinstance(tokenizer.model, WordPiece)):
            return None
        parts = json.loads(tokenizer.to_str())
        model = parts["model"]
        if (
            parts["pre_tokenizer"] != {"type": "BertPreTokenizer"}
            or parts["truncation"] is not None
            or parts["padding"] is not None
            or any(token["normalized"] for token in parts["added_tokens"])
        ):
            return None
        longest = model["max_input_chars_per_word"]
        return cls(
            {word: id_ for word, id_ in model["vocab"].items() if len(word) <= longest},
            [token["content"] for token in parts["added_tokens"]],
            lowercase=parts["normalizer"]["lowercase"],
        )

    def encode(self, texts: Sequence[str], library: Encode) -> list[list[int]]:
        """The ids of each text, without special tokens; `library` is asked at most once, for all that is not looked up."""
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
        """What is looked up: words and marks; what lies between two spaces and is not all ASCII; or the whole text."""
        if _CONTROLS.search(text) or (self._added is not None and self._added.search(text)):
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
