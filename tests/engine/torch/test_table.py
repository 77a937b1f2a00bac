from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inlay.engine.torch.cache.prefix_cache import PrefixCache
from inlay.engine.torch.cache.table import PageRun, PageTable


def test_growing_beyond_what_is_available_changes_nothing() -> None:
    table = PageTable(2, PrefixCache())
    holder = PageRun()
    assert not table.grow([holder], 3)
    assert holder.pages == []
    assert table.available == 2


def test_a_shared_page_is_free_only_after_its_last_holder_let_go() -> None:
    cache = PrefixCache()
    table = PageTable(4, cache)
    first = PageRun()
    second = PageRun()
    table.grow([first], 1)
    cache.insert(b"a", first.pages[0])
    table.share(second, list(first.pages))
    table.release([first])
    assert table.used == 1
    assert table.grow([PageRun()], 3)
    assert cache.find(b"a") == second.pages[0]
    table.release([second])
    assert cache.idle == 1


def test_a_prefix_outlives_what_continues_it() -> None:
    cache = PrefixCache()
    table = PageTable(2, cache)
    holder = PageRun()
    table.grow([holder], 2)
    cache.insert(b"first", holder.pages[0])
    cache.insert(b"second", holder.pages[1])
    table.release([holder])
    table.grow([PageRun()], 1)
    assert cache.find(b"first") is not None
    assert cache.find(b"second") is None


def test_condemned_pages_are_not_handed_out_before_they_are_scrubbed() -> None:
    cache = PrefixCache()
    table = PageTable(3, cache)
    holder = PageRun()
    table.grow([holder], 2)
    cache.insert(b"a", holder.pages[0])
    condemned = set(holder.pages)
    table.invalidate(holder.pages, keep_verified=False)
    assert cache.find(b"a") is None
    table.release([holder])
    assert (table.available, table.dirty, table.used) == (1, 2, 0)
    assert set(table.take_dirty()) == condemned
    assert (table.available, table.dirty) == (3, 0)


def test_a_condemned_page_waits_for_its_other_holders() -> None:
    cache = PrefixCache()
    table = PageTable(2, cache)
    bad = PageRun()
    table.grow([bad], 1)
    cache.insert(b"a", bad.pages[0])
    other = PageRun()
    table.share(other, list(bad.pages))
    table.invalidate(bad.pages, keep_verified=False)
    table.release([bad])
    assert table.take_dirty() == []
    table.release([other])
    assert len(table.take_dirty()) == 1


def test_pages_that_gave_finite_logits_are_spared() -> None:
    cache = PrefixCache()
    table = PageTable(3, cache)
    good = PageRun()
    table.grow([good], 1)
    cache.insert(b"shared prefix", good.pages[0])
    table.mark_verified(good.pages)
    bad = PageRun()
    table.share(bad, list(good.pages))
    table.grow([bad], 1)
    table.invalidate(bad.pages, keep_verified=True)
    table.release([bad])
    assert cache.find(b"shared prefix") == good.pages[0]
    assert table.dirty == 1


def test_a_page_the_failed_step_wrote_to_is_not_spared_for_what_it_gave_before() -> None:
    table = PageTable(2, PrefixCache())
    holder = PageRun()
    table.grow([holder], 2)
    table.mark_verified(holder.pages)
    last = holder.pages[1]
    table.invalidate(holder.pages[:1], keep_verified=True)
    table.invalidate(holder.pages[1:], keep_verified=False)
    table.release([holder])
    assert table.take_dirty() == [last]


def test_a_run_that_advances_lets_go_of_its_first_pages_and_keeps_the_indices_of_the_others() -> (
    None
):
    cache = PrefixCache()
    table = PageTable(4, cache)
    run = PageRun()
    table.grow([run], 3)
    cache.insert(b"a", run.pages[0])
    last = run.pages[2]
    table.advance(run, 2)
    assert (run.first, run.end, run.pages, run.since(1), run.since(3)) == (2, 3, [last], [last], [])
    assert (table.used, cache.idle, table.free) == (1, 1, 2)
    table.advance(run, 1)
    assert (run.first, run.pages) == (2, [last])
    table.advance(run, 7)
    assert (run.first, run.end) == (7, 7)
    table.release([run])
    assert (run.first, run.end) == (0, 0)


def test_all_runs_of_a_sequence_grow_or_none_does() -> None:
    table = PageTable(5, PrefixCache())
    runs = [PageRun(), PageRun()]
    assert not table.grow(runs, 3)
    assert table.grow(runs, 2)
    assert len({page for run in runs for page in run.pages} - {0}) == 4


def test_an_idle_page_that_is_condemned_waits_to_be_scrubbed() -> None:
    cache = PrefixCache()
    table = PageTable(1, cache)
    run = PageRun()
    table.grow([run], 1)
    cache.insert(b"a", run.pages[0])
    table.release([run])
    table.invalidate([1], keep_verified=True)
    table.invalidate([1], keep_verified=True)
    assert (table.available, table.dirty, table.take_dirty()) == (0, 1, [1])


class TableMachine(RuleBasedStateMachine):
    """Any order of page operations keeps each page in exactly one state."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache()
        self.table = PageTable(6, self.cache)
        self.holders: list[PageRun] = []
        self.named = 0
        self.dirty: set[int] = set()

    @rule(count=st.integers(0, 4))
    def grow(self, count: int) -> None:
        holder = PageRun()
        before = self.table.available
        assert self.table.grow([holder], count) == (count <= before)
        assert not self.dirty & set(holder.pages)
        self.holders.append(holder)

    @precondition(lambda self: any(holder.pages for holder in self.holders))
    @rule(data=st.data())
    def name(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from([holder for holder in self.holders if holder.pages]))
        self.named += 1
        self.cache.insert(str(self.named % 5).encode(), data.draw(st.sampled_from(holder.pages)))

    @rule(name=st.integers(0, 4))
    def share(self, name: int) -> None:
        page = self.cache.find(str(name).encode())
        if page is not None:
            holder = PageRun()
            self.table.share(holder, [page])
            self.holders.append(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.table.release([holder])
        assert holder.pages == []

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def condemn(self, data: st.DataObject) -> None:
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.table.invalidate(holder.pages, keep_verified=False)
        assert all(page not in self.cache for page in holder.pages)
        self.dirty.update(holder.pages)
        self.table.release([holder])

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), count=st.integers(0, 3))
    def advance(self, data: st.DataObject, count: int) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        end, kept = holder.end, holder.pages[count:]
        self.table.advance(holder, holder.first + count)
        assert holder.pages == kept
        assert holder.end == max(end, holder.first)

    @rule()
    def scrub(self) -> None:
        self.dirty -= set(self.table.take_dirty())

    @rule()
    def reset(self) -> None:
        idle = self.cache.idle
        assert self.table.reset_cache() == idle
        assert self.cache.idle == 0

    @invariant()
    def every_page_is_counted_once(self) -> None:
        held = [page for holder in self.holders for page in holder.pages]
        assert self.table.used == len(set(held))
        assert all(self.table.references(page) == held.count(page) for page in range(1, 7))
        assert self.table.free + self.table.used + self.cache.idle + self.table.dirty == 6


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=60, stateful_step_count=40)
