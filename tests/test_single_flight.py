"""One computation for equal keys at a time, whoever leaves meanwhile."""

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.base.pace import check_wanted, while_wanted
from inlay.base.single_flight import Paced, SingleFlight, ThreadSingleFlight, shielded
from tests.examples import examples

KEYS = "ab"
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("call"), st.sampled_from(KEYS)),
        st.tuples(st.just("leave"), st.integers(0, 20)),
        st.tuples(st.sampled_from(["finish", "fail"]), st.sampled_from(KEYS)),
        st.tuples(st.just("wait"), st.none()),
    ),
    max_size=40,
)


class Caller(NamedTuple):
    key: str
    task: "asyncio.Task[int]"


class Computations:
    """Those that were begun, and how each is to end."""

    def __init__(self) -> None:
        self.running: dict[str, asyncio.Future[int]] = {}
        self.begun: Counter[str] = Counter()

    async def compute(self, key: str) -> int:
        assert key not in self.running, "two computations of equal keys at a time"
        self.begun[key] += 1
        number = self.begun.total()
        self.running[key] = asyncio.get_running_loop().create_future()
        try:
            await self.running[key]
        finally:
            del self.running[key]
        return number


async def _settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def _follow(steps: list[tuple[str, str | int | None]], *, finishes: bool) -> None:
    flights: SingleFlight[str, int] = SingleFlight(finishes=finishes)
    done = Computations()
    callers: list[Caller] = []
    left: set[int] = set()
    for kind, what in steps:
        if kind == "call":
            key = str(what)
            task = asyncio.create_task(flights.run(key, lambda key=key: done.compute(key)))  # type: ignore[misc]
            callers.append(Caller(key, task))
        elif kind == "leave" and isinstance(what, int) and what < len(callers):
            callers[what].task.cancel()
            left.add(what)
        elif kind in ("finish", "fail") and what in done.running:
            ending = done.running[str(what)]
            if ending.done():
                continue
            if kind == "finish":
                ending.set_result(0)
            else:
                ending.set_exception(ValueError(what))
        elif kind == "wait":
            await _settled()
            waiting = {caller.key for caller in callers if not caller.task.done()}
            assert waiting <= set(done.running), "a caller waits for nothing"
            assert len(flights) == len(done.running)
            if not finishes:
                assert waiting == set(done.running), "a computation nobody waits for goes on"
    for _ in range(3):
        await _settled()
        for ending in done.running.values():
            if not ending.done():
                ending.set_result(0)
    await _settled()
    assert all(caller.task.done() for caller in callers)
    assert not len(flights)
    for number, (_, task) in enumerate(callers):
        if number not in left or not task.cancelled():
            assert isinstance(task.exception(), ValueError | None)


@settings(max_examples=examples(300), deadline=None)
@given(steps=STEPS, finishes=st.booleans())
def test_callers_are_answered_and_computations_are_single(
    steps: list[tuple[str, str | int | None]], finishes: bool
) -> None:
    asyncio.run(_follow(steps, finishes=finishes))


@pytest.mark.parametrize("finishes", [False, True])
async def test_a_cancelled_first_caller_leaves_the_others_their_result(finishes: bool) -> None:
    flights: SingleFlight[str, int] = SingleFlight(finishes=finishes)
    done = Computations()
    first, *others = (
        asyncio.create_task(flights.run("a", lambda: done.compute("a"))) for _ in range(3)
    )
    await _settled()
    first.cancel()
    await _settled()
    assert first.cancelled()
    done.running["a"].set_result(0)
    assert await asyncio.gather(*others) == [1, 1]
    assert done.begun == {"a": 1}


async def test_a_computation_that_finishes_serves_who_comes_after_all_have_left() -> None:
    flights: SingleFlight[str, int] = SingleFlight(finishes=True)
    done = Computations()
    leaving = asyncio.create_task(flights.run("a", lambda: done.compute("a")))
    await _settled()
    leaving.cancel()
    await _settled()
    late = asyncio.create_task(flights.run("a", lambda: done.compute("a")))
    await _settled()
    done.running["a"].set_result(0)
    assert await late == 1


async def test_a_computation_for_many_keys_goes_on_while_anyone_waits_for_one_of_them() -> None:
    flights: SingleFlight[str, str] = SingleFlight()
    begun: list[list[str]] = []
    go = asyncio.Event()

    async def compute(keys: Sequence[str]) -> list[str]:
        begun.append(list(keys))
        await go.wait()
        return [key.upper() for key in keys]

    first = asyncio.create_task(flights.run_many("abc", compute))
    await _settled()
    second = asyncio.create_task(flights.run_many("cd", compute))
    third = asyncio.create_task(flights.run_many("b", compute))
    await _settled()
    assert begun == [["a", "b", "c"], ["d"]]
    assert len(flights) == 4
    first.cancel()
    third.cancel()
    await _settled()
    go.set()
    assert await second == {"c": "C", "d": "D"}
    assert first.cancelled()
    assert begun == [["a", "b", "c"], ["d"]]
    assert not len(flights)


async def test_an_error_of_many_keys_is_that_of_who_began_and_others_lack_them() -> None:
    flights: SingleFlight[str, str] = SingleFlight()
    fails = asyncio.Event()

    async def failing(keys: Sequence[str]) -> list[str]:
        await fails.wait()
        raise ValueError("".join(keys))

    async def working(keys: Sequence[str]) -> list[str]:
        return [key.upper() for key in keys]

    began = asyncio.create_task(flights.run_many("ab", failing))
    await _settled()
    joined = asyncio.create_task(flights.run_many("bc", working))
    await _settled()
    fails.set()
    with pytest.raises(ValueError, match="ab"):
        await began
    assert await joined == {"c": "C"}


async def test_what_is_paced_begins_after_it_was_asked_for_and_not_too_soon() -> None:
    loop = asyncio.get_running_loop()
    begun: list[float] = []

    async def compute() -> float:
        begun.append(loop.time())
        return begun[-1]

    paced = Paced(compute, 0.05)
    for _ in range(4):
        asked = loop.time()
        found = await asyncio.gather(*(paced.result() for _ in range(20)))
        assert len(set(found)) == 1
        assert found[0] >= asked
    left = asyncio.create_task(paced.result())
    await asyncio.sleep(0)
    other = asyncio.create_task(paced.result())
    left.cancel()
    assert await other == begun[-1]
    assert len(begun) == 5
    assert all(later - earlier > 0.04 for earlier, later in pairwise(begun))


async def test_cancelling_all_ends_computations_and_callers() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    done = Computations()
    callers = [
        asyncio.create_task(flights.run(key, lambda key=key: done.compute(key)))  # type: ignore[misc]
        for key in "aab"
    ]
    await _settled()
    await asyncio.gather(*flights.cancel(), return_exceptions=True)
    await _settled()
    assert not done.running
    assert all(caller.cancelled() for caller in callers)
    again = asyncio.create_task(flights.run("a", lambda: done.compute("a")))
    await _settled()
    done.running["a"].set_result(0)
    assert await again == 3


async def test_an_error_after_its_caller_was_cancelled_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    running: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def waits(future: "asyncio.Future[None]") -> None:
        await shielded(future)

    waiting = asyncio.create_task(waits(running))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not running.cancelled()
    running.set_exception(ValueError("late"))
    await asyncio.sleep(0)
    del running, waiting
    gc.collect()
    assert caplog.records == []


def test_a_thread_whose_caller_has_left_computes_on_for_the_others() -> None:
    flights: ThreadSingleFlight[str, int] = ThreadSingleFlight()
    left, begun, joined = threading.Event(), threading.Event(), threading.Event()

    def compute() -> int:
        begun.set()
        joined.wait(60)
        left.set()
        check_wanted()
        return 5

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(while_wanted, left, flights.run, "a", compute)
        begun.wait(60)
        second = threads.submit(flights.run, "a", compute)
        joined.set()
        assert second.result(60) == 5
        assert first.result(60) == 5
