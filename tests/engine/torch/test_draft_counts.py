"""How many drafts a step has: as many as pay, and for no client more than others can wait for."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.engine.speculation import SpeculativeConfig
from inlay.engine.torch.grammar.grammars import Grammars
from inlay.engine.torch.plan import ScheduledChunk
from inlay.engine.torch.sequence import Sequence
from inlay.engine.torch.speculation import Speculator, costs, ngram
from inlay.engine.torch.speculation.costs import (
    WAIT,
    StepCosts,
    best_lengths,
    shared_lengths,
)
from inlay.engine.torch.speculation.ngram import NgramDrafter
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Grammar, Request, Sampling
from tests.engine.torch.simulation import Simulation, bounds
from tests.engine.torch.test_speculation import CONFIG, core
from tests.engine.torch.test_step import load, make_request, run
from tests.models import VOCAB_SIZE


@given(
    st.dictionaries(st.integers(0, 5), st.tuples(st.floats(0, 1), st.integers(0, 9)), max_size=4),
    st.integers(0, 20),
    st.lists(st.tuples(st.integers(1, 40), st.floats(1e-4, 1)), max_size=6),
)
def test_lengths_are_within_what_was_drafted_and_never_worse_than_none(
    acceptance: dict[int, tuple[float, int]], room: int, measured: list[tuple[int, float]]
) -> None:
    costs, rows = StepCosts(), max(1, len(acceptance))
    for count, seconds in measured:
        costs.learn(count, seconds)
    lengths = best_lengths(acceptance, rows, costs, room)
    assert all(0 < count <= acceptance[key][1] for key, count in lengths.items())
    drafted = sum(lengths.values())
    assert drafted <= room
    tokens = rows + sum(
        acceptance[key][0] ** place
        for key, count in lengths.items()
        for place in range(1, count + 1)
    )
    assert tokens / costs.relative(rows, drafted)[-1] >= rows - 1e-9


def test_where_a_row_costs_as_much_as_a_step_nothing_is_drafted() -> None:
    costs, flat = StepCosts(), StepCosts()
    for rows in [*range(1, 20)] * 60:
        costs.learn(rows, rows * 0.01)
        flat.learn(rows, 0.01)
    assert best_lengths({0: (0.9, 8)}, 1, costs, 100) == {}
    assert best_lengths({0: (0.9, 8)}, 1, flat, 100) == {0: 8}
    assert best_lengths({0: (0.9, 8)}, 1, flat, 3) == {0: 3}


class Coin:
    """Guesses one token, right in a third of the steps."""

    def __init__(self, expected: list[int]) -> None:
        self.expected = expected

    def available(self, sequence: Sequence, limit: int) -> int:
        return min(limit, 1)

    def draft(self, counts: Mapping[Sequence, int], room: int) -> dict[Sequence, tuple[int, ...]]:
        found: dict[Sequence, tuple[int, ...]] = {}
        for sequence in counts:
            at = len(sequence.output)
            found[sequence] = ((self.expected[at] + bool(at % 3)) % VOCAB_SIZE,)
        return found

    def forget(self, sequence: Sequence) -> None:
        pass


class DearDrafts(Speculator):
    """Takes 60% more for a step of two rows than for one of one."""

    def timed(self, chunks: Iterable[ScheduledChunk], seconds: float) -> None:
        chunks = list(chunks)
        super().timed(chunks, 0.001 * (0.4 + 0.6 * sum(chunk.count for chunk in chunks)))


def test_a_drafter_that_costs_more_than_it_gives_is_left_alone() -> None:
    request = make_request("a", Prompt.of(Tokens([5, 6, 7])), 140)
    expected = run(core(Speculator(NgramDrafter(CONFIG), 0)), request)["a"].output
    engine = core(DearDrafts(Coin(expected), 4))
    assert run(engine, request)["a"].output == expected
    assert 0 < engine.stats().num_drafts < 40


class Wrong(Coin):
    """Guesses eight tokens, all wrong."""

    def available(self, sequence: Sequence, limit: int) -> int:
        return min(limit, 8)

    def draft(self, counts: Mapping[Sequence, int], room: int) -> dict[Sequence, tuple[int, ...]]:
        return {sequence: (12,) * count for sequence, count in counts.items()}


def test_a_batch_learns_from_the_first_wrong_guesses_of_a_few() -> None:
    engine = core(DearDrafts(Wrong([]), 8), page_size=32)
    text, bias = Prompt.of(Tokens([5, 6, 7])), {11: 1000.0}
    found = run(engine, *(make_request(str(n), text, 120, logit_bias=bias) for n in range(8)))
    assert {tuple(each.output) for each in found.values()} == {(11,) * 120}
    assert 0 < engine.stats().num_draft_tokens < 20


def test_a_few_more_rows_are_tried_than_were_measured() -> None:
    costs = StepCosts()
    assert costs.drafts_tried(32) == 8
    costs.learn(1, 0.1)
    assert costs.drafts_tried(1) == 4
    costs.learn(5, 0.1)
    assert costs.drafts_tried(1) == 8
    costs.learn(40, 0.1)
    assert (costs.drafts_tried(1), costs.drafts_tried(32), costs.drafts_tried(512)) == (49, 18, 4)


def test_a_machine_that_stood_still_does_not_end_speculation() -> None:
    costs = StepCosts()
    for _ in range(60):
        costs.learn(1, 0.01)
    costs.learn(9, 5.0)
    assert best_lengths({0: (0.95, 8)}, 1, costs, 100) == {0: 8}
    for _ in range(60):
        costs.learn(9, 5.0)
    assert best_lengths({0: (0.95, 8)}, 1, costs, 100) == {}
    for _ in range(10_000):
        costs.learn(1, 0.01)
    assert best_lengths({0: (0.95, 8)}, 1, costs, 100) == {0: 8}


def test_drafts_are_compared_with_steps_that_have_none() -> None:
    costs = StepCosts()
    for _ in range(9):
        costs.learn(4, 0.01)
        costs.learn(8, 0.03, drafts=True)
    assert costs.measured(4)
    assert not costs.measured(8)
    # Tokens after drafts are chosen one by one: eight rows of sequences take less.
    costs.learn(8, 0.012)
    costs.learn(8, 9.0)
    costs.learn(8, 0.013)
    assert costs.relative(8, 1)[-1] > 2
    assert costs.relative(4, 4)[-1] > 2


# Beside other clients


def even(rows: int, seconds: float) -> StepCosts:
    """Costs of steps up to `rows` rows, each `seconds` dearer than the one before, from 0.01 on."""
    costs = StepCosts()
    for size in range(1, rows + 1):
        costs.learn(size, 0.01 + seconds * (size - 1))
    return costs


lines = st.lists(
    st.tuples(st.sampled_from("abc"), st.floats(0, 1), st.integers(0, 9)), min_size=1, max_size=6
)


@given(lines, st.integers(0, 30), st.sampled_from([0.0, 0.0005, 0.002, 0.01]), st.booleans())
def test_no_client_waits_longer_for_drafts_of_others_than_a_part_of_a_step(
    wanted: list[tuple[str, float, int]], room: int, rise: float, beside: bool
) -> None:
    rows = Counter(client for client, _, _ in wanted) + Counter({"quiet": 2} if beside else {})
    costs = even(60, rise)
    counts = shared_lengths(wanted, rows, costs, room)
    assert all(0 <= got <= asked for got, (_, _, asked) in zip(counts, wanted, strict=True))
    assert sum(counts) <= room
    cost = costs.relative(rows.total(), sum(counts))[-1]
    for client, own in rows.items():
        gained = sum(
            chance**draft
            for got, (of, chance, _) in zip(counts, wanted, strict=True)
            for draft in range(1, got + 1)
            if of == client
        )
        assert len(rows) == 1 or cost <= (1 + WAIT) * (1 + gained / own) + 1e-9
    if len(rows) == 1 or rise == 0:
        assert sum(counts) == min(room, sum(asked for _, _, asked in wanted))


def test_clients_that_draft_take_turns_where_another_waits() -> None:
    rows = {"many": 6, "one": 1, "quiet": 3}
    wanted = [*[("many", 0.99, 8)] * 6, ("one", 0.6, 8)]
    # A step of ten rows takes 19 ms, so that four drafts are a fifth of it.
    counts = shared_lengths(wanted, rows, even(80, 0.001), 100)
    assert (sum(counts[:-1]), counts[-1]) == (2, 2)
    # One that drafts nothing leaves the rest to the other.
    assert sum(shared_lengths(wanted[:-1], rows, even(80, 0.001), 100)) == 4
    # Who gains by drafts of its own waits longer for those of others.
    assert sum(shared_lengths(wanted, {"many": 6, "one": 1}, even(80, 0.001), 100)) > 4


class LinearCosts(Speculator):
    """Takes 10 ms for a step, and 1 ms more for each row."""

    def timed(self, chunks: Iterable[ScheduledChunk], seconds: float) -> None:
        chunks = list(chunks)
        super().timed(chunks, 0.01 + 0.001 * sum(chunk.count for chunk in chunks))


def rows_of_steps(speculator: Speculator, requests: list[Request], grammars: Grammars) -> list[int]:
    """Rows of each step in which all of `requests` decode."""
    engine = core(speculator, num_pages=96)
    for request in requests:
        grammar = request.sampling.grammar
        state = None if grammar is None else grammars.start(grammar, (), ()).state.result(60)
        engine.admit(request, grammar=state)
    found, ends = [], False
    while not ends:
        before = engine.stats().progress
        ends = any(output.finish_reason for output in engine.step())
        found.append(engine.stats().progress - before)
    engine.abort_all()
    engine.close()
    return found[1:]


@pytest.mark.parametrize("kind", ["n-grams", "forced"])
def test_a_client_that_drafts_much_makes_steps_of_others_longer_by_a_bounded_part(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "_LASTING", 16)
    model = load("llama")
    grammars = Grammars(Path(model.path), model.vocab_size, model.eos_token_ids)
    told = Grammar("json_schema", json.dumps({"const": "a lantern in the harbour " * 20}))

    def requests(quiet: str) -> list[Request]:
        text = Prompt.of(Tokens([5, 6, 7]))
        forced = kind == "forced"
        busy = {"grammar": told} if forced else {"logit_bias": {11: 1000.0}}
        return [
            *(make_request(f"a{n}", text, 150, client="a", **busy) for n in range(4)),
            *(
                make_request(
                    f"b{n}", text, 150, client=quiet, temperature=1.0, seed=n, ignore_eos=True
                )
                for n in range(2)
            ),
        ]

    def speculator() -> Speculator:
        return LinearCosts(NgramDrafter(CONFIG) if kind == "n-grams" else None, 8)

    try:
        alone = rows_of_steps(speculator(), requests("a"), grammars)
        beside = rows_of_steps(speculator(), requests("b"), grammars)
    finally:
        grammars.close()
    assert max(alone) > 20
    # Six rows take 16 ms, four more a quarter of that. What more take is tried, four by four.
    assert max(beside[:6]) <= 14
    assert 6 < max(beside[6:]) <= 10
    # What a step takes without drafts is measured again and again.
    assert len(beside) > 34
    assert all(6 in beside[first : first + 17] for first in range(len(beside) - 17))


def test_drafts_take_nothing_of_the_step_from_prompts_of_others() -> None:
    chunks: dict[bool, list[int]] = {}
    for speculates in (False, True):
        simulation = Simulation(bounds(num_pages=64), speculates=speculates)
        for n in range(2):
            simulation.admit(Tokens([n] * 8), max_tokens=90, client="a")
        for _ in range(4):
            simulation.step()
        other = simulation.admit(Tokens(range(100)), max_tokens=4, client="b")
        plans = [simulation.step() for _ in range(4)]
        chunks[speculates] = [
            chunk.count for plan in plans for chunk in plan.chunks if chunk.sequence is other
        ]
        drafted = sum(len(chunk.drafts) for plan in plans for chunk in plan.chunks)
        assert (drafted > 0) == speculates
    assert chunks[False] == chunks[True] == [30, 30, 30, 10]


def test_prompts_become_text_a_part_a_step_and_clients_have_equal_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ngram, "READ", 20)

    def sequence(client: str, length: int) -> Sequence:
        request = Request(
            id=client,
            prompts=(Prompt.of(Tokens([5, 6] * (length // 2))),),
            params=Sampling(max_tokens=9),
            client=client,
        )
        return Sequence(request, arrival=0)

    drafter = NgramDrafter(SpeculativeConfig(method="ngram"))
    long, later, other = sequence("a", 40), sequence("a", 40), sequence("b", 18)
    found = []
    for _ in range(9):
        found.append([drafter.available(one, 4) for one in (long, later, other)])
        drafter.draft({}, 0)
    # In the first step it is not known yet that there is another client.
    assert found[:3] == [[0, 0, 0], [0, 0, 4], [4, 0, 4]]
    assert [sum(step[place] > 0 for step in found) for place in range(3)] == [7, 3, 8]
    drafter.forget(other)
    # One client has all of a step.
    assert drafter.available(sequence("a", 20), 4) == 4
