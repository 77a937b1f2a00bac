"""Stop strings against a naive search, at every way of cutting the text."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.errors import InvalidRequestError
from inlay.render import StopStrings


def naive(text: str, stops: Sequence[str], *, include: bool) -> tuple[str, str | None]:
    """(all that is shown, stop string): the longest stop that ends at the first place where one ends."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces: Sequence[str], stops: Sequence[str], *, include: bool) -> tuple[str, str | None]:
    matcher = StopStrings(stops, include=include)
    shown = ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        shown += text
        assert matcher.shown == len(shown)
        if stop is not None:
            assert matcher.matched == stop
            assert matcher.push("more") == ("", stop)
            assert matcher.flush() == ""
            return shown, stop
    return shown + matcher.flush(), None


letters = st.text("ab", max_size=14)
some_stops = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=400)
@given(letters, some_stops, st.booleans(), st.lists(st.integers(0, 14), max_size=6))
def test_any_cutting_of_the_text_gives_what_a_search_of_the_whole_gives(
    text: str, stops: list[str], include: bool, cuts: list[int]
) -> None:
    expected = naive(text, stops, include=include)
    bounds = [0, *sorted(cuts), len(text)]
    cut = [text[start:stop] for start, stop in itertools.pairwise(bounds)]
    assert run(cut, stops, include=include) == expected
    assert run(list(text), stops, include=include) == expected


@pytest.mark.parametrize("text", ["abcabd", "xxabab", "aabaabaac", "ab"])
def test_every_possible_cutting_of_short_texts(text: str) -> None:
    for stops in (["abd"], ["abab", "b"], ["aabaac", "baab"], ["zz"], ["b", "ab"], ["ba", "ab"]):
        for mask in range(2 ** (len(text) - 1)):
            cut = [""]
            for index, character in enumerate(text):
                cut[-1] += character
                if mask >> index & 1:
                    cut.append("")
            for include in (False, True):
                assert run(cut, stops, include=include) == naive(text, stops, include=include)


@given(letters, some_stops)
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopStrings(stops)
    seen = shown = ""
    for character in text:
        piece, stop = matcher.push(character)
        seen, shown = seen + character, shown + piece
        if stop is not None:
            return
        held = seen[len(shown) :]
        longest = max(
            (
                size
                for size in range(len(seen) + 1)
                for stop in stops
                if size < len(stop) and seen.endswith(stop[:size])
            ),
        )
        assert len(held) == longest


def test_the_stop_that_is_complete_first_wins_whatever_their_order() -> None:
    for stops in (["defg", "b"], ["b", "defg"]):
        assert run(["abcdefg"], stops, include=False) == ("a", "b")
    assert run(["abcd"], ["abcd", "bc"], include=False) == ("a", "bc")
    assert run(["abc"], ["bc", "abc"], include=False) == ("", "abc")


def test_without_stop_strings_all_text_is_shown_at_once() -> None:
    matcher = StopStrings(())
    assert matcher.push("abc") == ("abc", None)
    assert matcher.shown == 3
    assert matcher.flush() == ""


def test_characters_with_a_meaning_in_patterns_are_plain_here() -> None:
    assert run(["a^b]c\\d-e"], ["]c"], include=False) == ("a^b", "]c")
    assert run(["a^b]c\\d-e"], ["\\d", "-", "^"], include=False) == ("a", "^")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="must not be empty"):
        StopStrings(["a", ""])
