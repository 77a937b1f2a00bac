from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inlay.engine.torch.prefix_cache import PrefixCache
from inlay.engine.torch.table import PageTable


def test_growing_beyond_what_is_available_changes_nothing() -> None:
    table = PageTable(2, PrefixCache())
    holder: list[int] = []
    assert not table.grow(holder, 3)
    assert holder == []
    assert table.available == 2


def test_a_shared_page_is_free_only_after_its_last_holder_let_go() -> None:
    cache = PrefixCache()
    table = PageTable(4, cache)
    first: list[int] = []
    second: list[int] = []
    table.grow(first, 1)
    cache.insert(b"a", first[0])
    table.share(second, list(first))
    table.release(first)
    assert table.used == 1
    assert table.grow([], 3)
    assert cache.find(b"a") == second[0]
    table.release(second)
    assert cache.idle == 1


def test_a_prefix_outlives_what_continues_it() -> None:
    cache = PrefixCache()
    table = PageTable(2, cache)
    holder: list[int] = []
    table.grow(holder, 2)
    cache.insert(b"first", holder[0])
    cache.insert(b"second", holder[1])
    table.release(holder)
    table.grow([], 1)
    assert cache.find(b"first") is not None
    assert cache.find(b"second") is None


def test_condemned_pages_are_not_handed_out_before_they_are_scrubbed() -> None:
    cache = PrefixCache()
    table = PageTable(3, cache)
    holder: list[int] = []
    table.grow(holder, 2)
    cache.insert(b"a", holder[0])
    condemned = set(holder)
    table.condemn(holder, written=1)
    assert cache.find(b"a") is None
    table.release(holder)
    assert (table.available, table.dirty, table.used) == (1, 2, 0)
    assert set(table.take_dirty()) == condemned
    assert (table.available, table.dirty) == (3, 0)


def test_a_condemned_page_waits_for_its_other_holders() -> None:
    cache = PrefixCache()
    table = PageTable(2, cache)
    bad: list[int] = []
    table.grow(bad, 1)
    cache.insert(b"a", bad[0])
    other: list[int] = []
    table.share(other, list(bad))
    table.condemn(bad, written=0)
    table.release(bad)
    assert table.take_dirty() == []
    table.release(other)
    assert len(table.take_dirty()) == 1


def test_pages_that_gave_finite_logits_are_spared() -> None:
    cache = PrefixCache()
    table = PageTable(3, cache)
    good: list[int] = []
    table.grow(good, 1)
    cache.insert(b"shared prefix", good[0])
    table.prove(good)
    bad: list[int] = []
    table.share(bad, list(good))
    table.grow(bad, 1)
    table.condemn(bad, written=1)
    table.release(bad)
    assert cache.find(b"shared prefix") == good[0]
    assert table.dirty == 1


def test_a_page_the_failed_step_wrote_to_is_not_spared_for_what_it_gave_before() -> None:
    table = PageTable(2, PrefixCache())
    holder: list[int] = []
    table.grow(holder, 2)
    table.prove(holder)
    last = holder[1]
    table.condemn(holder, written=1)
    table.release(holder)
    assert table.take_dirty() == [last]


class TableMachine(RuleBasedStateMachine):
    """Any order of growing, naming, sharing, releasing, condemning keeps each page in exactly one place."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache()
        self.table = PageTable(6, self.cache)
        self.holders: list[list[int]] = []
        self.named = 0
        self.dirty: set[int] = set()

    @rule(count=st.integers(0, 4))
    def grow(self, count: int) -> None:
        holder: list[int] = []
        before = self.table.available
        assert self.table.grow(holder, count) == (count <= before)
        assert not self.dirty & set(holder)
        self.holders.append(holder)

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data())
    def name(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from([holder for holder in self.holders if holder]))
        self.named += 1
        self.cache.insert(str(self.named % 5).encode(), data.draw(st.sampled_from(holder)))

    @rule(name=st.integers(0, 4))
    def share(self, name: int) -> None:
        page = self.cache.find(str(name).encode())
        if page is not None:
            holder: list[int] = []
            self.table.share(holder, [page])
            self.holders.append(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.table.release(holder)
        assert holder == []

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def condemn(self, data: st.DataObject) -> None:
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.table.condemn(holder, written=0)
        assert all(page not in self.cache for page in holder)
        self.dirty.update(holder)
        self.table.release(holder)

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
        held = [page for holder in self.holders for page in holder]
        assert self.table.used == len(set(held))
        assert all(self.table.references(page) == held.count(page) for page in range(6))
        assert self.table.free + self.table.used + self.cache.idle + self.table.dirty == 6


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=60, stateful_step_count=40)
