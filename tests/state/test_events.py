"""Events of a response that is made again: what was published stays, whatever the pieces are."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay_state.events import DiffersError, EventLog
from tests.examples import examples


def made(texts: list[list[str]]) -> list[dict[str, Any]]:
    """The events of items with these pieces."""
    events: list[dict[str, Any]] = [{"type": "response.created"}]
    for index, pieces in enumerate(texts):
        events.append({"type": "response.output_item.added", "item_id": str(index)})
        events += [
            {"type": "response.output_text.delta", "item_id": str(index), "delta": piece}
            for piece in pieces
        ]
        events.append({"type": "response.output_item.done", "item_id": str(index)})
    return events


def cut(text: str, places: list[int]) -> list[str]:
    """The pieces of a text, cut at some places."""
    at = sorted({place % len(text) for place in places} - {0}) if text else []
    return [text[i:j] for i, j in zip([0, *at], [*at, len(text)], strict=True) if text[i:j]]


places = st.lists(st.integers(0, 100), max_size=6)


@given(
    st.lists(st.tuples(st.text(min_size=1, max_size=12), places, places), min_size=1, max_size=3),
    st.integers(0, 40),
)
@settings(max_examples=examples(300))
def test_a_second_making_goes_on_where_the_first_was_lost(
    texts: list[tuple[str, list[int], list[int]]], lost: int
) -> None:
    log = EventLog([])
    for event in made([cut(text, one) for text, one, _ in texts])[:lost]:
        log.take(event)
    before = list(log.lines)
    again = EventLog(list(before))
    again.again()
    for event in made([cut(text, other) for text, _, other in texts]):
        again.take(event)
    assert again.lines[: len(before)] == before
    events = [msgspec.json.decode(line, type=dict[str, Any]) for line in again.lines]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    for index, (text, _, _) in enumerate(texts):
        deltas = [event["delta"] for event in events if event.get("item_id") == str(index)
                  and "delta" in event]  # fmt: skip
        assert "".join(deltas) == text
    kinds = [event["type"] for event in events if "delta" not in event]
    assert kinds == [event["type"] for event in made([[] for _ in texts])]


@pytest.mark.parametrize("other", ["hello", "he", "halt and more"])
def test_another_text_is_seen(other: str) -> None:
    log = EventLog([])
    for event in made([["hall", "o"]]):
        log.take(event)
    log.again()

    def again() -> None:
        for event in made([[other]]):
            log.take(event)

    with pytest.raises(DiffersError):
        again()
