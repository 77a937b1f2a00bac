"""The scheduler in single situations, over simulated pages."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.base.errors import ContextLengthError, InvalidRequestError
from inlay.engine.torch.loading import usual_positions
from inlay.engine.torch.scheduler import MAX_STARVED_STEPS
from inlay.engine.torch.sequence import Sequence
from inlay.messages.prompt import Tokens
from tests.engine.torch.simulation import POISON, Simulation, bounds, pages_of, rows


def test_a_prompt_and_output_longer_than_the_model_are_refused() -> None:
    simulation = Simulation(bounds(max_model_len=64))
    with pytest.raises(ContextLengthError, match="maximum context length is 64 tokens"):
        simulation.admit(Tokens([1] * 60), max_tokens=5)
    simulation.admit(Tokens([1] * 60), max_tokens=4)
    assert simulation.drain()


def test_what_needs_more_pages_than_there_are_is_refused() -> None:
    simulation = Simulation(bounds(num_pages=2))
    with pytest.raises(ContextLengthError, match="maximum context length is 32 tokens"):
        simulation.admit(Tokens([1] * 32), max_tokens=1)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at least one position"):
        Simulation(bounds()).admit(Tokens([]))


def test_an_atomic_segment_larger_than_a_step_is_refused() -> None:
    simulation = Simulation(bounds())
    with pytest.raises(
        InvalidRequestError, match="in one step of at most 32 positions, and are 33"
    ):
        simulation.admit(rows(*[1] * 33, atomic=True))
    simulation.admit(Tokens([1]), rows(*[1] * 32, atomic=True), Tokens([2]))
    assert simulation.drain() == 3


def test_a_newcomer_waits_for_no_more_than_the_usual_positions_of_a_step() -> None:
    limits = bounds(
        max_model_len=4096, max_num_batched_tokens=2048, num_pages=512, usual_positions=64
    )
    simulation = Simulation(limits)
    for token, client in enumerate(("a", "b", "c")):
        simulation.admit(Tokens([token] * 1000), client=client)
    assert sum(chunk.count for chunk in simulation.step().chunks) == 64 + 3
    simulation.admit(Tokens([3] * 5), client="newcomer")
    plan = simulation.step()
    assert sum(chunk.count for chunk in plan.chunks) == 64 + 4
    assert [chunk.count for chunk in plan.chunks if chunk.samples] == [5]


def test_a_larger_model_computes_fewer_positions_of_prompts_in_a_step() -> None:
    qwen, gemma, demo = (28, 1536), (18, 640), (4, 128)
    assert [usual_positions(*shape, 1) for shape in (qwen, gemma, demo)] == [64, 256, 512]
    assert [usual_positions(*qwen, threads) for threads in (2, 4, 8, 64)] == [64, 128, 256, 512]
    assert usual_positions(0, 64, 1) == 512


def test_what_must_not_be_split_is_computed_in_a_larger_step() -> None:
    limits = bounds(max_model_len=512, max_num_batched_tokens=256, usual_positions=32, num_pages=32)
    simulation = Simulation(limits)
    simulation.admit(Tokens([1]), rows(*[1] * 200, atomic=True), Tokens([2]))
    assert simulation.drain()


def test_a_finished_prompt_is_found_again_but_for_its_last_position() -> None:
    simulation = Simulation(bounds())
    simulation.admit(Tokens([1] * 32))
    simulation.drain()
    again = simulation.admit(Tokens([1] * 32))
    plan = simulation.step()
    assert [(span.start, span.count) for span in plan.chunks] == [(16, 16)]
    assert again.cached_tokens == 16


@pytest.mark.parametrize(
    ("group", "lost", "cached"),
    [
        (1, [], 96),
        (1, [0, 1, 2, 3], 96),
        (1, [5], 80),
        (1, [4], 64),
        (1, [4, 2], 32),
        (1, [4, 1], 64),
        (1, [4, 2, 0], 0),
        (0, [3], 48),
        (0, [0], 0),
    ],
)
def test_a_hit_needs_all_pages_without_a_window_and_the_last_ones_with_one(
    group: int, lost: list[int], cached: int
) -> None:
    simulation = Simulation(bounds(num_pages=64, windows=(None, 20)))
    first = simulation.admit(Tokens([1] * 100))
    simulation.drain()
    for index in lost:
        simulation.scheduler.table.invalidate(
            simulation.named(first, group, index), keep_verified=False
        )
    simulation.step()
    assert simulation.scheduler.table.dirty == 0
    again = simulation.admit(Tokens([1] * 100))
    # Once what is missing is computed, what follows it may be a hit again.
    simulation.step()
    assert again.cached_tokens == cached


@pytest.mark.thorough
def test_a_long_output_holds_the_pages_of_its_window() -> None:
    simulation = Simulation(bounds(num_pages=16, max_model_len=4096, windows=(40,)))
    simulation.admit(Tokens([1] * 20), max_tokens=3000)
    most = 0
    while simulation.live:
        simulation.step()
        most = max(most, simulation.scheduler.table.used)
    assert most == 4


def test_a_window_longer_than_the_pages_allow_is_refused_with_the_length_that_fits() -> None:
    simulation = Simulation(bounds(num_pages=10, windows=(None, 40), max_model_len=200))
    # Six pages without a window, and four that 40 positions can touch.
    with pytest.raises(ContextLengthError, match="maximum context length is 96 tokens"):
        simulation.admit(Tokens([1] * 96), max_tokens=1)
    simulation.admit(Tokens([1] * 90), max_tokens=6)
    simulation.drain()
    with pytest.raises(ContextLengthError, match="maximum context length is 80 tokens"):
        simulation.admit(rows(*[1] * 30, atomic=True), Tokens([1] * 60))


def test_a_prompt_that_fits_only_by_smaller_chunks_runs_alone() -> None:
    simulation = Simulation(
        bounds(num_pages=4, windows=(40,), max_model_len=4096, max_num_batched_tokens=256)
    )
    for value in (1, 2):
        simulation.admit(Tokens([value] * 300), max_tokens=30)
    simulation.drain()
    assert simulation.scheduler.preemptions == 0


def test_generated_tokens_are_cached_too() -> None:
    simulation = Simulation(bounds())
    first = simulation.admit(Tokens([1] * 20), max_tokens=30)
    simulation.drain()
    again = simulation.admit(Tokens([1] * 20), Tokens(first.output), Tokens([5] * 5))
    simulation.step()
    assert again.cached_tokens == 48


def test_a_text_prefix_is_shared_with_a_mixed_prompt_and_other_rows_are_not() -> None:
    simulation = Simulation(bounds())
    simulation.admit(Tokens([1] * 40))
    simulation.drain()
    mixed = simulation.admit(Tokens([1] * 32), rows(*[3] * 32), Tokens([2]))
    simulation.drain()
    assert mixed.cached_tokens == 32
    same = simulation.admit(Tokens([1] * 32), rows(*[3] * 32), Tokens([7]))
    other = simulation.admit(Tokens([1] * 32), rows(*[4] * 32), Tokens([2]))
    simulation.drain()
    assert (same.cached_tokens, other.cached_tokens) == (64, 32)


def test_another_salt_shares_nothing() -> None:
    simulation = Simulation(bounds())
    simulation.admit(Tokens([1] * 40), salt="mine")
    simulation.drain()
    other = simulation.admit(Tokens([1] * 40), salt="yours")
    simulation.drain()
    assert other.cached_tokens == 0


def test_a_hit_never_ends_inside_an_atomic_segment() -> None:
    simulation = Simulation(bounds())
    prompt = (Tokens([1] * 20), rows(*[1] * 20, atomic=True), Tokens([2] * 4))
    simulation.admit(*prompt)
    simulation.drain()
    again = simulation.admit(*prompt)
    simulation.drain()
    assert again.cached_tokens == 16


def test_requests_that_share_a_prompt_compute_it_once() -> None:
    simulation = Simulation(bounds(num_pages=64))
    requests = [simulation.admit(Tokens([1] * 100), max_tokens=3) for _ in range(4)]
    computed = 0
    while simulation.live:
        computed += sum(span.count for span in simulation.step().chunks)
    assert computed == 100 + 3 * 4 + 4 * 2
    assert [request.cached_tokens for request in requests] == [0, 96, 96, 96]


def test_requests_that_share_a_prompt_go_on_when_the_first_is_aborted() -> None:
    simulation = Simulation(bounds(num_pages=64))
    first, second = (simulation.admit(Tokens([1] * 100)) for _ in range(2))
    simulation.step()
    assert second.num_computed_tokens == 0
    simulation.abort(first)
    simulation.drain()
    assert simulation.ended == [second]


@pytest.mark.parametrize("late", [False, True])
def test_nobody_waits_for_pages_of_a_request_that_is_paused(late: bool) -> None:
    simulation = Simulation(bounds(num_pages=64))
    maker = simulation.admit(Tokens([1] * 100))
    simulation.step()
    if late:
        simulation.admit(Tokens([1] * 100))
        simulation.step()
    maker.paused = True
    others = [simulation.admit(Tokens([1] * 100)) for _ in range(2)]
    for _ in range(40):
        simulation.step()
    assert set(simulation.live) == {maker}
    assert others[1].cached_tokens == 96
    maker.paused = False
    simulation.drain()
    assert maker in simulation.ended


@pytest.mark.parametrize("scarce", ["places", "pages"])
@pytest.mark.parametrize("clients", [("a", "a"), ("a", "b")])
def test_one_that_waits_for_its_reader_gives_way_to_one_that_ran_before(
    scarce: str, clients: tuple[str, str]
) -> None:
    # As a thinker of a talker: that of the second may wait for the place of the first one's.
    simulation = Simulation(
        bounds(max_num_seqs=1) if scarce == "places" else bounds(num_pages=8, max_num_seqs=4)
    )
    first = simulation.admit(Tokens([1] * 60), max_tokens=60, priority=1, client=clients[0])
    simulation.step()
    other = simulation.admit(Tokens([2] * 60), max_tokens=60, priority=0, client=clients[1])
    while not first.preemptions:
        simulation.step()
    while not other.output:
        simulation.step()
    other.paused = True
    while first in simulation.live:
        simulation.step()
    assert other in simulation.live
    assert other.preemptions
    other.paused = False
    simulation.drain()
    assert other in simulation.ended


def test_nobody_waits_for_pages_whose_maker_found_them_in_the_cache_meanwhile() -> None:
    simulation = Simulation(bounds(num_pages=64, max_num_batched_tokens=16))
    maker = simulation.admit(Tokens([1] * 100))
    simulation.step()
    simulation.admit(Tokens([1] * 90), Tokens([2]), priority=-1)
    for value in range(4):
        # Short prompts take the maker's share, so that the other computes what it announced.
        simulation.admit(Tokens([10 + value] * 8))
        simulation.step()
    assert maker.cached_tokens > 0
    simulation.drain()
    simulation.scheduler.table.reset_cache()
    simulation.admit(Tokens([1] * 20))
    simulation.drain()
    simulation.admit(Tokens([1] * 100))
    simulation.drain()


def test_requests_that_cannot_use_each_others_pages_do_not_wait_for_them() -> None:
    simulation = Simulation(bounds(max_num_batched_tokens=64))
    for _ in range(2):
        simulation.admit(Tokens([1] * 4), rows(*[1] * 28, atomic=True))
    assert len(simulation.step().chunks) == 2


def test_a_prompt_starts_only_when_those_that_run_leave_it_room() -> None:
    simulation = Simulation(bounds(num_pages=9, max_model_len=144, max_num_batched_tokens=16))
    requests = [simulation.admit(Tokens([value] * 78), max_tokens=2) for value in (1, 2)]
    while requests[0] in simulation.live:
        assert not pages_of(requests[1])
        simulation.step()
    simulation.drain()
    assert simulation.scheduler.preemptions == 0


def test_what_gave_finite_logits_stays_cached_after_a_preemption_and_a_failure_of_another() -> None:
    simulation = Simulation(bounds(num_pages=6, max_model_len=96))
    low = simulation.admit(Tokens([1] * 40), max_tokens=30, priority=1)
    for _ in range(4):
        simulation.step()
    simulation.admit(Tokens([2] * 90), max_tokens=2, priority=0)
    simulation.drain()
    assert low.preemptions == 1
    bad = simulation.admit(Tokens([1] * 40), Tokens([POISON]))
    simulation.drain()
    assert simulation.failed == [bad]
    good = simulation.admit(Tokens([1] * 40), Tokens([2]))
    simulation.drain()
    assert (bad.cached_tokens, good.cached_tokens) == (32, 32)


def test_a_preempted_request_finds_its_pages_again() -> None:
    simulation = Simulation(bounds(num_pages=5, max_model_len=80))
    early = simulation.admit(Tokens([1] * 16), max_tokens=50)
    late = simulation.admit(Tokens([2] * 16), max_tokens=30)
    computed = 0
    while simulation.live:
        computed += sum(span.count for span in simulation.step().chunks)
    assert simulation.scheduler.preemptions == late.preemptions > 0
    assert early.preemptions == 0
    assert (len(early.output), len(late.output)) == (50, 30)
    assert computed <= 16 + 49 + 16 + 29 + 16 * late.preemptions + 48


def test_the_better_priority_takes_slot_and_pages() -> None:
    simulation = Simulation(bounds(max_num_seqs=1))
    low = simulation.admit(Tokens([1] * 16), max_tokens=50, priority=5)
    for _ in range(4):
        simulation.step()
    high = simulation.admit(Tokens([2] * 16), max_tokens=2, priority=0)
    simulation.step()
    simulation.step()
    assert simulation.ended == [high]
    assert low.preemptions == 1
    simulation.drain()
    assert simulation.ended == [high, low]


def test_nothing_is_preempted_for_a_priority_that_could_not_run_anyway() -> None:
    simulation = Simulation(bounds(num_pages=8, max_model_len=128))
    simulation.admit(Tokens([1] * 64), max_tokens=60, priority=0)
    low = simulation.admit(Tokens([2] * 16), max_tokens=8, priority=5)
    for _ in range(4):
        simulation.step()
    simulation.admit(Tokens([3] * 100), max_tokens=2, priority=1)
    simulation.step()
    assert low.preemptions == 0


def test_the_end_of_a_request_is_no_search_among_all_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = Simulation(bounds())
    waiting = [
        simulation.admit(Tokens([number]), max_tokens=9, priority=number % 3)
        for number in range(40)
    ]
    simulation.step()
    scheduler = simulation.scheduler
    running = list(scheduler.running)
    assert running

    def compared(one: Sequence, other: object) -> bool:
        raise AssertionError("it was looked for")

    monkeypatch.setattr(Sequence, "__eq__", compared)
    for sequence in reversed(waiting):
        scheduler.finish(sequence)
    monkeypatch.undo()
    assert not len(scheduler)
    assert scheduler.table.used == 0


def test_equal_priorities_start_in_order_of_arrival() -> None:
    simulation = Simulation(bounds(max_num_seqs=1))
    requests = [simulation.admit(Tokens([value] * 8), max_tokens=3) for value in (1, 2, 3)]
    simulation.drain()
    assert simulation.ended == requests


def test_a_short_prompt_does_not_wait_for_long_ones() -> None:
    simulation = Simulation(bounds(num_pages=100, max_model_len=600, max_num_seqs=8))
    for value in range(3):
        simulation.admit(Tokens([value] * 500), max_tokens=4)
    simulation.step()
    short = simulation.admit(Tokens([7] * 12), max_tokens=1)
    simulation.step()
    assert simulation.ended == [short]


def test_the_longest_prompt_keeps_half_of_what_decoding_leaves() -> None:
    simulation = Simulation(bounds(num_pages=100, max_model_len=600, max_num_seqs=4))
    long = simulation.admit(Tokens([1] * 480), max_tokens=1)
    steps = 0
    while long in simulation.live:
        while len(simulation.live) < 6:
            simulation.admit(Tokens([2 + simulation.arrivals] * 30), max_tokens=1)
        simulation.step()
        steps += 1
    assert steps <= -(-480 // ((32 - 3) // 2))


def test_running_sequences_decode_in_every_step_while_a_long_prompt_is_computed() -> None:
    simulation = Simulation(bounds(num_pages=100, max_model_len=600))
    stream = simulation.admit(Tokens([1] * 8), max_tokens=12)
    simulation.step()
    simulation.admit(Tokens([2] * 500), max_tokens=1)
    for _ in range(10):
        before = len(stream.output)
        simulation.step()
        assert len(stream.output) == before + 1


def test_many_streams_go_before_a_prompt_that_came_first() -> None:
    simulation = Simulation(
        bounds(num_pages=100, max_model_len=600, max_num_seqs=16, max_num_batched_tokens=16)
    )
    streams = [simulation.admit(Tokens([value]), max_tokens=20) for value in range(12)]
    simulation.step()
    simulation.admit(Tokens([50] * 400), priority=-1)
    for _ in range(6):
        plan = simulation.step()
        assert {span.sequence for span in plan.chunks} >= set(streams)


@settings(max_examples=40)
@given(
    length=st.integers(50, 200),
    atomic=st.booleans(),
    budget=st.sampled_from([16, 24, 64]),
    slots=st.sampled_from([2, 6, 24]),
    crowd=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(0, 3)),
        min_size=1,
        max_size=20,
    ),
)
def test_nobody_waits_for_ever_however_many_keep_arriving(
    length: int, atomic: bool, budget: int, slots: int, crowd: list[tuple[int, int, int]]
) -> None:
    """A running sequence starves a bounded number of steps, and a waiting one starts in time."""
    simulation = Simulation(
        bounds(max_num_batched_tokens=budget, max_num_seqs=slots, num_pages=20, max_model_len=260)
    )
    tail = rows(*[1] * min(16, budget), atomic=atomic)
    for turn in range(6):
        simulation.admit(Tokens([turn] * 10), max_tokens=30)
    long = simulation.admit(Tokens([9] * length), tail, max_tokens=4)
    steps = gap = longest = 0
    while long in simulation.live:
        prompt, output, arrivals = crowd[steps % len(crowd)]
        if len(simulation.live) < 60:
            for _ in range(arrivals):
                simulation.admit(Tokens([steps % 90] * prompt), max_tokens=output)
        before = (long.num_computed_tokens, long.preemptions)
        running = long in simulation.scheduler.running
        simulation.step()
        steps += 1
        gap = gap + 1 if running and (long.num_computed_tokens, long.preemptions) == before else 0
        longest = max(longest, gap)
        assert steps < 3000
    assert longest <= 2 * MAX_STARVED_STEPS + slots


def test_what_windows_have_passed_goes_with_bad_logits_whoever_computed_it() -> None:
    simulation = Simulation(bounds(num_pages=30, max_model_len=144, windows=(None, 20)))
    prompt = Tokens([POISON] + [1] * 100)
    first = simulation.admit(prompt)
    while first.num_computed_tokens < 80:
        simulation.step()
    simulation.abort(first)
    second = simulation.admit(prompt)
    simulation.drain()
    assert simulation.failed == [second]


def test_a_sequence_that_waited_long_for_pages_takes_none_of_the_others_next_tokens() -> None:
    simulation = Simulation(bounds(max_num_batched_tokens=16, num_pages=20, max_num_seqs=32))
    short = simulation.admit(Tokens([1]), max_tokens=12)
    others = [simulation.admit(Tokens([2 + each]), max_tokens=15) for each in range(13)]
    simulation.step()
    long = simulation.admit(Tokens([30] * 100), max_tokens=1)
    while short in simulation.scheduler.running:
        simulation.step()
        assert long in simulation.scheduler.waiting
    assert long.starved_steps >= MAX_STARVED_STEPS
    chunks = {chunk.sequence: chunk.count for chunk in simulation.step().chunks}
    assert chunks == {**dict.fromkeys(others, 1), long: 3}


def test_nobody_waits_for_pages_of_a_sequence_that_is_paused() -> None:
    simulation = Simulation(bounds())
    maker = simulation.admit(Tokens([1] * 64))
    simulation.step()
    waiter = simulation.admit(Tokens([1] * 64), Tokens([2]))
    simulation.scheduler.schedule()
    assert waiter in simulation.scheduler.waiting
    simulation.scheduler.pause(maker, True)
    simulation.scheduler.schedule()
    assert waiter in simulation.scheduler.running


def test_a_page_that_a_failed_step_wrote_is_scrubbed_though_its_beginning_was_proven() -> None:
    simulation = Simulation(bounds())
    one = simulation.admit(Tokens([1] * 20), max_tokens=5)
    simulation.step()
    (page,) = one.pages[0].since(1)
    (chunk,) = simulation.scheduler.schedule().chunks
    assert (chunk.start, chunk.count) == (20, 1)
    simulation.scheduler.invalidate(chunk)
    simulation.scheduler.finish(one)
    assert simulation.scheduler.table.take_dirty() == [page]


def test_of_a_resumed_request_no_more_counts_as_cached_than_its_prompt() -> None:
    simulation = Simulation(bounds())
    first = simulation.admit(Tokens([1] * 20), max_tokens=30)
    simulation.drain()
    request = first.request
    request = msgspec.structs.replace(request, id="again", prior_output=tuple(first.output[:29]))
    again = simulation.sequence_of(request)
    simulation.scheduler.admit(again)
    simulation.scheduler.schedule()
    assert again.num_computed_tokens >= 48
    assert again.cached_tokens == 20
