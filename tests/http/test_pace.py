"""Nobody waits long for another's computation.

Threads in the background give way, and collections look at little.
"""

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest

from inlay.base import pace
from inlay.http.bodies.accounting import Reservation
from inlay.http.callers.auth import ANYONE
from inlay.http.server import LONG_BYTES, OFFLOAD_BYTES, SMALL_BYTES, Server, preparing_for
from inlay.messages.digest import BLOCK_SIZE, Secret, row_digests
from inlay.messages.prompt import Buffer, Rows
from inlay.tensors.cast import cast, largest_magnitude
from tests.commands import run
from tests.live import Fleet

T = TypeVar("T")


def in_background(function: Callable[[], T]) -> T:
    """Return the result of a function run in a background thread."""
    found: list[T] = []

    def run() -> None:
        pace.mark_background()
        found.append(function())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times at which somebody gave way, by a clock that goes on by 0.1 ms whenever it is read."""
    now = 0.0
    made: list[float] = []

    def clock() -> float:
        nonlocal now
        now += 0.0001
        return now

    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(time, "sleep", lambda _: made.append(now))
    return made


def test_a_thread_in_the_background_gives_way_once_a_turn(pauses: list[float]) -> None:
    def often() -> None:
        for _ in range(100):
            pace.yield_gil()

    in_background(often)
    assert 5 < len(pauses) < 15
    assert min(np.diff(pauses)) > pace.TURN


@pytest.mark.parametrize("gives_way", [True, False])
def test_threads_in_the_background_take_turns_and_wait_for_no_library(
    monkeypatch: pytest.MonkeyPatch, gives_way: bool
) -> None:
    monkeypatch.setattr(pace, "_turns", threading.BoundedSemaphore(1))
    monkeypatch.setattr(pace, "_PATIENCE", 60.0 if gives_way else 0.001)
    left, has_turn, over, second = (threading.Event() for _ in range(4))

    def long() -> None:
        pace.yield_gil()
        has_turn.set()
        over.wait()
        pace.yield_gil()

    def one() -> None:
        with pytest.raises(pace.Unwanted):
            pace.while_wanted(left, long)

    def other() -> None:
        pace.while_wanted(threading.Event(), pace.yield_gil)
        second.set()

    threads = [threading.Thread(target=in_background, args=(each,)) for each in (one, other)]
    threads[0].start()
    try:
        assert has_turn.wait(60)
        threads[1].start()
        # The first computes on, or is in a library for long.
        assert second.wait(0.1 if gives_way else 60) is not gives_way
    finally:
        left.set()
        over.set()
        for thread in threads:
            thread.join(60)
    # It was given back by one that nobody wanted any more.
    assert second.is_set()
    assert pace._turns.acquire(blocking=False)


def test_other_threads_never_give_way(pauses: list[float]) -> None:
    for _ in range(100):
        pace.yield_gil()
    assert not pauses


def test_digests_checks_and_casts_of_a_large_prompt_give_way_and_come_out_the_same(
    pauses: list[float],
) -> None:
    values = np.random.default_rng(0).standard_normal((2000, 1024), np.float32)
    rows = Rows(Buffer(values.data.cast("B")), "float32", values.shape)
    bits, secret = values.view(np.uint32).ravel(), Secret(bytes(32))

    def computed() -> tuple[bytes, int, bytes]:
        return (
            row_digests(rows, secret),
            largest_magnitude(bits),
            cast(bits, "float32", "bfloat16").tobytes(),
        )

    here = computed()
    assert not pauses
    counts = []
    for part in (lambda: row_digests(rows, secret), lambda: largest_magnitude(bits), lambda: cast(bits, "float32", "bfloat16")):  # fmt: skip
        in_background(part)
        counts.append(len(pauses))
    assert 0 < counts[0] < counts[1] < counts[2]
    assert in_background(computed) == here
    size = BLOCK_SIZE
    groups = [rows.slice(start, start + size) for start in range(0, len(rows), size)]
    assert here[0] == b"".join(row_digests(group, secret) for group in groups)


def test_large_requests_are_prepared_in_the_background(llama: Fleet, pauses: list[float]) -> None:
    server = llama.apps[llama.serve()].server
    llama.run(server.run_prepared(1, pace.yield_gil))
    assert not pauses
    llama.run(server.run_prepared(OFFLOAD_BYTES, pace.yield_gil))
    assert len(pauses) == 1


def test_a_loop_that_has_prepared_much_prepares_only_what_is_small(
    llama: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = llama.apps[llama.serve()].server
    now = spent = 0.0

    def worked() -> float:
        nonlocal spent
        spent += 0.1
        return spent

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(time, "thread_time", worked)

    def here(size: int) -> bool:
        """True if a body of `size` bytes is prepared on the event loop."""

        async def both() -> bool:
            return await server.run_prepared(size, threading.get_ident) == threading.get_ident()

        return llama.run(both())

    assert here(OFFLOAD_BYTES - 1)
    assert not here(OFFLOAD_BYTES - 1)
    assert not here(SMALL_BYTES)
    assert here(SMALL_BYTES - 1)
    now = 1.0
    assert here(OFFLOAD_BYTES - 1)


async def prepared_for(
    server: Server, client: str, function: Callable[[], object], size: int = OFFLOAD_BYTES
) -> None:
    """Run a function that stands for the work on `size` bytes of a client."""
    memory = Reservation(server.budget)
    memory.client = server.clients.of(ANYONE, client)
    preparing_for.set(memory)
    await server.run_prepared(size, function)


def test_a_client_that_has_much_prepared_leaves_a_thread_to_others(llama: Fleet) -> None:
    server = llama.apps[llama.serve()].server
    over = threading.Event()

    async def both() -> None:
        many = [asyncio.create_task(prepared_for(server, "10.0.0.1", over.wait)) for _ in range(32)]
        try:
            for _ in range(5):
                await asyncio.sleep(0)
            # Those that have begun cannot be interrupted: their threads stay taken.
            for one in many[:4]:
                one.cancel()
            await asyncio.wait_for(prepared_for(server, "10.0.0.2", lambda: None), 60)
        finally:
            over.set()
        await asyncio.gather(*many, return_exceptions=True)

    llama.run(both())


def test_many_clients_with_long_work_leave_a_thread_to_what_is_short(llama: Fleet) -> None:
    server = llama.apps[llama.serve()].server
    over = threading.Event()

    async def both() -> None:
        many = [
            asyncio.create_task(prepared_for(server, f"10.0.0.{host}", over.wait, LONG_BYTES))
            for host in range(32)
        ]
        try:
            for _ in range(5):
                await asyncio.sleep(0)
            for one in many[:4]:
                one.cancel()
            # Of a client that waits with long work, too.
            for client in ("10.0.0.31", "10.0.1.1"):
                await asyncio.wait_for(prepared_for(server, client, lambda: None), 60)
        finally:
            over.set()
        await asyncio.gather(*many, return_exceptions=True)

    llama.run(both())


def test_what_a_process_has_loaded_is_not_collected_again() -> None:
    code = (
        "import gc, inlay.api.app, inlay.base.pace as pace; pace.freeze_gc();"
        "print(gc.get_freeze_count() > 10_000, len(gc.get_objects()) < 1000)"
    )
    assert run(sys.executable, "-c", code).split() == ["True", "True"]
