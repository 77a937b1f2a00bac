"""Turns of adapters where more are asked for than a step has room for: counted in steps."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.engine.torch.adapter_turns import STARVED, TURN, AdapterTurns
from inlay.engine.torch.sequence import Sequence
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Request, Sampling


def asking(*names: str | None, priorities: dict[str, int] | None = None) -> list[Sequence]:
    """A sequence for each of the names, in order of arrival."""
    return [
        Sequence(
            Request(
                id=str(arrival),
                prompts=(Prompt.of(Tokens([1])),),
                params=Sampling(max_tokens=1),
                adapter=name,
                priority=(priorities or {}).get(name or "", 0),
            ),
            arrival=arrival,
        )
        for arrival, name in enumerate(names)
    ]


def test_nobody_rests_where_there_is_room_for_all() -> None:
    turns = AdapterTurns(2)
    for _ in range(3 * TURN):
        assert turns.choose(asking("a", None, "b", "a")) == frozenset()


def test_an_adapter_stays_for_its_turn_and_then_gives_way() -> None:
    turns, running = AdapterTurns(1), asking("a", "b", None)
    rested = [turns.choose(running) for _ in range(4 * TURN)]
    expected = [frozenset({"b"}), frozenset({"a"})] * 2
    assert rested == [names for names in expected for _ in range(TURN)]


def test_one_that_is_new_waits_for_the_end_of_a_turn_and_no_longer() -> None:
    turns = AdapterTurns(2)
    turns.choose(asking("a", "b"))
    steps = 1
    while "c" in turns.choose(asking("a", "b", "c")):
        steps += 1
    assert steps == TURN


@settings(derandomize=True, max_examples=100)
@given(
    most=st.integers(1, 4),
    plan=st.lists(st.tuples(st.sets(st.sampled_from("abcdefgh")), st.integers(1, 40)), max_size=30),
)
def test_an_adapter_rests_no_longer_than_the_turns_of_the_others(
    most: int, plan: list[tuple[set[str], int]]
) -> None:
    turns, rests = AdapterTurns(most), Counter[str]()
    for names, steps in plan:
        running = asking(*sorted(names), None)
        for _ in range(steps):
            resting = turns.choose(running)
            assert len(names - resting) == min(most, len(names))
            rests = Counter({name: rests[name] + 1 for name in resting})
            # Seven others, each for a turn, and the turn that was under way.
            assert max(rests.values(), default=0) <= 8 * TURN


def test_those_of_better_priority_go_first_but_nobody_rests_for_ever() -> None:
    turns, running = AdapterTurns(1), asking("a", "b", priorities={"a": 1, "b": 0})
    rested = [turns.choose(running) for _ in range(3 * STARVED)]
    counts = Counter(rested)
    assert rested[: STARVED - 1] == [frozenset({"a"})] * (STARVED - 1)
    assert 2 <= counts[frozenset({"b"})] <= 3
    # One that arrives with a better priority does not wait for the end of a turn.
    turns = AdapterTurns(1)
    turns.choose(asking("a", priorities={"a": 1}))
    assert turns.choose(running) == frozenset({"a"})


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_place_may_be_given_within_a_step(name: str) -> None:
    turns = AdapterTurns(2)
    turns.choose(asking("a", "b", "c"))
    resting = turns.give(name)
    assert name not in resting
    assert len(resting) == 1
