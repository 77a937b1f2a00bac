"""Many texts and pairs to ids, as transformers makes them."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.base.errors import ContextLengthError, InvalidRequestError
from inlay.render import Renderer
from tests.embedding_models import WORDS, tiny_embedding, tiny_scoring
from tests.embedding_reference import tokenizer_of

text = st.lists(st.sampled_from(WORDS), max_size=30).map(" ".join)
some_text = st.lists(st.sampled_from(WORDS), min_size=1, max_size=30).map(" ".join)


@cache
def renderer(path: Path) -> Renderer:
    return Renderer.load(path)


@given(
    st.lists(text, min_size=1, max_size=5), st.integers(3, 20), st.sampled_from(["left", "right"])
)
@pytest.mark.parametrize("name", ["bert", "qwen3", "roberta"])
def test_texts_are_cut_as_transformers_cuts_them(
    name: str, texts: list[str], keep: int, side: Any
) -> None:
    path = tiny_embedding(name)
    reference = tokenizer_of(path)
    reference.truncation_side = side
    expected = reference(texts, truncation=True, max_length=keep)["input_ids"]
    found = renderer(path).encode_texts(texts, keep=keep, side=side)
    assert found == [tuple(ids) for ids in expected]
    reference.truncation_side = "right"
    whole = renderer(path).encode_texts(texts)
    assert whole == [tuple(ids) for ids in reference(texts)["input_ids"]]


@given(
    st.lists(st.tuples(some_text, some_text), min_size=1, max_size=5),
    st.none() | st.integers(6, 20),
    st.sampled_from(["left", "right"]),
)
@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_pairs_are_cut_as_transformers_cuts_them(
    name: str, pairs: list[tuple[str, str]], keep: int | None, side: Any
) -> None:
    path = tiny_scoring(name)
    reference = tokenizer_of(path)
    reference.truncation_side = side
    found = renderer(path).encode_pairs(pairs, keep=keep, side=side)
    for (first, second), pair in zip(pairs, found, strict=True):
        expected = reference(
            first, second, truncation=keep is not None, max_length=keep, return_token_type_ids=True
        )
        assert list(pair.ids) == expected["input_ids"]
        if name == "bert":
            types = [int(place >= pair.second_from) for place in range(len(pair.ids))]
            assert types == expected["token_type_ids"]
        else:
            assert pair.second_from == len(pair.ids)


def test_a_text_that_is_cut_is_not_tokenized_whole_and_begins_as_if_it_were() -> None:
    path = tiny_embedding("bert")
    long = " ".join(WORDS * 2000)
    (first,) = renderer(path).encode_texts([long], keep=20)
    (last,) = renderer(path).encode_texts([long], keep=20, side="left")
    whole = renderer(path).encode_texts([long])[0]
    assert first == (*whole[:19], whole[-1])
    assert last == (whole[0], *whole[-19:])
    ((pair, second_from),) = renderer(tiny_scoring("bert")).encode_pairs(
        [(long, "the hill")], keep=20
    )
    assert (len(pair), second_from) == (20, 17)


def test_spaces_without_end_are_no_tokens() -> None:
    (found,) = renderer(tiny_embedding("bert")).encode_texts(
        ["the" + " " * 100_000 + "hill"], keep=20
    )
    assert len(found) == 4


def test_what_cannot_be_tokenized_is_refused() -> None:
    bounded = Renderer.load(tiny_embedding("bert"), max_positions=64)
    with pytest.raises(InvalidRequestError, match="surrogates"):
        bounded.encode_texts(["fine", "\ud800"])
    with pytest.raises(InvalidRequestError, match="surrogates"):
        bounded.encode_pairs([("fine", "\ud800")])
    with pytest.raises(ContextLengthError, match="maximum context length is 64"):
        bounded.encode_texts(["the hill " * 50_000])
