"""The scheduler over simulated pages: what each slot holds is checked against what the sequence says it must hold."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inlay.digest import Chain, Secret, root_digest
from inlay.engine.torch.scheduler import PATIENCE, Bounds, Plan, Scheduler
from inlay.engine.torch.sequence import Sequence
from inlay.errors import ContextLengthError, InvalidRequestError
from inlay.prompt import Buffer, Prompt, Rows, Segment, Tokens
from inlay.protocol.work import Sampling, Work

SECRET = Secret(bytes(32))
POISON = 99
"""A token that makes keys and values non-finite."""


def rows(*values: int, atomic: bool = False) -> Rows:
    return Rows(Buffer(bytes(values)), "float8_e4m3fn", (len(values), 1), atomic=atomic)


def bounds(**changes: Any) -> Bounds:
    values: dict[str, Any] = {
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "page_size": 16,
        "num_pages": 16,
    }
    return Bounds(**(values | changes))


def pages_of(sequence: Sequence) -> list[int]:
    return [page for run in sequence.pages for page in run.pages]


class Simulation:
    """A scheduler, and what a model would have written where.

    A slot holds the whole prefix up to its position, as keys and values do in effect, for the layers of one page group.
    """

    def __init__(self, limits: Bounds, *, prefix_caching: bool = True) -> None:
        self.bounds = limits
        self.scheduler = Scheduler(limits, prefix_caching=prefix_caching)
        self.slots: list[list[object]] = [[None] * limits.page_size for _ in range(limits.num_pages + 1)]
        self.tainted: set[int] = set()
        self.live: list[Sequence] = []
        self.ended: list[Sequence] = []
        self.failed: list[Sequence] = []
        self.arrivals = 0

    def admit(
        self, *segments: Segment, max_tokens: int = 1, priority: int = 0, salt: str | None = None
    ) -> Sequence:
        work = Work(
            id=str(self.arrivals),
            prompt=Prompt.of(*segments),
            sampling=Sampling(max_tokens=max_tokens),
            salt=salt,
            priority=priority,
        )
        self.bounds.check(work)
        chain = Chain(root_digest(SECRET, weights_id="w", dtype="float32", salt=salt), SECRET)
        groups = len(self.bounds.windows)
        sequence = Sequence(work, arrival=self.arrivals, chain=chain, page_groups=groups)
        self.arrivals += 1
        self.scheduler.admit(sequence)
        self.live.append(sequence)
        return sequence

    def abort(self, sequence: Sequence) -> None:
        held = pages_of(sequence)
        shared = {page for other in self.live if other is not sequence for page in pages_of(other)}
        self.live.remove(sequence)
        self.scheduler.finish(sequence)
        assert pages_of(sequence) == []
        assert all(self.scheduler.table.references(page) == 0 for page in held if page not in shared)

    @staticmethod
    def items(sequence: Sequence) -> list[Any]:
        """What is at each position."""
        found: list[Any] = []
        for start, segment in sequence.segments(0, sequence.length):
            assert start == len(found)
            if isinstance(segment, Tokens):
                found.extend(segment.ids)
            elif isinstance(segment, Rows):
                kind = bytes(segment.data.view) if segment.atomic else "row"
                found.extend((kind, value) for value in bytes(segment.data.view))
        return found

    def named(self, sequence: Sequence, group: int, index: int) -> list[int]:
        """The page that the cache knows for a page index of `sequence`, if it does."""
        digest = sequence.page_digest(index, self.bounds.page_size)
        page = None if digest is None else self.scheduler.cache.find(digest, group)
        return [] if page is None else [page]

    def step(self) -> Plan:
        for page in self.scheduler.table.take_dirty():
            self.tainted.discard(page)
            self.slots[page] = [None] * self.bounds.page_size
        plan = self.scheduler.schedule()
        self.check(plan)
        bad = []
        for span in plan.spans:
            sequence = span.sequence
            items = self.items(sequence)
            for group, run in enumerate(sequence.pages):
                assert not self.tainted & set(run.since(self.bounds.pages_for(span.start)))
                for position in range(span.start, span.start + span.count):
                    index, slot = divmod(position, self.bounds.page_size)
                    content = (group, sequence.work.salt, tuple(items[: position + 1]))
                    self.slots[run.pages[index - run.first]][slot] = content
            if span.samples and POISON in items:
                bad.append(span)
                # What is proven good is good whoever failed on it; all else that it wrote is tainted, wherever it is now.
                first = items.index(POISON) // self.bounds.page_size
                for group, run in enumerate(sequence.pages):
                    self.tainted.update(run.since(first))
                    for index in range(first, run.first):
                        self.tainted.update(self.named(sequence, group, index))
                self.scheduler.condemn(span)
        for span in plan.spans:
            if span in bad:
                self.failed.append(span.sequence)
                self.live.remove(span.sequence)
                self.scheduler.finish(span.sequence)
                continue
            self.scheduler.commit(span)
            if span.samples:
                self.scheduler.prove(span.sequence)
                span.sequence.append(sum(map(hash, self.items(span.sequence))) % 2)
                if span.sequence.ending(()) is not None:
                    self.live.remove(span.sequence)
                    self.ended.append(span.sequence)
                    self.scheduler.finish(span.sequence)
        return plan

    def check(self, plan: Plan) -> None:
        limits = self.bounds
        assert sum(span.count for span in plan.spans) <= limits.max_num_batched_tokens
        assert len(plan.spans) <= limits.max_num_seqs
        assert len({span.sequence for span in plan.spans}) == len(plan.spans)
        assert bool(plan.spans) == bool(self.live)
        for span in plan.spans:
            sequence, stop = span.sequence, span.start + span.count
            assert span.count > 0
            assert span.start == sequence.computed
            assert stop <= sequence.length
            assert span.samples == (stop == sequence.length)
            assert not any(first < stop < end for first, end in sequence.atomic)
            items = self.items(sequence)
            for group, (run, window) in enumerate(zip(sequence.pages, limits.windows, strict=True)):
                assert run.end == limits.pages_for(stop)
                seen = span.start if window is None else min(span.start, window - 1)
                for position in range(span.start - seen, span.start):
                    index, slot = divmod(position, limits.page_size)
                    content = (group, sequence.work.salt, tuple(items[: position + 1]))
                    assert index >= run.first
                    assert self.slots[run.pages[index - run.first]][slot] == content
                # From where it writes on, its pages are its own.
                for page in run.since(span.start // limits.page_size):
                    assert self.scheduler.table.references(page) == 1
                if window is not None:
                    assert len(run.pages) <= (window - 1 + span.count) / limits.page_size + 2

    def consistent(self) -> None:
        scheduler, table = self.scheduler, self.scheduler.table
        held = [page for sequence in self.live for page in pages_of(sequence)]
        assert table.used == len(set(held))
        assert table.free + table.used + scheduler.cache.idle + table.dirty == table.num_pages
        assert table.references(0) == 0
        for page in range(1, table.num_pages + 1):
            assert table.references(page) == held.count(page)
            assert not (page in self.tainted and page in scheduler.cache)
        assert len(scheduler) == len(self.live)
        assert len(scheduler.running) <= self.bounds.max_num_seqs
        for sequence in self.live:
            assert sequence.computed < sequence.length
            for run, window in zip(sequence.pages, self.bounds.windows, strict=True):
                assert run.end == self.bounds.pages_for(sequence.computed)
                if window is not None:
                    assert len(run.pages) <= (window - 1) / self.bounds.page_size + 2
            assert len({page for run in sequence.pages for page in run.pages}) == len(pages_of(sequence))
            assert not any(first < sequence.computed < end for first, end in sequence.atomic)
        for sequences in (scheduler.running, scheduler.waiting):
            assert sequences == sorted(sequences, key=lambda sequence: sequence.order)
        assert all(not pages_of(sequence) for sequence in scheduler.waiting)

    def drain(self, limit: int = 4000) -> int:
        steps = 0
        while self.live:
            assert steps < limit, f"not ended: {self.live}"
            self.step()
            self.consistent()
            steps += 1
        return steps


part = st.one_of(
    st.tuples(st.just("tokens"), st.integers(1, 3), st.integers(1, 40)),
    st.tuples(st.just("rows"), st.integers(1, 2), st.integers(1, 20)),
    st.tuples(st.just("atomic"), st.integers(1, 2), st.integers(1, 24)),
    st.tuples(st.just("poison"), st.just(POISON), st.just(1)),
)


def build(parts: list[tuple[str, int, int]]) -> list[Segment]:
    made: list[Segment] = []
    for kind, value, count in parts:
        if kind in ("tokens", "poison"):
            made.append(Tokens([value] * count))
        else:
            made.append(rows(*[value] * count, atomic=kind == "atomic"))
    return made


class SchedulerMachine(RuleBasedStateMachine):
    limits = bounds(num_pages=9, max_model_len=144)
    prefix_caching = True

    def __init__(self) -> None:
        super().__init__()
        self.simulation = Simulation(self.limits, prefix_caching=self.prefix_caching)

    @rule(
        parts=st.lists(part, min_size=1, max_size=4),
        max_tokens=st.integers(1, 40),
        priority=st.sampled_from([0, 0, 0, 1]),
        salt=st.sampled_from([None, None, "other"]),
        copies=st.sampled_from([1, 1, 3]),
    )
    def admit(
        self,
        parts: list[tuple[str, int, int]],
        max_tokens: int,
        priority: int,
        salt: str | None,
        copies: int,
    ) -> None:
        for _ in range(copies):
            try:
                self.simulation.admit(*build(parts), max_tokens=max_tokens, priority=priority, salt=salt)
            except ContextLengthError:
                length = sum(count for _, _, count in parts) + max_tokens
                chunk = max((count for kind, _, count in parts if kind == "atomic"), default=1)
                needed = self.limits.most_pages(length, chunk)
                assert length > self.limits.max_model_len or needed > self.limits.num_pages

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.simulation.step()
            self.simulation.consistent()

    @precondition(lambda self: self.simulation.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.simulation.abort(data.draw(st.sampled_from(self.simulation.live)))

    @rule()
    def reset(self) -> None:
        self.simulation.scheduler.table.reset_cache()

    @invariant()
    def consistent(self) -> None:
        self.simulation.consistent()

    def teardown(self) -> None:
        self.simulation.drain()
        assert self.simulation.scheduler.table.used == 0


class UncachedMachine(SchedulerMachine):
    prefix_caching = False

    @invariant()
    def nothing_is_cached(self) -> None:
        assert len(self.simulation.scheduler.cache) == 0


class CrowdedMachine(SchedulerMachine):
    """More sequences than positions in a step, and pages of two blocks."""

    limits = bounds(num_pages=6, max_model_len=144, page_size=32, max_num_seqs=40, max_num_batched_tokens=24)


class WindowedMachine(SchedulerMachine):
    """All layers have a window: pages go as the sequence goes on, and there are too few for a whole one."""

    limits = bounds(num_pages=7, max_model_len=144, windows=(20,))


class MixedMachine(SchedulerMachine):
    limits = bounds(num_pages=22, max_model_len=144, windows=(None, 20, 40))


class UncachedWindowMachine(UncachedMachine):
    limits = bounds(num_pages=22, max_model_len=144, windows=(None, 20, 20))


class NarrowMachine(SchedulerMachine):
    """Windows of one position and of one page."""

    limits = bounds(
        num_pages=30, max_model_len=144, windows=(1, 16, None), max_num_seqs=40, max_num_batched_tokens=24
    )


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=80, stateful_step_count=25)
TestUncached = UncachedMachine.TestCase
TestUncached.settings = settings(max_examples=30, stateful_step_count=20)
TestCrowded = CrowdedMachine.TestCase
TestCrowded.settings = settings(max_examples=40, stateful_step_count=25)
TestWindowed = WindowedMachine.TestCase
TestWindowed.settings = settings(max_examples=50, stateful_step_count=25)
TestMixed = MixedMachine.TestCase
TestMixed.settings = settings(max_examples=50, stateful_step_count=25)
TestUncachedWindow = UncachedWindowMachine.TestCase
TestUncachedWindow.settings = settings(max_examples=20, stateful_step_count=20)
TestNarrow = NarrowMachine.TestCase
TestNarrow.settings = settings(max_examples=30, stateful_step_count=25)


def test_a_prompt_and_output_longer_than_the_model_are_refused() -> None:
    simulation = Simulation(bounds(max_model_len=64))
    with pytest.raises(ContextLengthError, match="maximum context length is 64 positions"):
        simulation.admit(Tokens([1] * 60), max_tokens=5)
    simulation.admit(Tokens([1] * 60), max_tokens=4)
    assert simulation.drain()


def test_what_needs_more_pages_than_there_are_is_refused() -> None:
    simulation = Simulation(bounds(num_pages=2))
    with pytest.raises(ContextLengthError, match="maximum context length is 32 positions"):
        simulation.admit(Tokens([1] * 32), max_tokens=1)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at least one position"):
        Simulation(bounds()).admit(Tokens([]))


def test_an_atomic_segment_larger_than_a_step_is_refused() -> None:
    simulation = Simulation(bounds())
    with pytest.raises(InvalidRequestError, match="in one step of at most 32 positions, and are 33"):
        simulation.admit(rows(*[1] * 33, atomic=True))
    simulation.admit(Tokens([1]), rows(*[1] * 32, atomic=True), Tokens([2]))
    assert simulation.drain() == 3


def test_a_finished_prompt_is_found_again_but_for_its_last_position() -> None:
    simulation = Simulation(bounds())
    simulation.admit(Tokens([1] * 32))
    simulation.drain()
    again = simulation.admit(Tokens([1] * 32))
    plan = simulation.step()
    assert [(span.start, span.count) for span in plan.spans] == [(16, 16)]
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
        simulation.scheduler.table.condemn(simulation.named(first, group, index), spare_proven=False)
    simulation.step()
    assert simulation.scheduler.table.dirty == 0
    again = simulation.admit(Tokens([1] * 100))
    # Once what is missing is computed, what follows it may be a hit again.
    simulation.step()
    assert again.cached_tokens == cached


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
    with pytest.raises(ContextLengthError, match="maximum context length is 96 positions"):
        simulation.admit(Tokens([1] * 96), max_tokens=1)
    simulation.admit(Tokens([1] * 90), max_tokens=6)
    simulation.drain()
    with pytest.raises(ContextLengthError, match="maximum context length is 80 positions"):
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


def test_works_that_share_a_prompt_compute_it_once() -> None:
    simulation = Simulation(bounds(num_pages=64))
    works = [simulation.admit(Tokens([1] * 100), max_tokens=3) for _ in range(4)]
    computed = 0
    while simulation.live:
        computed += sum(span.count for span in simulation.step().spans)
    assert computed == 100 + 3 * 4 + 4 * 2
    assert [work.cached_tokens for work in works] == [0, 96, 96, 96]


def test_works_that_share_a_prompt_go_on_when_the_first_is_aborted() -> None:
    simulation = Simulation(bounds(num_pages=64))
    first, second = (simulation.admit(Tokens([1] * 100)) for _ in range(2))
    simulation.step()
    assert second.computed == 0
    simulation.abort(first)
    simulation.drain()
    assert simulation.ended == [second]


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


def test_works_that_cannot_use_each_others_pages_do_not_wait_for_them() -> None:
    simulation = Simulation(bounds(max_num_batched_tokens=64))
    for _ in range(2):
        simulation.admit(Tokens([1] * 4), rows(*[1] * 28, atomic=True))
    assert len(simulation.step().spans) == 2


def test_a_prompt_starts_only_when_those_that_run_leave_it_room() -> None:
    simulation = Simulation(bounds(num_pages=9, max_model_len=144, max_num_batched_tokens=16))
    works = [simulation.admit(Tokens([value] * 78), max_tokens=2) for value in (1, 2)]
    while works[0] in simulation.live:
        assert not pages_of(works[1])
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


def test_a_preempted_work_finds_its_pages_again() -> None:
    simulation = Simulation(bounds(num_pages=5, max_model_len=80))
    early = simulation.admit(Tokens([1] * 16), max_tokens=50)
    late = simulation.admit(Tokens([2] * 16), max_tokens=30)
    computed = 0
    while simulation.live:
        computed += sum(span.count for span in simulation.step().spans)
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


def test_equal_priorities_start_in_order_of_arrival() -> None:
    simulation = Simulation(bounds(max_num_seqs=1))
    works = [simulation.admit(Tokens([value] * 8), max_tokens=3) for value in (1, 2, 3)]
    simulation.drain()
    assert simulation.ended == works


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
        assert {span.sequence for span in plan.spans} >= set(streams)


@settings(max_examples=40)
@given(
    length=st.integers(50, 200),
    atomic=st.booleans(),
    budget=st.sampled_from([16, 24, 64]),
    slots=st.sampled_from([2, 6, 24]),
    crowd=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=20
    ),
)
def test_nobody_waits_for_ever_however_many_keep_arriving(
    length: int, atomic: bool, budget: int, slots: int, crowd: list[tuple[int, int, int]]
) -> None:
    """A running sequence is passed over a bounded number of steps in a row, and a waiting one starts in bounded time."""
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
        before = (long.computed, long.preemptions)
        running = long in simulation.scheduler.running
        simulation.step()
        steps += 1
        gap = gap + 1 if running and (long.computed, long.preemptions) == before else 0
        longest = max(longest, gap)
        assert steps < 3000
    assert longest <= 2 * PATIENCE + slots
