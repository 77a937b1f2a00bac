"""Fair shares of places, pages and steps: no client waits for another's output to end."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.engine.fairness import PROTECTED_TOKENS, Shares
from inlay.engine.torch.fairness import STARVED
from inlay.engine.torch.scheduler import MAX_STARVED_STEPS
from inlay.engine.torch.sequence import Sequence
from inlay.messages.prompt import Tokens
from tests.engine.torch.simulation import Simulation, bounds, pages_of


def crowd(
    simulation: Simulation, client: str, count: int, *, max_tokens: int = 60
) -> list[Sequence]:
    """Sequences of one client with prompts of their own."""
    first = simulation.arrivals
    return [
        simulation.admit(Tokens([first + n] * 8), max_tokens=max_tokens, client=client)
        for n in range(count)
    ]


def running(simulation: Simulation) -> Counter[str | None]:
    """Running sequences of each client."""
    return Counter(sequence.client for sequence in simulation.scheduler.running)


def steps_until_token(simulation: Simulation, sequence: Sequence, limit: int = 2000) -> int:
    """Steps until `sequence` has its next token."""
    before = len(sequence.output)
    for steps in range(limit):
        if len(sequence.output) > before:
            return steps
        simulation.step()
    raise AssertionError(f"no token of {sequence} in {limit} steps")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_newcomer_has_a_token_at_once_beside_a_client_that_asked_for_everything(
    overlap: bool,
) -> None:
    simulation = Simulation(bounds(max_num_seqs=8, num_pages=200), overlap=overlap)
    crowd(simulation, "greedy", 24)
    for _ in range(20):
        simulation.step()
    assert running(simulation) == {"greedy": 8}
    (newcomer,) = crowd(simulation, "new", 1, max_tokens=4)
    # With overlap: nothing is taken before what is under way is read, and the token is read a step
    # later.
    assert steps_until_token(simulation, newcomer) <= (4 if overlap else 1)
    assert running(simulation) == {"greedy": 7, "new": 1}
    while newcomer in simulation.live:
        simulation.step()
    simulation.step()
    assert running(simulation) == {"greedy": 8}
    assert simulation.scheduler.preemptions == 1
    simulation.drain()
    assert all(
        len(sequence.output) == 60 for sequence in simulation.ended if sequence is not newcomer
    )


def test_a_token_that_is_not_read_yet_has_its_page_promised() -> None:
    simulation = Simulation(bounds(num_pages=16), overlap=True)
    sequence = simulation.admit(Tokens(range(10, 26)), max_tokens=4)
    simulation.step()
    assert sequence.has_pending_token
    assert (simulation.scheduler.table.available, simulation.scheduler.spare) == (15, 14)
    simulation.drain()


@pytest.mark.parametrize("overlap", [False, True])
def test_newcomers_have_a_token_at_once_beside_more_prompts_than_there_are_pages_for(
    overlap: bool,
) -> None:
    limits = bounds(
        max_num_seqs=64, num_pages=64, max_num_batched_tokens=256, max_model_len=512, page_size=16
    )
    simulation = Simulation(limits, overlap=overlap)
    shared = [10 + number for number in range(400)]
    waits = []
    for round_ in range(40):
        while len(simulation.live) < 32:
            number = simulation.arrivals
            simulation.admit(
                Tokens([*shared, number % 61]), max_tokens=80, client=f"crowd {number % 4}"
            )
        for _ in range(round_ % 7):
            simulation.step()
        newcomer = simulation.admit(Tokens([5, 6, 7]), max_tokens=1, client="new")
        waits.append(0)
        while newcomer in simulation.live:
            simulation.step()
            waits[-1] += 1
    assert max(waits) <= (4 if overlap else 1)


@pytest.mark.thorough
@pytest.mark.parametrize("pages", [2000, 130], ids=["places", "pages"])
def test_a_step_that_must_be_read_first_ranks_the_running_once_however_many_wait(
    pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranked = 0
    made = Shares.__init__

    def counting(self: Shares[Sequence], *arguments: Any, **more: Any) -> None:
        nonlocal ranked
        ranked += 1
        made(self, *arguments, **more)

    found = []
    for waiting in (4, 60):
        limits = bounds(max_num_seqs=64, num_pages=pages, max_num_batched_tokens=1024)
        simulation = Simulation(limits, overlap=True)
        crowd(simulation, "greedy", 64)
        for _ in range(20):
            simulation.step()
        for client in range(waiting):
            crowd(simulation, f"new {client}", 1)
        with monkeypatch.context() as patch:
            patch.setattr(Shares, "__init__", counting)
            ranked = 0
            simulation.step()
        assert simulation.scheduler.blocked
        found.append(ranked)
        simulation.drain()
    assert found[0] == found[1] <= 3


def test_clients_that_ask_for_everything_have_equal_shares_and_take_nothing_back_and_forth() -> (
    None
):
    simulation = Simulation(bounds(max_num_seqs=12, num_pages=400))
    for client, expected in (
        ("a", {"a": 12}),
        ("b", {"a": 6, "b": 6}),
        ("c", {"a": 4, "b": 4, "c": 4}),
    ):
        crowd(simulation, client, 40)
        for _ in range(25):
            simulation.step()
        assert running(simulation) == expected
    # Six for the second client, and two of each of both for the third.
    assert simulation.scheduler.preemptions == 6 + 4
    while len({sequence.client for sequence in simulation.live}) == 3:
        simulation.step()
    assert simulation.scheduler.preemptions == 10
    simulation.drain()


def test_a_client_keeps_one_place_however_many_clients_there_are() -> None:
    simulation = Simulation(bounds(max_num_seqs=4, num_pages=400))
    crowd(simulation, "0", 4)
    simulation.step()
    for client in range(1, 9):
        crowd(simulation, str(client), 2, max_tokens=50)
        simulation.step()
    assert running(simulation) == {"0": 1, "1": 1, "2": 1, "3": 1}
    simulation.drain()


def test_the_first_sequence_of_a_client_starts_before_the_second_of_another() -> None:
    simulation = Simulation(bounds(max_num_seqs=4, num_pages=400))
    crowd(simulation, "greedy", 300, max_tokens=5)
    late = crowd(simulation, "late", 2, max_tokens=5)
    simulation.step()
    assert running(simulation) == {"greedy": 2, "late": 2}
    assert all(sequence.num_computed_tokens for sequence in late)
    simulation.drain()


def test_one_sequence_with_all_pages_yields_to_a_newcomer_and_goes_on_after_it() -> None:
    simulation = Simulation(bounds(max_model_len=320, num_pages=20))
    huge = simulation.admit(Tokens([1] * 250), max_tokens=60, client="huge")
    while len(pages_of(huge)) < 18:
        simulation.step()
    newcomer = simulation.admit(Tokens([2] * 60), max_tokens=4, client="new")
    # Two steps for its prompt.
    assert steps_until_token(simulation, newcomer) <= 2
    assert huge.preemptions == 1
    before = simulation.scheduler.preemptions
    simulation.drain()
    assert simulation.scheduler.preemptions == before
    assert simulation.ended == [newcomer, huge]


def test_pages_that_several_choices_share_are_taken_from_all_of_them_together() -> None:
    simulation = Simulation(bounds(max_model_len=320, num_pages=20, max_num_seqs=8))
    choices = [simulation.admit(Tokens([1] * 224), max_tokens=20, client="many") for _ in range(5)]
    while len(simulation.scheduler.running) < 5:
        simulation.step()
    newcomer = simulation.admit(Tokens([2] * 100), max_tokens=4, client="new")
    assert steps_until_token(simulation, newcomer) <= 4
    assert all(sequence.preemptions for sequence in choices)
    simulation.drain()


def test_a_sequence_that_needs_more_than_a_share_is_not_starved_by_those_who_need_little() -> None:
    simulation = Simulation(bounds(max_model_len=320, num_pages=20))
    huge = simulation.admit(Tokens([1] * 240), max_tokens=70, client="huge")
    steps, longest, waited = 0, 0, 0
    while huge in simulation.live:
        small = [sequence for sequence in simulation.live if sequence.client == "small"]
        if len(small) < 3:
            crowd(simulation, "small", 3, max_tokens=40)
        tokens = len(huge.output)
        simulation.step()
        steps += 1
        waited = 0 if len(huge.output) > tokens else waited + 1
        longest = max(longest, waited)
        assert steps < 20 * STARVED
    assert longest <= STARVED + PROTECTED_TOKENS


def test_sequences_of_which_no_two_fit_take_turns() -> None:
    simulation = Simulation(bounds(max_model_len=320, num_pages=20))
    requests = [
        simulation.admit(Tokens([client] * 200), max_tokens=100, client=str(client))
        for client in range(3)
    ]
    simulation.drain()
    assert {len(request.output) for request in requests} == {100}
    assert simulation.scheduler.preemptions <= 6


def test_who_grows_beyond_its_share_takes_pages_from_its_own_sequences_first() -> None:
    simulation = Simulation(bounds(max_num_seqs=8, num_pages=24, max_model_len=160))
    small = crowd(simulation, "small", 2, max_tokens=60)
    crowd(simulation, "large", 6, max_tokens=140)
    while any(sequence in simulation.live for sequence in small):
        simulation.step()
    assert simulation.scheduler.preemptions > 0
    assert not any(sequence.preemptions for sequence in small)
    simulation.drain()


def test_an_early_client_within_its_share_is_not_preempted_for_those_beyond_theirs() -> None:
    simulation = Simulation(bounds(max_num_seqs=8, num_pages=24, max_model_len=160))
    crowd(simulation, "large", 7, max_tokens=140)
    for _ in range(20):
        simulation.step()
    (late,) = crowd(simulation, "late", 1, max_tokens=100)
    simulation.drain()
    assert late.preemptions == 0


def test_a_better_priority_keeps_what_it_has_whatever_its_client_has() -> None:
    simulation = Simulation(bounds(max_num_seqs=4, num_pages=100))
    urgent = [
        simulation.admit(Tokens([n] * 8), max_tokens=20, priority=-1, client="urgent")
        for n in range(4)
    ]
    simulation.step()
    crowd(simulation, "new", 1)
    for _ in range(10):
        simulation.step()
    assert running(simulation) == {"urgent": 4}
    simulation.drain()
    assert not any(sequence.preemptions for sequence in urgent)


def test_long_prompts_of_one_client_do_not_take_the_steps_of_another() -> None:
    simulation = Simulation(
        bounds(max_num_seqs=16, num_pages=800, max_model_len=800, max_num_batched_tokens=64)
    )
    for value in range(10):
        simulation.admit(Tokens([value] * 700), max_tokens=2, client="greedy")
    for _ in range(3):
        simulation.step()
    other = simulation.admit(Tokens([50] * 640), max_tokens=2, client="other")
    # An eighth of a step goes to those who waited for long, and of the rest half is its own.
    assert steps_until_token(simulation, other) <= 640 // 28 + 2
    simulation.drain()


def test_what_one_client_preempts_in_a_step_another_does_not_compute_in_it() -> None:
    limits = bounds(max_num_seqs=8, num_pages=18, max_model_len=200, max_num_batched_tokens=13)
    simulation = Simulation(limits)
    streams = crowd(simulation, "large", 5, max_tokens=60)
    while not all(len(stream.output) >= 2 for stream in streams):
        simulation.step()
    long = simulation.admit(Tokens([90] * 128), max_tokens=2, client="large")
    simulation.admit(Tokens([91] * 80), max_tokens=2, client="small")
    # The streams take one more page each, and in one step both prompts lack a page.
    while not long.preemptions:
        simulation.step()
        simulation.consistent()
    assert not pages_of(long)
    simulation.drain()
    assert len(simulation.ended) == 7


Ask = tuple[int, str, int, int]
"""A step, a client, the length of a prompt and of the output."""


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(
    asks=st.lists(
        st.tuples(
            st.integers(0, 60), st.sampled_from("aaaab"), st.integers(1, 100), st.integers(1, 60)
        ),
        min_size=1,
        max_size=40,
    ),
    places=st.integers(3, 8),
    pages=st.sampled_from([14, 30, 200]),
    overlap=st.booleans(),
    caching=st.booleans(),
)
def test_whatever_clients_ask_a_newcomer_gets_a_place_soon_and_nothing_is_lost(
    asks: list[Ask], places: int, pages: int, overlap: bool, caching: bool
) -> None:
    limits = bounds(max_num_seqs=places, num_pages=pages, max_model_len=200)
    simulation = Simulation(limits, overlap=overlap, prefix_caching=caching)
    made: dict[Sequence, int] = {}
    newcomer: Sequence | None = None
    for step in range(61):
        for number, (at, client, prompt, output) in enumerate(asks):
            if at == step:
                sequence = simulation.admit(
                    Tokens([number] * prompt), max_tokens=output, client=client
                )
                made[sequence] = output
        if step == 40:
            # Its need is within a third of any number of pages here.
            newcomer = simulation.admit(Tokens([77] * 20), max_tokens=3, client="new")
            made[newcomer] = 3
        if simulation.live:
            simulation.step()
            simulation.consistent()
    assert newcomer is not None
    # Of a huge sequence's turn there is at most one before it; the rest is its own prompt and
    # output.
    assert newcomer in simulation.ended or newcomer.num_computed_tokens
    simulation.drain()
    assert set(simulation.ended) == set(made)
    assert all(len(sequence.output) == wanted for sequence, wanted in made.items())
    assert simulation.scheduler.table.used == 0


@pytest.mark.thorough
@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(1, 40),
    prompt=st.integers(1, 60),
    output=st.integers(1, 40),
    places=st.integers(1, 8),
    pages=st.integers(8, 60),
)
def test_one_client_alone_is_served_as_without_clients(
    count: int, prompt: int, output: int, places: int, pages: int
) -> None:
    plans: list[list[list[tuple[str, int, int]]]] = []
    for client in (None, "alone"):
        simulation = Simulation(bounds(max_num_seqs=places, num_pages=pages, max_model_len=128))
        for number in range(count):
            simulation.admit(Tokens([number] * prompt), max_tokens=output, client=client)
        plans.append([])
        while simulation.live:
            spans = simulation.step().chunks
            plans[-1].append([(span.sequence.request.id, span.start, span.count) for span in spans])
    assert plans[0] == plans[1]
    assert max(map(len, plans[0])) == min(count, places) or pages < 60


def test_the_bounds_of_turns_are_in_order() -> None:
    assert 0 < MAX_STARVED_STEPS < PROTECTED_TOKENS < STARVED


def test_pages_that_come_free_are_kept_for_who_was_passed_over_too_often() -> None:
    """Beside a stream of another client's requests, each of which alone would fit."""
    simulation = Simulation(bounds(num_pages=12, max_num_seqs=8, max_num_batched_tokens=256))
    for n in range(3):
        simulation.admit(Tokens([n + 1] * 50), max_tokens=5 + 4 * n, client="many")
    simulation.step()
    large = simulation.admit(Tokens([199] * 100), max_tokens=2, client="one")
    for n in range(100):
        simulation.admit(Tokens([n + 10] * 50), max_tokens=5 + 4 * (n % 3), client="many")
    # Else it would be the other's next to end that makes room, twice as late.
    assert steps_until_token(simulation, large) < MAX_STARVED_STEPS + 4
