"""Stop strings against a naive search, at every way of cutting the text."""

import itertools
import random
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.base.errors import InvalidRequestError
from inlay.render import StopMatcher, StopStrings
from inlay.render.stop_strings import STATE_BYTES
from tests.examples import examples


def naive(text: str, stops: Sequence[str], *, include: bool) -> tuple[str, str | None]:
    """(all that is shown, stop string).

    The longest stop that ends at the first place where one ends.
    """
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces: Sequence[str], stops: Sequence[str], *, include: bool) -> tuple[str, str | None]:
    return shown_by(StopMatcher(StopStrings(stops), include=include), pieces)


def shown_by(matcher: StopMatcher, pieces: Sequence[str]) -> tuple[str, str | None]:
    shown = ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        shown += text
        if stop is not None:
            assert matcher.matched == stop
            assert matcher.push("more") == ("", stop)
            assert matcher.flush() == ""
            return shown, stop
    return shown + matcher.flush(), None


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (["abcd", "bcd", "cx"], "abcx"),
        (["abcd", "bcd", "cx"], "zabcxz"),
        (["aaab", "aab", "ac"], "aaac"),
        (["abcde", "bcdf", "cdg", "dh"], "abcdh"),
    ],
)
def test_what_begins_within_several_others_is_found_when_they_come_to_nothing(
    stops: list[str], text: str, include: bool
) -> None:
    """The state of "abc" passes over that of "bc", which has no other continuation, to "c"."""
    assert run([text], stops, include=include) == naive(text, stops, include=include)
    assert run(list(text), stops, include=include) == naive(text, stops, include=include)


letters = st.text("ab", max_size=14)
some_stops = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=examples(400))
@given(letters, some_stops, st.booleans(), st.lists(st.integers(0, 14), max_size=6))
def test_any_cutting_of_the_text_gives_what_a_search_of_the_whole_gives(
    text: str, stops: list[str], include: bool, cuts: list[int]
) -> None:
    expected = naive(text, stops, include=include)
    bounds = [0, *sorted(cuts), len(text)]
    cut = [text[start:stop] for start, stop in itertools.pairwise(bounds)]
    assert run(cut, stops, include=include) == expected
    assert run(list(text), stops, include=include) == expected


OF_PATTERNS = "[]\\^-|&~\n"


@given(
    st.text(OF_PATTERNS, max_size=8),
    st.lists(st.text(OF_PATTERNS, min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_characters_of_patterns_stand_for_themselves(text: str, stops: list[str]) -> None:
    expected = naive(text, stops, include=False)
    assert run([text], stops, include=False) == run(list(text), stops, include=False) == expected


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
    matcher = StopMatcher(StopStrings(stops))
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


def test_characters_with_a_meaning_in_patterns_are_plain_here() -> None:
    assert run(["a^b]c\\d-e"], ["]c"], include=False) == ("a^b", "]c")
    assert run(["a^b]c\\d-e"], ["\\d", "-", "^"], include=False) == ("a", "^")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="must not be empty"):
        StopStrings(["a", ""])


@settings(max_examples=examples(300))
@given(st.lists(letters, min_size=1, max_size=4), some_stops, st.booleans())
def test_choices_that_share_an_automaton_do_not_notice_each_other(
    texts: list[str], stops: list[str], include: bool
) -> None:
    shared = StopStrings(stops)
    matchers = [StopMatcher(shared, include=include) for _ in texts]
    shown = ["" for _ in texts]
    for place in range(max(map(len, texts))):
        for index, text in enumerate(texts):
            shown[index] += matchers[index].push(text[place : place + 1])[0]
    for index, text in enumerate(texts):
        found = (shown[index] + matchers[index].flush(), matchers[index].matched)
        assert found == naive(text, stops, include=include)


def test_stop_strings_cost_nothing_before_a_text_reaches_into_them() -> None:
    stops = ["a" * 4095 + end for end in "bcde"]
    shared = StopStrings(stops)
    assert len(shared) == 1
    matcher = StopMatcher(shared)
    matcher.push("xyz" * 1000 + "aaa")
    assert len(shared) == 4
    matcher.push("a" * 5000)
    assert len(shared) <= sum(map(len, stops))


def test_no_character_costs_more_steps_than_there_are_stop_strings() -> None:
    # Every suffix of the text is a prefix of another stop string, and no text ends any of them.
    text = "".join(random.Random(1).choice("ab") for _ in range(600))
    stops = [text[start : start + 255] + "!" for start in range(64)]
    shared = StopStrings(stops)
    matcher = StopMatcher(shared)
    for character in text:
        before = len(shared)
        matcher.push(character)
        assert len(shared) - before <= 64
    assert len(shared) <= sum(map(len, stops))


@pytest.mark.parametrize("stops", [["a" * 4095 + "b"], ["a" * size + "b" for size in range(1, 65)]])
def test_a_text_that_breaks_off_a_long_match_takes_few_steps(stops: list[str]) -> None:
    shared = StopStrings(stops)
    matcher = StopMatcher(shared)
    matcher.push("a" * 4095)
    visited = 0

    class Counted(list[Any]):
        def __getitem__(self, place: Any) -> Any:
            nonlocal visited
            visited += 1
            return super().__getitem__(place)

    shared._next = Counted(shared._next)
    matcher.push("c")
    assert visited <= 4 + 2 * len(stops)


def test_an_automaton_takes_no_more_memory_than_is_charged_for_it() -> None:
    stops = ["a" * 4095 + end for end in "bcde"]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        shared = StopStrings(stops)
        matchers = [StopMatcher(shared) for _ in range(100)]
        for matcher in matchers:
            matcher.push("a" * 4095)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 4096 * 100 < taken < StopStrings.size(stops) == 4 * 4096 * STATE_BYTES
