"""Results are kept within their bytes, computed once at a time, and nobody waits for what will not come."""

import asyncio
import gc
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from inlay.embedding.cache import Bundle, ResultCache, size_of


def key(name: int) -> bytes:
    return name.to_bytes(16, "little")


def bundle_of(name: int, length: int = 64) -> Bundle:
    return {"vector": np.full(length, name, np.float32)}


class Asking:
    """One caller of the cache, whose computations end when the test says so."""

    def __init__(self, cache: ResultCache, names: Sequence[int]) -> None:
        self.names = names
        self.computing: set[int] = set()
        self._ends: asyncio.Future[bool] | None = None
        self.task = asyncio.ensure_future(cache.fetch([key(name) for name in names], self._compute))

    async def _compute(self, indices: Sequence[int]) -> list[Bundle]:
        chosen = [self.names[index] for index in indices]
        self.computing = set(chosen)
        assert len(self.computing) == len(chosen)
        self._ends = asyncio.get_running_loop().create_future()
        try:
            if not await self._ends:
                raise ZeroDivisionError
        finally:
            self.computing = set()
            self._ends = None
        return [bundle_of(name) for name in chosen]

    def end(self, *, well: bool) -> None:
        if self._ends is not None and not self._ends.done():
            self._ends.set_result(well)

    def check(self) -> None:
        """What has ended well is right."""
        if self.task.done() and not self.task.cancelled() and self.task.exception() is None:
            for name, bundle in zip(self.names, self.task.result(), strict=True):
                assert (bundle["vector"] == name).all()
                assert not bundle["vector"].flags.writeable


class CacheMachine(RuleBasedStateMachine):
    """Callers that come, leave, fail and end in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.asking: list[Asking] = []
        self.cache = ResultCache(0)

    @initialize(room=st.integers(0, 4))
    def begin(self, room: int) -> None:
        self.cache = ResultCache(room * size_of(key(0), bundle_of(0)))

    def turn(self) -> None:
        async def a_while() -> None:
            for _ in range(8):
                await asyncio.sleep(0)

        self.loop.run_until_complete(a_while())

    @rule(names=st.lists(st.integers(0, 5), min_size=1, max_size=4))
    def ask(self, names: list[int]) -> None:
        async def start() -> Asking:
            return Asking(self.cache, names)

        self.asking.append(self.loop.run_until_complete(start()))
        self.turn()

    @rule(which=st.integers(0, 9), well=st.booleans())
    def end(self, which: int, well: bool) -> None:
        if self.asking:
            self.asking[which % len(self.asking)].end(well=well)
            self.turn()

    @rule(which=st.integers(0, 9))
    def leave(self, which: int) -> None:
        if self.asking:
            self.asking[which % len(self.asking)].task.cancel()
            self.turn()

    @invariant()
    def what_is_kept_fits(self) -> None:
        assert 0 <= self.cache.kept.used <= self.cache.kept.limit
        kept = self.cache.kept
        assert kept.used == sum(size_of(name, kept.peek(name) or {}) for name in kept)

    @invariant()
    def nothing_is_computed_twice_at_a_time(self) -> None:
        computing = [name for asking in self.asking for name in asking.computing]
        assert len(computing) == len(set(computing))
        assert {key(name) for name in computing} == set(self.cache._flights._flights)

    @invariant()
    def results_are_right(self) -> None:
        for asking in self.asking:
            asking.check()

    def teardown(self) -> None:
        # Whoever still waits gets an answer once what is computed ends.
        for _ in range(200):
            for asking in self.asking:
                asking.end(well=True)
            self.turn()
        assert all(asking.task.done() for asking in self.asking)
        for asking in self.asking:
            asking.check()
            if not asking.task.cancelled():
                asking.task.exception()
        assert not len(self.cache._flights)
        self.loop.close()


TestCache = CacheMachine.TestCase
TestCache.settings = settings(stateful_step_count=25, deadline=None)


async def computed(
    cache: ResultCache, *names: int, length: int = 64
) -> tuple[list[Bundle], list[int]]:
    calls: list[int] = []

    async def compute(indices: Sequence[int]) -> list[Bundle]:
        calls.extend(names[index] for index in indices)
        return [bundle_of(names[index], length) for index in indices]

    return await cache.fetch([key(name) for name in names], compute), calls


async def test_what_is_kept_is_not_computed_again_and_the_oldest_goes_first() -> None:
    cache = ResultCache(2 * size_of(key(0), bundle_of(0)))
    assert (await computed(cache, 1, 2, 1, 1))[1] == [1, 2]
    assert (await computed(cache, 1))[1] == []
    assert (await computed(cache, 3))[1] == [3]
    assert (await computed(cache, 1, 3))[1] == []
    assert (await computed(cache, 2))[1] == [2]
    assert (cache.hits, cache.misses, cache.evictions, len(cache)) == (3, 4, 2, 2)


async def test_what_is_larger_than_all_room_is_answered_and_not_kept() -> None:
    cache = ResultCache(1000)
    (bundle,), _ = await computed(cache, 1, length=1000)
    assert len(bundle["vector"]) == 1000
    assert (len(cache), cache.kept.used, cache.refused) == (0, 0, 1)


async def test_what_is_kept_of_a_batch_is_no_more_than_its_own_part() -> None:
    cache = ResultCache(1 << 20)
    batch = np.zeros((1000, 256), np.float32)

    async def compute(indices: Sequence[int]) -> list[Bundle]:
        return [{"vector": batch[index]} for index in indices]

    (bundle,) = await cache.fetch([key(1)], compute)
    assert bundle["vector"].base is None


@pytest.mark.thorough
async def test_bytes_counted_are_those_taken() -> None:
    gc.collect()
    tracemalloc.start()
    try:
        cache = ResultCache(8 << 20)
        before = tracemalloc.get_traced_memory()[0]
        for name in range(3000):
            await computed(cache, name, length=96)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(cache) == 3000
    assert 0.8 < taken / cache.kept.used < 1.2


async def settled() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


async def test_a_result_that_two_wait_for_is_computed_once_though_the_first_leaves() -> None:
    cache = ResultCache(1 << 20)
    leading, waiting = Asking(cache, [1, 2]), Asking(cache, [2, 3])
    await settled()
    assert (leading.computing, waiting.computing) == ({1, 2}, {3})
    waiting.end(well=True)
    leading.task.cancel()
    await settled()
    assert leading.task.cancelled()
    assert (leading.computing, waiting.computing) == ({1, 2}, set())
    leading.end(well=True)
    assert [bundle["vector"][0] for bundle in await waiting.task] == [2, 3]
    # What the one who left alone wanted was made with it, and is kept.
    assert (await computed(cache, 1, 2, 3))[1] == []
    assert cache.misses == 3


async def test_what_nobody_waits_for_any_more_is_not_computed_to_its_end() -> None:
    cache = ResultCache(1 << 20)
    leading, waiting = Asking(cache, [1, 2]), Asking(cache, [2])
    await settled()
    leading.task.cancel()
    await settled()
    assert leading.computing == {1, 2}
    waiting.task.cancel()
    await settled()
    assert leading.computing == set()
    assert not len(cache._flights)


async def test_an_error_is_of_its_own_caller_alone() -> None:
    cache = ResultCache(1 << 20)
    failing, waiting = Asking(cache, [1]), Asking(cache, [1])
    await settled()
    failing.end(well=False)
    with pytest.raises(ZeroDivisionError):
        await failing.task
    await settled()
    waiting.end(well=True)
    (bundle,) = await waiting.task
    assert bundle["vector"][0] == 1


async def test_whoever_stops_waiting_takes_nothing_from_the_others() -> None:
    cache = ResultCache(0)
    asking = [Asking(cache, [1]) for _ in range(3)]
    await settled()
    asking[1].task.cancel()
    await asyncio.sleep(0)
    asking[0].end(well=True)
    results: list[Any] = await asyncio.gather(
        *(each.task for each in asking), return_exceptions=True
    )
    assert isinstance(results[1], asyncio.CancelledError)
    assert results[0][0] is results[2][0]
    assert (cache.misses, cache.joined) == (1, 1)
