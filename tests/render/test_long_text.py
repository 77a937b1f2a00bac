"""Long texts are tokenized in pieces that are cut where it changes nothing, and end when unwanted."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from inlay.base.errors import ContextLengthError, InvalidRequestError
from inlay.base.pace import Unwanted, lending, while_wanted
from inlay.render.long_text import (
    LONG,
    MEMORY_OF_A_CHARACTER,
    PIECE,
    UNSPLIT,
    encode_long,
    pieces_of,
)
from inlay.render.renderer import Renderer
from inlay.render.template import ChatTemplates
from inlay.render.texts import TextEncoder

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "then",
    "seventeen",
    "dogs",
    "came,",
    "barking:",
    "\n\n",
    "1234",
    "x=5;",
    "naïve",
]


def prose(seed: int, length: int) -> str:
    source = random.Random(seed)
    return " ".join(source.choices(WORDS, k=length // 5))[:length]


def wordpiece() -> Tokenizer:
    characters = ["[UNK]", *"abcdefghijklmnopqrstuvwxyz0123456789=;:,", "the", "cat", "##s", "##t"]
    model = models.WordPiece({word: id_ for id_, word in enumerate(characters)}, unk_token="[UNK]")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([prose(1, 5000), "a" * 64, " " * 64], trainer)
    return tokenizer


def begun_with_a_space() -> Tokenizer:
    """As Llama 2: nothing splits a text into words, and a space is put before it."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>"], show_progress=False, max_token_length=8
    )
    tokenizer.train_from_iterator([prose(2, 5000)], trainer)
    return tokenizer


def unigram() -> Tokenizer:
    pieces = [("<unk>", 0.0), ("▁", -2.0), ("▁the", -3.0), ("aa", -3.0)]
    pieces += [(character, -4.0) for character in "abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, False))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "wordpiece": wordpiece,
    "byte level": byte_level,
    "begun with a space": begun_with_a_space,
    "unigram": unigram,
}


class Watched:
    """A tokenizer's ids, and the length of the longest text that it was given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.longest = 0

    def __call__(self, text: str) -> list[int]:
        self.longest = max(self.longest, len(text))
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", range(3))
def test_pieces_have_the_ids_of_the_whole(kind: str, number: int) -> None:
    text = prose(number, 3 * PIECE + 1000 * number)
    encode = Watched(KINDS[kind]())
    found = encode_long(encode, text)
    assert encode.longest <= UNSPLIT
    assert found == encode(text)
    assert len(list(pieces_of(encode, text))) > 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unit", ["a", "ab", " ", "\n", "é", "水", "1", "!", "\ufdfa", "a\u0301"])
def test_whatever_a_text_repeats_a_tokenizer_is_given_no_more_of_it_than_allowed(
    kind: str, unit: str
) -> None:
    text = unit * ((UNSPLIT + PIECE) // len(unit))
    encode = Watched(KINDS[kind]())
    with suppress(InvalidRequestError):
        encode_long(encode, text)
    assert encode.longest <= LONG


def test_one_word_of_megabytes_is_refused_before_it_is_tokenized() -> None:
    encode = Watched(wordpiece())
    with pytest.raises(InvalidRequestError, match="of 15000000 characters has more than 262144"):
        encode_long(encode, "a" * 15_000_000)
    assert encode.longest < PIECE
    # As long as the tokenizer may have it, it is one token.
    assert len(encode_long(encode, "a" * UNSPLIT)) == 1


def test_text_beyond_the_limit_is_read_no_further() -> None:
    encode = Watched(byte_level())
    calls = list[str]()

    def counted(text: str) -> list[int]:
        calls.append(text)
        return encode(text)

    with pytest.raises(ContextLengthError, match=r"is 100 tokens; the first 65\d\d\d of \d+ char"):
        encode_long(counted, prose(1, 10 * PIECE), 100)
    assert sum(map(len, calls)) < 2 * PIECE


def test_tokenizing_ends_when_nobody_waits_for_it() -> None:
    left, encode = threading.Event(), byte_level()
    calls = 0

    def leaving(text: str) -> list[int]:
        nonlocal calls
        if len(text) > PIECE // 2:
            calls += 1
            left.set()
        ids: list[int] = encode.encode(text, add_special_tokens=False).ids
        return ids

    with pytest.raises(Unwanted):
        while_wanted(left, encode_long, leaving, prose(1, 10 * PIECE))
    assert calls == 1


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_tokenize_cuts_long_texts(kind: str) -> None:
    """As texts, as pairs, clipped, and one end of them."""
    tokenizer = KINDS[kind]()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A:0 $B:1")
    texts = TextEncoder(tokenizer)
    long, other = prose(1, 2 * PIECE), prose(2, 2 * PIECE)
    whole, second = (tokenizer.encode(text, add_special_tokens=False).ids for text in (long, other))
    assert texts.encode([long, "the", other]) == [
        tuple(whole), tuple(tokenizer.encode("the").ids), tuple(second)
    ]  # fmt: skip
    (pair,) = texts.pairs([(long, other)])
    assert pair.ids == (*whole, *second)
    assert pair.second_from == len(whole)
    (cut,) = texts.pairs([(long, other)], keep=50_000)
    assert len(cut.ids) == min(50_000, len(pair.ids))
    (clipped,) = texts.clipped([long], [len(whole) - 100])
    assert tokenizer.encode(clipped, add_special_tokens=False).ids == whole[:-100]
    found = texts.end(long, add_special_tokens=False, keep=40_000, side="left")
    assert list(found.ids)[-10_000:] == whole[-10_000:]
    renderer = Renderer(tokenizer, ChatTemplates({}, {}), {}, max_positions=1000)
    with pytest.raises(ContextLengthError):
        renderer.encode(long)
    with pytest.raises(ContextLengthError):
        renderer.encode_pairs([("the", long)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [PIECE // 2, 3 * PIECE], ids=["short", "long"])
def test_every_way_to_tokenize_reserves_its_memory(kind: str, length: int) -> None:
    renderer = Renderer(KINDS[kind](), ChatTemplates({}, {}), {})
    text, asked = prose(1, length), [0]
    held = 0
    # Words that are tokens are looked up.
    least = 0 if kind == "wordpiece" else MEMORY_OF_A_CHARACTER * len(text)

    @contextmanager
    def lend(num_bytes: int) -> Iterator[None]:
        nonlocal held
        # Who holds memory and waits for more may wait for ever.
        assert held == 0
        held = num_bytes
        asked.append(num_bytes)
        yield
        held = 0

    for way in (
        lambda: renderer.encode(text),
        lambda: renderer.encode(text, keep=10_000_000),
        lambda: renderer.encode_texts([text]),
        lambda: renderer.encode_pairs([("the", text)]),
        lambda: renderer.encode_pairs([(text, text)], keep=10_000),
        lambda: renderer.clipped([text], [10_000_000]),
    ):
        asked.clear()
        lending(lend, way)
        # But for spaces at cuts.
        assert sum(asked) >= 0.99 * least
        assert max(asked) <= MEMORY_OF_A_CHARACTER * UNSPLIT
