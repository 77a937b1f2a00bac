"""One end of a text is tokenized as all of it is, and the rest is not looked at."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from inlay.base.errors import InvalidRequestError
from inlay.messages.prompt import Buffer, Prompt, Rows, Tokens
from inlay.render import Renderer, Side, ends
from tests.render.directories import CORPUS, KINDS, llama_like, qwen_like, renderer

WORDS = [word for line in CORPUS for word in line.split()]
PIECES = st.sampled_from(
    [*WORDS, " ", "  ", "\n", "a" * 40, "é", "🙂", "e\u0301", "<|im_end|>", "0" * 9, "ﬁ"]
)
TEXTS = st.lists(PIECES, min_size=40, max_size=300).map(" ".join) | st.lists(
    PIECES, min_size=40, max_size=300
).map("".join)
SIDES: list[Side] = ["left", "right"]


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    """So that texts need not be long to be cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ends, "_AT_LEAST", 128)
        patch.setattr(ends, "_AROUND", 128)
        patch.setattr(ends, "_ALWAYS", 2048)
        yield


@cache
def template_of(kind: str) -> Renderer:
    return Renderer.load(qwen_like() if kind == "byte_level" else llama_like(), max_positions=100)


def cut(ids: Any, keep: int, side: Side) -> Any:
    return ids[:keep] if side == "right" else ids[max(0, len(ids) - keep) :]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "sparse"])
@pytest.mark.parametrize("side", SIDES)
@given(text=TEXTS, keep=st.integers(1, 40))
def test_an_end_of_a_text_has_the_tokens_it_has_in_the_whole(
    kind: str, side: Side, text: str, keep: int
) -> None:
    for special in (False, True):
        whole = renderer(kind).encode(text, add_special_tokens=special)
        found = renderer(kind).encode(text, add_special_tokens=special, keep=keep, side=side)
        assert cut(found, keep, side) == cut(whole, keep, side)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("side", SIDES)
def test_no_more_is_tokenized_than_is_kept_and_what_a_cut_reaches(kind: str, side: Side) -> None:
    long = " ".join(WORDS * 3000)
    seen: list[int] = []

    def counted(text: str) -> tuple[int, ...]:
        seen.append(len(text))
        return renderer(kind).encode(text, add_special_tokens=False)

    found = ends.end_of(counted, long, 50, side)
    assert not found.whole
    assert len(found.ids) >= 50
    assert sum(seen) < 8192 < len(long)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("piece", ["a", " ", "a b ", "🙂", "\u0301"])
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace", "word_piece"])
def test_a_text_without_an_end_costs_no_more_than_a_bound(
    kind: str, piece: str, side: Side
) -> None:
    long = piece * (1_000_000 // len(piece))
    seen: list[int] = []

    def counted(text: str) -> tuple[int, ...]:
        seen.append(len(text))
        return renderer(kind).encode(text, add_special_tokens=False)

    ends.end_of(counted, long, 20, side)
    assert sum(seen) <= 4 * 2048


def test_a_place_that_is_not_certain_is_looked_for_further_on() -> None:
    # How a run of one letter becomes tokens depends on where it begins.
    model = models.BPE({"a": 0, "aa": 1, "aaaa": 2, "b": 3}, [("a", "a"), ("aa", "aa")])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()

    def encode(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text).ids
        return found

    text = "b " * 500 + "a" * 501 + " b" * 50
    assert not ends.settles(encode, text, 300, "left")
    assert ends.settles(encode, text, 99, "left")
    assert encode(text)[-100:] != encode(text[-300:])[-100:]
    assert ends.end_of(encode, text, 100, "left", size=300).ids[-100:] == encode(text)[-100:]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("period", ["ab", "abc", "abcd"])
def test_a_run_of_a_few_characters_is_not_taken_for_certain(period: str, side: Side) -> None:
    # Where pairs begin depends on where the run begins, and from one character beyond a cut nothing
    # of that is seen.
    tokens = {letter: n for n, letter in enumerate("abcd ")}
    merges = [*((period[:end], period[end]) for end in range(1, len(period))), (period, period)]
    for one, two in merges:
        tokens[one + two] = len(tokens)
    tokenizer = Tokenizer(models.BPE(tokens, merges))

    def encode(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text).ids
        return found

    run = period * 301
    if side == "left":
        assert not any(ends.settles(encode, run, size, side) for size in range(200, 212))
    for keep in range(1, 21):
        assert cut(ends.end_of(encode, run, keep, side).ids, keep, side) == cut(
            encode(run), keep, side
        )


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("side", SIDES)
@given(texts=st.lists(TEXTS, min_size=1, max_size=3), keep=st.integers(1, 60))
def test_an_end_of_a_chat_with_rows_is_that_of_the_whole(
    kind: str, side: Side, texts: list[str], keep: int
) -> None:
    rows = [
        Rows(Buffer(np.full((3, 1), n, np.float32).tobytes()), "float32", (3, 1))
        for n in range(len(texts))
    ]
    content: list[dict[str, Any]] = []
    for index, text in enumerate(texts):
        content += [{"type": "text", "text": text}, {"type": "prompt_embeds", "index": index}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": "fine"},
        {"role": "user", "content": texts[0]},
    ]
    chat: Callable[..., Prompt] = partial(template_of(kind).chat, messages, rows=rows)
    whole, found = chat(), chat(keep=keep, side=side)
    length = min(keep, len(whole))
    if side == "right":
        assert found.slice(0, length) == whole.slice(0, length)
    else:
        assert found.slice(len(found) - length, len(found)) == whole.slice(
            len(whole) - length, len(whole)
        )


@pytest.mark.parametrize("side", SIDES)
def test_a_text_far_beyond_the_limit_is_cut_and_not_refused(side: Side) -> None:
    bounded = template_of("byte_level")
    text = " ".join(WORDS * 3000)
    whole = renderer("byte_level").encode(text)
    assert cut(bounded.encode(text, keep=100, side=side), 100, side) == cut(whole, 100, side)
    prompt = bounded.chat([{"role": "user", "content": text}], keep=100, side=side)
    assert isinstance(prompt, Prompt)
    (tokens,) = prompt.segments
    assert isinstance(tokens, Tokens)
    assert 100 <= len(prompt) < 8192


def test_what_cannot_be_tokenized_is_refused_where_it_is_kept() -> None:
    with pytest.raises(InvalidRequestError, match="surrogates"):
        renderer("byte_level").encode("a " * 5000 + "\ud800", keep=10)
