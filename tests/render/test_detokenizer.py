"""Ids that come in pieces read as ids that come at once, and nothing is shown that changes later."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.render import Renderer
from tests.examples import examples
from tests.render.directories import CORPUS, KINDS, renderer


def pieces(
    of: Renderer, ids: Sequence[int], *, skip: bool, cuts: Sequence[int] | None = None
) -> list[str]:
    """Return the text of each push and of the flush; one id for each push, or split at `cuts`."""
    detokenizer = of.detokenizer(skip_special_tokens=skip)
    bounds = [0, *(range(1, len(ids)) if cuts is None else sorted(cuts)), len(ids)]
    shown = [detokenizer.push(ids[start:stop]) for start, stop in itertools.pairwise(bounds)]
    return [*shown, detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(300))
@given(st.data())
def test_pieces_join_to_what_decoding_all_ids_gives(kind: str, data: st.DataObject) -> None:
    of = renderer(kind)
    ids = data.draw(st.lists(st.integers(0, of.vocab_size + 3), max_size=30))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=5))
    for skip in (False, True):
        whole = of.decode(ids, skip_special_tokens=skip)
        assert "".join(pieces(of, ids, skip=skip)) == whole
        assert "".join(pieces(of, ids, skip=skip, cuts=cuts)) == whole


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@settings(max_examples=examples(200))
@given(st.data())
def test_bytes_in_any_order_are_as_in_decoding_all_ids(kind: str, data: st.DataObject) -> None:
    """Single bytes: whole characters, broken ones, surrogates, overlong forms, between text and special tokens."""
    of = renderer(kind)
    by_byte = {tuple(of.token_bytes(id_)): id_ for id_ in range(of.vocab_size)}
    others = st.sampled_from([*of.encode("the town"), 1, 2])
    broken = st.lists(
        st.sampled_from(
            [
                b"\xf0",
                b"\x9f",
                b"\x99",
                b"\x82",
                b"\xe2",
                b"\x80",
                b"\xff",
                b"\xc0",
                b"\xed",
                b"\xa0",
                b"a",
            ]
        ),
        max_size=6,
    ).map(b"".join)
    characters = st.sampled_from(["🙂", "é", "東", "\ufffd"]).map(str.encode)
    ids: list[int] = []
    for part in data.draw(st.lists(broken | characters | others, max_size=12)):
        ids += [part] if isinstance(part, int) else [by_byte[(byte,)] for byte in part]
    for skip in (False, True):
        assert "".join(pieces(of, ids, skip=skip)) == of.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", [*sorted(KINDS.keys() - {"sparse"}), "byte_level_after_replace"])
@pytest.mark.parametrize(
    "text", [*CORPUS, "🙂🙃 emoji 👩‍👩‍👧 and 漢字", "  two  spaces ", "x\n\n\ny"]
)
def test_no_piece_of_good_text_has_a_replacement_character(kind: str, text: str) -> None:
    of = renderer(kind)
    ids = of.encode(text, add_special_tokens=False)
    shown = pieces(of, ids, skip=True)
    assert "".join(shown) == of.decode(ids, skip_special_tokens=True)
    assert not any("\ufffd" in piece for piece in shown)


def test_a_character_is_shown_with_its_last_byte_and_what_came_before_at_once() -> None:
    of = renderer("byte_level")
    smile = of.encode("🙂")
    assert len(smile) == 4
    assert pieces(of, [*of.encode("town"), *smile], skip=True)[-5:] == ["", "", "", "🙂", ""]


def test_broken_bytes_are_not_held_back_for_ever() -> None:
    of = renderer("byte_level")
    half = of.encode("🙂")[0]
    shown = pieces(of, [half] * 5, skip=True)
    assert shown == ["", "\ufffd", "\ufffd", "\ufffd", "\ufffd", "\ufffd"]


def test_a_run_of_byte_tokens_is_shown_when_it_has_ended() -> None:
    """It reads as text only if all of it does, so its first character cannot be known before."""
    of = renderer("byte_fallback")
    ids = of.encode("東🙂 town", add_special_tokens=False)
    shown = pieces(of, ids, skip=True)
    assert shown[:8] == [""] * 8
    assert shown[8].startswith("東🙂")
    first = ids[0]
    assert of.token_text(first) == " "


def test_the_space_in_front_of_a_text_is_dropped_and_no_other() -> None:
    of = renderer("byte_fallback")
    ids = of.encode("town town", add_special_tokens=False)
    assert "".join(pieces(of, ids, skip=True)) == "town town"
    assert "".join(pieces(of, of.encode("  town", add_special_tokens=False), skip=True)) == "  town"


def test_special_tokens_are_shown_or_skipped() -> None:
    of = renderer("byte_level")
    ids = of.encode("a<|im_end|>b<think>")
    assert "".join(pieces(of, ids, skip=True)) == "ab<think>"
    assert "".join(pieces(of, ids, skip=False)) == "a<|im_end|>b<think>"
