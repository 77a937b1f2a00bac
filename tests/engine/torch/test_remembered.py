"""What was found cached is remembered, and changes no decision."""

from itertools import chain
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.engine.fairness import SequencePages
from inlay.engine.torch.cache import prefix_cache
from inlay.engine.torch.cache.prefix_cache import PrefixCache
from inlay.engine.torch.fairness import PreemptionGain, StepShares, count_starved_step
from inlay.engine.torch.prefix_lookup import Hits, PrefixLookup
from inlay.engine.torch.scheduler import MAX_STARVED_STEPS, Scheduler
from inlay.engine.torch.sequence import Sequence
from inlay.messages.prompt import Tokens
from tests.engine.torch.simulation import Simulation, bounds
from tests.engine.torch.test_scheduler_machine import build, part


class Forgetful(PrefixLookup):
    """Looks at each page in each step."""

    def hits(self, sequence: Sequence) -> Hits | None:
        sequence.forget_cached()
        found = super().hits(sequence)
        sequence.forget_cached()
        return found


class Plain(Scheduler):
    """Starts waiting sequences by the exact number of pages that each lacks, in each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lookup = Forgetful(self.cache, self.bounds)

    def _start_waiting(self) -> None:
        if not self.waiting:
            return
        promised = sum(map(self._pages_outstanding, self.running))
        kept_for: set[str | None] = set()
        for sequence in self._candidates():
            full = len(self.running) >= self.bounds.max_num_seqs
            if full and (self.blocked or not self._shares.preemptible_for_slot(sequence)):
                return
            if sequence.needs or sequence.client in kept_for:
                continue
            hits = self._lookup.hits(sequence)
            cached = 0 if hits is None else hits.stop
            if self._in_progress.wait(sequence, cached):
                continue
            found = () if hits is None else tuple(chain.from_iterable(hits.pages))
            start = cached * self.bounds.page_size
            pages = SequencePages(found, self.bounds.pages_missing(start, sequence.length))
            if kept_for and self._shares.pages.excess(sequence, pages) > 0:
                continue
            missing = pages.lacking + self.table.num_unreferenced(found)
            missing += promised - self.table.available
            if full or (self.running and missing > 0):
                if self.blocked:
                    continue
                if not self._preempt_for(sequence, pages, missing):
                    count_starved_step(sequence)
                    if sequence.starved_steps >= MAX_STARVED_STEPS:
                        kept_for.add(sequence.client)
                    continue
                promised = sum(map(self._pages_outstanding, self.running))
            self._begin(sequence, hits)
            promised += self._pages_outstanding(sequence)

    def _preempt_for(self, sequence: Sequence, pages: SequencePages, missing: int) -> bool:
        full = len(self.running) >= self.bounds.max_num_seqs
        chosen = self._shares.preemptible_for_slot(sequence)[:1] if full else []
        gain = PreemptionGain(self.table)
        for other in chosen:
            gain.add(other, self._pages_outstanding(other))
        if missing > gain.pages:
            for other in self._yielding_pages(sequence, pages):
                if other not in chosen:
                    chosen.append(other)
                    gain.add(other, self._pages_outstanding(other))
                    if missing <= gain.pages:
                        break
            else:
                return False
        return all(map(self._preempt, chosen))

    def _yielding_pages(self, sequence: Sequence, pages: SequencePages) -> list[Sequence]:
        shares = self._shares.pages
        priority, own = sequence.order[0], shares.excess(sequence, pages)
        found = [
            other
            for rank, other in reversed(shares._ranked)
            if rank.priority > priority
            or (
                rank.priority == priority
                and own <= 0
                and rank.over_share > own
                and other.client != sequence.client
            )
        ]
        more = StepShares._unread_before(self._shares, sequence)
        return found + [one for one in more if one not in found]


def decided(simulation: Simulation) -> list[tuple[Any, ...]]:
    """All that a step changed."""
    scheduler = simulation.scheduler
    state = [
        (one.request.id, one in scheduler.running, one.num_computed_tokens, one.starved_steps,
         one.waited, one.preemptions, one.cached_tokens, [run.pages for run in one.pages])
        for one in simulation.live
    ]  # fmt: skip
    return [*state, (scheduler.preemptions, scheduler.table.available, scheduler.blocked)]


arrivals = st.tuples(
    st.lists(part, min_size=1, max_size=3),
    st.integers(1, 30),
    st.sampled_from([0, 0, 0, 1]),
    st.sampled_from([None, None, "b", "c", "d"]),
    st.sampled_from([1, 1, 3]),
)
acts = st.lists(
    st.one_of(st.integers(1, 8), arrivals, st.tuples(st.sampled_from(["abort", "reset"]))),
    min_size=1,
    max_size=40,
)
LIMITS = [
    {"num_pages": 9, "max_model_len": 144},
    {"num_pages": 14, "max_model_len": 144, "max_num_seqs": 12},
    {"num_pages": 22, "max_model_len": 144, "windows": (None, 20)},
    {"num_pages": 22, "max_model_len": 144, "windows": (None, None), "max_num_seqs": 8},
    {"num_pages": 7, "max_model_len": 144, "windows": (20,)},
]


@settings(max_examples=150, deadline=None)
@given(acts, st.sampled_from(LIMITS), st.booleans(), st.sampled_from([3, 4096]))
def test_decisions_are_those_of_a_scheduler_that_looks_all_up_in_each_step(
    acts: list[Any], limits: dict[str, Any], overlap: bool, logged: int
) -> None:
    before, prefix_cache._LOGGED = prefix_cache._LOGGED, logged
    made = [Simulation(bounds(**limits), overlap=overlap) for _ in range(2)]
    plain = made[1]
    plain.scheduler = Plain(plain.bounds)
    prefix_cache._LOGGED = before
    for act in acts:
        for simulation in made:
            match act:
                case ("abort",) if simulation.live:
                    simulation.abort(simulation.live[len(simulation.live) // 2])
                case ("reset",):
                    simulation.scheduler.table.reset_cache()
                case (parts, max_tokens, priority, client, copies):
                    length = sum(count for _, _, count in parts) + max_tokens
                    most = max(one for _, _, one in parts)
                    needed = simulation.bounds.most_pages(length, most)
                    fits = length <= 144 and needed <= simulation.bounds.num_pages
                    for _ in range(copies if fits else 0):
                        simulation.admit(
                            *build(parts), max_tokens=max_tokens, priority=priority, client=client
                        )
        for _ in range(act if isinstance(act, int) else 1):
            plans = [
                [(span.sequence.request.id, span.start, span.count) for span in one.step().chunks]
                for one in made
            ]
            assert plans[0] == plans[1]
            assert decided(made[0]) == decided(made[1])


class Counting(PrefixCache):
    """Counts look-ups."""

    looked = 0

    def find(self, digest: bytes, group: int = 0) -> int | None:
        self.looked += 1
        return super().find(digest, group)

    def find_at(self, index: int, digest: bytes, group: int) -> int | None:
        self.looked += 1
        return super().find_at(index, digest, group)


def test_a_sequence_that_waits_costs_a_look_up_in_a_step_however_much_of_it_is_cached() -> None:
    waiting, pages = 15, 100
    limits = bounds(
        max_model_len=4096, max_num_seqs=64, max_num_batched_tokens=2048, num_pages=pages + 14
    )
    simulation = Simulation(limits)
    scheduler = simulation.scheduler
    cache = Counting(1)
    scheduler.cache = scheduler._lookup._cache = scheduler.table._cache = cache
    prompt = Tokens([number % 90 for number in range(16 * pages)])
    simulation.admit(prompt, Tokens([95] * 16 * 10), max_tokens=30, client="runs")
    simulation.step()
    for number in range(waiting):
        own = Tokens([number] * 16 * 10)
        simulation.admit(prompt, own, max_tokens=20, client=f"waits-{number}")
    counts = []
    for _ in range(25):
        before = cache.looked
        simulation.step()
        assert len(scheduler.running) == 1
        counts.append(cache.looked - before)
    assert counts[0] > waiting * pages
    assert max(counts[1:]) <= 2 * waiting
    # What is gone is noticed, and what came back is found.
    for sequence in scheduler.waiting:
        assert len(sequence.cached[0]) >= pages
    (running,) = scheduler.running
    simulation.abort(running)
    scheduler.table.reset_cache()
    simulation.step()
    for sequence in scheduler.waiting:
        hits = scheduler.hits(sequence)
        assert hits is None or hits.pages == Forgetful(cache, limits).hits(sequence).pages  # type: ignore[union-attr]
