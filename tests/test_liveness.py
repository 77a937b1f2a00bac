"""Time in which a process did not run itself does not count against others."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from inlay.base import liveness
from inlay.base.liveness import MOST_SECONDS, TICK_SECONDS, LivenessClock

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


def run(loop: str, doing: Any) -> Any:
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        return runner.run(doing)


class Machine:
    """A clock whose ticks come when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time = 1000.0
        monkeypatch.setattr(liveness, "_time", lambda: self.time)
        monkeypatch.setattr(LivenessClock, "_schedule", lambda clock: None)
        self.clock = LivenessClock()

    def tick(self, after: float) -> None:
        self.time += after
        self.clock._tick()


@given(waits=st.lists(st.floats(0, 100), max_size=30))
def test_a_tick_counts_what_passed_and_never_more_than_a_loop_that_runs_leaves_between_two(
    waits: list[float],
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        machine = Machine(monkeypatch)
        began = machine.clock.now()
        counted = 0.0
        for wait in waits:
            machine.tick(wait)
            counted += min(wait, MOST_SECONDS)
            assert machine.clock.now() - began == pytest.approx(counted)
        assert machine.clock.lost(sum(waits) + 1) == pytest.approx(sum(waits) - counted)
        assert machine.clock.lost(0) == 0


def test_between_two_ticks_it_goes_on_and_stops_where_a_tick_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch)
    began = machine.clock.now()
    machine.time += TICK_SECONDS
    assert machine.clock.now() - began == pytest.approx(TICK_SECONDS)
    machine.time += 30
    assert machine.clock.now() - began == MOST_SECONDS
    assert machine.clock.lost(30) == pytest.approx(30 + TICK_SECONDS - MOST_SECONDS)


@pytest.mark.parametrize("loop", LOOPS)
def test_an_answer_that_came_while_the_process_stood_still_is_read_before_a_limit_is_reached(
    loop: str,
) -> None:
    def answer(other: socket.socket) -> None:
        other.recv(9)
        other.sendall(b"answer\n")

    async def stand_still() -> bytes:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            other = threading.Thread(target=answer, args=(theirs,))
            other.start()
            async with liveness.timeout(1.0):
                writer.write(b"question\n")
                await writer.drain()
                # The other end answers meanwhile.
                time.sleep(2.0)  # noqa: ASYNC251
                said = await reader.readline()
            other.join()
            writer.close()
            return said

    assert run(loop, stand_still()) == b"answer\n"


@pytest.mark.parametrize("loop", LOOPS)
def test_who_is_silent_while_the_process_runs_is_given_up(loop: str) -> None:
    async def wait() -> None:
        async with liveness.timeout(0.3):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        run(loop, wait())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_limit_can_be_moved_either_way(loop: str) -> None:
    async def wait() -> list[str]:
        said: list[str] = []
        async with liveness.timeout(0.05) as later:
            later.reset(600)
            await asyncio.sleep(0.3)
            said.append("later")
        with pytest.raises(TimeoutError):
            await sooner()
        return said

    async def sooner() -> None:
        async with liveness.timeout(600) as timer:
            timer.reset(0.05)
            await asyncio.Event().wait()

    assert run(loop, wait()) == ["later"]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_block_that_ends_in_time_or_is_cancelled_ends_as_it_would_without_a_limit(
    loop: str,
) -> None:
    async def work() -> list[str]:
        seen = []
        async with liveness.timeout(60):
            seen.append("done")
        with pytest.raises(ValueError, match="own"):
            async with liveness.timeout(60):
                raise ValueError("own")
        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return seen

    async def wait() -> None:
        async with liveness.timeout(60):
            await asyncio.Event().wait()

    assert run(loop, work()) == ["done"]
