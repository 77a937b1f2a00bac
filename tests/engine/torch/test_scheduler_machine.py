"""Any order of arrivals, steps, failures and aborts, with and without windows and caching."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inlay.base.errors import ContextLengthError
from inlay.engine.torch.windows import Chunk
from inlay.messages.prompt import Segment, Tokens
from tests.engine.torch.simulation import POISON, Simulation, bounds, rows

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
    overlap = False
    ends = False
    lateness = False
    max_loras: int | None = None
    speculates = False

    def __init__(self) -> None:
        super().__init__()
        self.simulation = Simulation(
            self.limits,
            prefix_caching=self.prefix_caching,
            overlap=self.overlap,
            ends=self.ends,
            lateness=self.lateness,
            max_loras=self.max_loras,
            speculates=self.speculates,
        )

    @rule(
        parts=st.lists(part, min_size=1, max_size=4),
        max_tokens=st.integers(1, 40),
        priority=st.sampled_from([0, 0, 0, 1]),
        salt=st.sampled_from([None, None, "other"]),
        adapter=st.sampled_from([None, "a", "b", "c"]),
        copies=st.sampled_from([1, 1, 3]),
        client=st.sampled_from([None, None, "b", "c"]),
    )
    def admit(
        self,
        parts: list[tuple[str, int, int]],
        max_tokens: int,
        priority: int,
        salt: str | None,
        adapter: str | None,
        copies: int,
        client: str | None,
    ) -> None:
        more = {} if self.max_loras is None else {"adapter": adapter}
        for _ in range(copies):
            try:
                self.simulation.admit(
                    *build(parts),
                    max_tokens=max_tokens,
                    priority=priority,
                    salt=salt,
                    client=client,
                    **more,
                )
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

    limits = bounds(
        num_pages=6, max_model_len=144, page_size=32, max_num_seqs=40, max_num_batched_tokens=24
    )


class WindowedMachine(SchedulerMachine):
    """All layers have a window.

    Pages go as the sequence goes on, and there are too few for a whole one.
    """

    limits = bounds(num_pages=7, max_model_len=144, windows=(20,))


class MixedMachine(SchedulerMachine):
    limits = bounds(num_pages=22, max_model_len=144, windows=(None, 20, Chunk(40)))


class UncachedWindowMachine(UncachedMachine):
    limits = bounds(num_pages=22, max_model_len=144, windows=(None, 20, 20))


class NarrowMachine(SchedulerMachine):
    """Windows of one position and of one page."""

    limits = bounds(
        num_pages=30,
        max_model_len=144,
        windows=(1, 16, None),
        max_num_seqs=40,
        max_num_batched_tokens=24,
    )


class OverlapMachine(SchedulerMachine):
    """Schedule before the last results are read, some of which may end an output."""

    overlap = True
    ends = True
    lateness = True


class AdaptersMachine(SchedulerMachine):
    """More adapters than a step has room for, and pages that those who rest may hold."""

    max_loras = 1


class CrowdedAdaptersMachine(CrowdedMachine):
    overlap = True
    ends = True
    lateness = True
    max_loras = 2


class CrowdedOverlapMachine(CrowdedMachine):
    overlap = True
    ends = True


class WindowedOverlapMachine(WindowedMachine):
    overlap = True
    lateness = True


class MixedOverlapMachine(MixedMachine):
    overlap = True
    ends = True


class NarrowOverlapMachine(NarrowMachine):
    overlap = True
    ends = True
    lateness = True


class LateMachine(SchedulerMachine):
    ends = True
    lateness = True


class FetchingMachine(MixedMachine):
    """Pages come from elsewhere, cut off anywhere."""

    overlap = True

    @rule(
        parts=st.lists(part.filter(lambda one: one[0] != "poison"), min_size=1, max_size=4),
        salt=st.sampled_from([None, None, "other"]),
        pages=st.integers(0, 20),
    )
    def fetch(self, parts: list[tuple[str, int, int]], salt: str | None, pages: int) -> None:
        self.simulation.fetch(*build(parts), salt=salt, pages=pages)


class SpeculatingMachine(SchedulerMachine):
    """Several next tokens are computed in one step; only the right ones stay."""

    speculates = True
    ends = True
    lateness = True


class CrowdedSpeculatingMachine(CrowdedMachine):
    speculates = True
    ends = True


class MixedSpeculatingMachine(MixedMachine):
    speculates = True
    ends = True
    lateness = True


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
TestOverlap = OverlapMachine.TestCase
TestOverlap.settings = settings(max_examples=60, stateful_step_count=25)
TestAdapters = AdaptersMachine.TestCase
TestAdapters.settings = settings(max_examples=60, stateful_step_count=25)
TestCrowdedAdapters = CrowdedAdaptersMachine.TestCase
TestCrowdedAdapters.settings = settings(max_examples=30, stateful_step_count=25)
TestCrowdedOverlap = CrowdedOverlapMachine.TestCase
TestCrowdedOverlap.settings = settings(max_examples=30, stateful_step_count=25)
TestWindowedOverlap = WindowedOverlapMachine.TestCase
TestWindowedOverlap.settings = settings(max_examples=40, stateful_step_count=25)
TestMixedOverlap = MixedOverlapMachine.TestCase
TestMixedOverlap.settings = settings(max_examples=40, stateful_step_count=25)
TestNarrowOverlap = NarrowOverlapMachine.TestCase
TestNarrowOverlap.settings = settings(max_examples=30, stateful_step_count=25)
TestLate = LateMachine.TestCase
TestLate.settings = settings(max_examples=20, stateful_step_count=25)
TestFetching = FetchingMachine.TestCase
TestFetching.settings = settings(max_examples=40, stateful_step_count=25)
TestSpeculating = SpeculatingMachine.TestCase
TestSpeculating.settings = settings(max_examples=60, stateful_step_count=25)
TestCrowdedSpeculating = CrowdedSpeculatingMachine.TestCase
TestCrowdedSpeculating.settings = settings(max_examples=30, stateful_step_count=25)
TestMixedSpeculating = MixedSpeculatingMachine.TestCase
TestMixedSpeculating.settings = settings(max_examples=40, stateful_step_count=25)
