"""Background requests run beside others only as many as these do not feel."""

import asyncio
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from inlay.messages.card import Limits
from inlay.messages.priority import BACKGROUND
from inlay.router.background import BackgroundWindow
from tests.router.scripted_plane import SMALL, Answering, quiet
from tests.router.test_dispatcher import House, ended

WIDE = replace(SMALL, limits=Limits(max_model_len=99_999, max_num_seqs=8))


def simulated(gap: Callable[[int], float], seconds: int) -> list[int]:
    """Sizes of a window, second by second, beside one stream whose gaps background work widens."""
    now = 0.0
    window = BackgroundWindow(lambda: now)
    running, sizes = 0, []
    for _ in range(seconds):
        while window.admits(1, 1, 32):
            window.began()
            running += 1
        while running > window.size:
            window.ended()
            running -= 1
        until = now + 1.0
        while now < until:
            now += gap(running)
            window.waited(gap(running), first=False)
        sizes.append(window.size)
    return sizes


def test_a_window_grows_by_one_while_nobody_waits_longer_and_is_halved_else() -> None:
    free = simulated(lambda running: 0.01, 40)
    assert free[:5] == [1, 2, 3, 4, 5]
    assert free[-1] == 32
    tight = simulated(lambda running: 0.01 if running <= 6 else 0.02, 60)
    assert max(tight) == 7
    assert min(tight[10:]) == 3
    assert simulated(lambda running: 0.01 * (1 + running), 20)[-1] <= 2


def test_the_time_without_background_work_is_learned_again_when_others_do_more() -> None:
    now = 0.0
    window = BackgroundWindow(lambda: now)

    def second(gap: float) -> None:
        nonlocal now
        window.waited(gap, first=False)
        now += 1.0
        window.admits(1, 1, 8)

    for _ in range(3):
        second(0.01)
    before = window.size
    for _ in range(4):
        second(0.05)
    # Nothing ran beside them: it is their own doing, and soon the usual.
    for _ in range(12):
        second(0.05)
    assert window.size >= before


@pytest.mark.parametrize("each_second", [1, 4])
def test_first_tokens_count_however_few_and_whatever_ran_when_others_came(each_second: int) -> None:
    """A client that asks now and then, beside a batch that had the pool for itself.

    A step of more sequences takes longer, and a request waits for half of the one it finds.
    """
    now = 0.0
    window = BackgroundWindow(lambda: now)
    left: list[float] = []
    while window.admits(1, 0, 32):
        window.began()
        left.append(5.0)
    assert len(left) == 32
    sizes, waits = [], []
    for _ in range(120):
        for _ in range(each_second):
            waits.append(0.02 + 0.001 * len(left))
            window.waited(waits[-1], first=True)
            now += 1 / each_second
        for _ in [end for end in left if end <= now]:
            window.ended()
        left = [end for end in left if end > now]
        while window.admits(1, 1, 32):
            window.began()
            left.append(now + 3.0)
        sizes.append(window.size)
    assert max(sizes[20:]) > 1
    late = sorted(waits[len(waits) // 2 :])
    assert late[len(late) // 2] <= 1.25 * 0.02 * 1.05


def test_an_idle_pool_runs_background_requests_at_its_full_width() -> None:
    now = 0.0
    window = BackgroundWindow(lambda: now)
    assert window.admits(4, 0, 8)
    for _ in range(8):
        assert window.admits(1, 0, 8)
        window.began()
    assert not window.admits(1, 0, 8)
    window.ended()
    assert not window.admits(1, 1, 8)
    # Just after the last of the others they still count.
    assert not window.admits(1, 0, 8)
    now += 1.5
    assert window.admits(1, 0, 8)


async def test_a_background_request_waits_while_any_other_does() -> None:
    worker = Answering("w")
    house = House(worker)
    await house.full()
    behind = await house.ask("behind", client="a/batch", priority=BACKGROUND)
    first = await house.ask("first", client="a", priority=2**31 - 1)
    house.running["full-0"].cancel()
    await quiet()
    assert first.done()
    assert not behind.done()
    assert house.sent == ["full-0", "first"]
    await ended(behind)
    (stream,) = await first
    stream.cancel()


async def test_beside_others_a_pool_runs_no_more_of_them_than_its_window() -> None:
    house = House(Answering("w", WIDE))
    (busy,) = await (await house.ask("busy", client="a"))
    tasks = [await house.ask(f"b{index}", client="b", priority=BACKGROUND) for index in range(3)]
    assert [task.done() for task in tasks] == [True, False, False]
    # Others are served at once, whatever waits in the background.
    (more,) = await (await house.ask("more", client="c"))
    (stream,) = await tasks[0]
    stream.cancel()
    await quiet()
    assert [task.done() for task in tasks] == [True, True, False]
    (stream,) = await tasks[1]
    for one in (busy, more, stream):
        one.cancel()
    await ended(tasks[2])


@pytest.mark.parametrize("count", [8, 5])
async def test_a_pool_that_serves_nobody_else_runs_as_many_as_it_can(count: int) -> None:
    house = House(Answering("w", WIDE))
    tasks = [
        await house.ask(f"b{index}", client="b", priority=BACKGROUND) for index in range(count + 1)
    ]
    assert sum(task.done() for task in tasks) == min(8, count + 1)
    for task in tasks:
        if task.done():
            (await task)[0].cancel()
    await quiet()
    await asyncio.gather(*(asyncio.wait_for(task, 60) for task in tasks if not task.cancelled()))


async def test_batches_of_two_clients_take_turns_whoever_began_first() -> None:
    worker = Answering("w")
    house = House(worker)
    tasks = [
        await house.ask(f"{name}{number}", client=f"{name}/batch", priority=BACKGROUND)
        for name in "ab"
        for number in range(4)
    ]
    for _ in range(8):
        worker.live[0].end()
        (stream,) = await next(task for task in tasks if task.done())
        tasks = [task for task in tasks if not task.done()]
        assert [output async for outputs in stream for output in outputs]
        await quiet()
    assert house.sent == ["a0", "a1", "b0", "a2", "b1", "a3", "b2", "b3"]
