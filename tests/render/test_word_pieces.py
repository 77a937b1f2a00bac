"""Words that are looked up give what the tokenizers library gives."""

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from inlay.base.errors import InvalidRequestError
from inlay.render.texts import TextEncoder
from inlay.render.word_pieces import WordPieces

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [
    "the",
    "a",
    "harbour",
    "Harbour",
    "town",
    "é",
    "naive",
    "straße",
    "NEW",
    "york",
    "un",
    "123",
    "cls",
    "mask",
    "[",
    "]",
    "##",
    "#",
    ".",
    ",",
    "!",
    "東",
    "京",
    "x",
    "y",
]
PIECES = ["##s", "##ing", "##able", "##3", "##e", "##é", "##東", "##x"]
LONG = "y" * 101
CONTROLLED = "x\x0by"
"""A token that no text becomes: what controls are taken out of is one word."""


@cache
def tokenizer(lowercase: bool, strip: bool | None) -> Tokenizer:
    vocabulary = {
        word: number for number, word in enumerate([*SPECIAL, *WORDS, *PIECES, LONG, CONTROLLED])
    }
    found = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    found.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip)
    found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    found.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    found.add_special_tokens(SPECIAL)
    return found


_PARTS = [
    *WORDS,
    *PIECES,
    *SPECIAL,
    LONG,
    "naïve",
    "HARBOURS",
    "İ",
    "e\u0301",
    "[mask]",
    "don't",
    "a\u200bb",
    "ß",
]
_SEPARATORS = [
    "",
    " ",
    "\t",
    "\n",
    "\x00",
    "\x0b",
    "\x1c",
    "\x7f",
    "\x85",
    "\xa0",
    "\u3000",
    "-",
    "\u0301",
    "\ufeff",
]
texts = st.one_of(
    st.text(max_size=40),
    st.lists(st.sampled_from([*_PARTS, *_SEPARATORS]), max_size=12).map("".join),
    st.lists(st.sampled_from(_PARTS), max_size=12).map(" ".join),
)


KNOWN = " the" * 60
"""So many that what is no token is given to the library word by word."""


@given(
    st.lists(texts, max_size=6),
    st.sampled_from(["", KNOWN]),
    st.booleans(),
    st.sampled_from([None, True, False]),
)
@example(["the harbour", "Harbours \u0301e the"], KNOWN, True, None)
@example([LONG, LONG + " x"], KNOWN, False, False)
@example([CONTROLLED], "", False, False)
def test_ids_are_those_of_the_library(
    starts: list[str], end: str, lowercase: bool, strip: bool | None
) -> None:
    library = tokenizer(lowercase, strip)
    assert WordPieces.of(library) is not None
    encoder = TextEncoder(library)
    given_texts = [start + end for start in starts]
    for special in (True, False):
        expected = [
            tuple(library.encode(text, add_special_tokens=special).ids) for text in given_texts
        ]
        assert encoder.encode(given_texts, add_special_tokens=special) == expected


def test_words_that_are_tokens_are_not_given_to_the_library() -> None:
    words = WordPieces.of(tokenizer(True, None))
    assert words is not None
    asked: list[str] = []

    def library(texts: Sequence[str]) -> list[list[int]]:
        asked.extend(texts)
        return [[7]] * len(asked)

    ids = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    found = words.encode(["The town, the a!", "the towns straße the a a a", "", "towns"], library)
    assert asked == ["towns", "straße"]
    assert found[0] == [ids[word] for word in ["the", "town", ",", "the", "a", "!"]]
    assert found[1:] == [[ids["the"], 7, 7, ids["the"], *[ids["a"]] * 3], [], [7]]


def test_texts_with_many_words_that_are_no_tokens_are_given_to_the_library_whole() -> None:
    words = WordPieces.of(tokenizer(True, None))
    assert words is not None
    asked: list[str] = []

    def library(texts: Sequence[str]) -> list[list[int]]:
        asked.extend(texts)
        return [[7, number] for number in range(len(texts))]

    found = words.encode(["the towns straße the", "the", "ships"], library)
    assert asked == ["the towns straße the", "ships"]
    assert found == [[7, 0], [len(SPECIAL)], [7, 1]]


def test_a_long_text_is_left_to_the_library_which_lets_other_threads_request() -> None:
    words = WordPieces.of(tokenizer(True, None))
    assert words is not None
    asked: list[str] = []

    def library(texts: Sequence[str]) -> list[list[int]]:
        asked.extend(texts)
        return [[7]]

    long = "the " * 8192 + "a"
    assert words.encode([long, long[4:]], library)[0] == [7]
    assert asked == [long]


def test_other_tokenizers_are_left_to_the_library() -> None:
    plain = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]"))
    assert WordPieces.of(plain) is None
    normalized = Tokenizer.from_str(tokenizer(True, None).to_str())
    normalized.add_tokens([AddedToken("new york", normalized=True)])
    assert WordPieces.of(normalized) is None
    assert TextEncoder(normalized).encode(["néw york"]) == [
        tuple(normalized.encode("néw york").ids)
    ]
    cut = Tokenizer.from_str(tokenizer(True, None).to_str())
    cut.enable_truncation(5)
    assert WordPieces.of(cut) is None


def test_half_a_character_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="unpaired surrogates"):
        TextEncoder(tokenizer(True, None)).encode(["the \ud800"])
