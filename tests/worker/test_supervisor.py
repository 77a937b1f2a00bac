"""A worker that dies is started again.

The plane says meanwhile what is missing, and nothing of the dead one stays.
"""

import asyncio
import gc
import os
import shutil
import signal
import socket
import subprocess
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from inlay.base.errors import InvalidRequestError, OverloadedError
from inlay.engine.settings import EngineSettings
from inlay.messages.commands import AnyCommand, LoadAdapter, ProbeEngine, Sleep, WakeUp
from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer, Prompt, Rows, Tokens
from inlay.messages.request import Request, Sampling
from inlay.transport.local import Arena, LocalPlane, LocalTransport
from inlay.transport.messages import FromWorker
from inlay.worker import Backoff, RestartGroup, Supervisor, WorkerProcess, spawn
from inlay.worker.interpreter import Interpreter
from tests import adapters
from tests.models import tiny

SECRET = Secret(bytes(32))


class Starts:
    """Starts echo workers, and remembers them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.processes: list[WorkerProcess] = []
        self.pids: list[int] = []
        self.times: list[float] = []
        self._more = asyncio.Event()
        (path / "config.json").write_text(
            '{"vocab_size": 9, "hidden_size": 8, "max_position_embeddings": 64}'
        )

    async def __call__(self, restore: Sequence[AnyCommand]) -> WorkerProcess:
        self.times.append(asyncio.get_running_loop().time())
        settings = EngineSettings.of(model=str(self.path), engine="echo")
        process = await spawn(settings, SECRET, arena_bytes=1 << 20, restore=restore)
        self.processes.append(process)
        self.pids.append(process.pid)
        self._more.set()
        return process

    async def reached(self, count: int) -> None:
        while len(self.processes) < count:
            self._more.clear()
            await self._more.wait()


@asynccontextmanager
async def supervised(starts: Starts, backoff: Backoff) -> AsyncIterator[LocalPlane]:
    plane = LocalPlane()
    task = asyncio.create_task(Supervisor(plane, starts, backoff=backoff).run())
    try:
        await until_ready(plane)
        yield plane
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await plane.close()


async def until_ready(plane: LocalPlane, ready: bool = True) -> None:
    while bool(plane.workers()) is not ready:
        await plane.changed()


async def test_a_worker_that_dies_comes_back_as_another(tmp_path: Path) -> None:
    starts = Starts(tmp_path)
    async with supervised(starts, Backoff(0.01)) as plane:
        assert plane.unavailable() == {}
        first = plane.workers()[0]
        arena: weakref.ref[Arena] = weakref.ref(starts.processes[0].channel.arena)
        os.kill(starts.processes[0].pid, signal.SIGKILL)
        await until_ready(plane, ready=False)
        await until_ready(plane)
        assert plane.workers()[0].id != first.id
        assert plane.unavailable() == {}
        await plane.workers()[0].call(ProbeEngine())
        del first
        starts.processes.clear()
        gc.collect()
        assert arena() is None
    assert starts.pids
    assert not any(map(psutil.pid_exists, starts.pids))


async def test_the_rows_of_requests_that_failed_with_a_worker_are_gone_when_the_next_is_there(
    tmp_path: Path,
) -> None:
    starts = Starts(tmp_path)
    rows = Rows(Buffer(bytes(64)), "float32", (2, 8))
    buffer = weakref.ref(rows.data)
    async with supervised(starts, Backoff(0.01)) as plane:

        async def answer(rows: Rows) -> None:
            request = Request(id="1", prompts=(Prompt.of(rows),), params=Sampling(max_tokens=4))
            async for _ in plane.workers()[0].send(request):
                pass

        os.kill(starts.pids[0], signal.SIGSTOP)
        answering = asyncio.create_task(answer(rows))
        del rows
        await asyncio.sleep(0)
        gc.disable()
        try:
            os.kill(starts.pids[0], signal.SIGKILL)
            await asyncio.wait({answering})
            assert isinstance(answering.exception(), OverloadedError)
            del answering
            await until_ready(plane, ready=False)
            await until_ready(plane)
            assert buffer() is None
        finally:
            gc.enable()


@pytest.mark.slow
async def test_starts_that_fail_are_further_and_further_apart(tmp_path: Path) -> None:
    starts = Starts(tmp_path)
    async with supervised(starts, Backoff(0.05, most=0.2)) as plane:
        (tmp_path / "config.json").unlink()
        os.kill(starts.processes[0].pid, signal.SIGKILL)
        await starts.reached(5)
        assert "no model at" in plane.unavailable()["worker"]
        Starts(tmp_path)
        await until_ready(plane)
    gaps = [after - before for before, after in zip(starts.times, starts.times[1:], strict=False)]
    assert all(gap >= wait for gap, wait in zip(gaps, (0.05, 0.1, 0.2, 0.2), strict=False))


async def test_a_first_start_that_fails_is_the_callers(tmp_path: Path) -> None:
    starts = Starts(tmp_path)
    (tmp_path / "config.json").unlink()
    plane = LocalPlane()
    with pytest.raises(InvalidRequestError, match="no model at"):
        await Supervisor(plane, starts).run()
    assert starts.pids
    assert not any(map(psutil.pid_exists, starts.pids))


async def test_what_a_worker_started_ends_with_it() -> None:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(  # noqa: ASYNC220 - as workers are started
        ["sh", "-c", "sleep 600 > /dev/null & echo $!; exec sleep 600 > /dev/null"],
        start_new_session=True,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    left_behind = psutil.Process(int(process.stdout.readline()))
    process.stdout.close()
    channel: LocalTransport[FromWorker] = await LocalTransport.open(
        ours, Arena(1 << 20), FromWorker, sends_shared=True
    )
    worker = WorkerProcess(process, channel, Interpreter("sh"))
    process.kill()
    process.wait()
    assert left_behind.is_running()
    await worker.close()
    theirs.close()
    await asyncio.to_thread(psutil.wait_procs, [left_behind], 10)
    assert not left_behind.is_running() or left_behind.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
async def test_the_next_worker_has_the_adapters_and_the_sleep_of_the_one_before(
    tmp_path: Path,
) -> None:
    model = tiny("llama")
    lora = adapters.make_lora(tmp_path / "lora", model)
    settings = EngineSettings.of(
        model=str(model),
        enable_lora=True,
        max_loras=1,
        max_cpu_loras=2,
        max_lora_rank=8,
        enable_sleep_mode=True,
        num_threads=1,
    )
    processes: list[WorkerProcess] = []

    async def start(restore: Sequence[AnyCommand]) -> WorkerProcess:
        processes.append(await spawn(settings, SECRET, arena_bytes=1 << 20, restore=restore))
        return processes[-1]

    plane = LocalPlane()
    task = asyncio.create_task(Supervisor(plane, start, backoff=Backoff(0.01)).run())
    await until_ready(plane)
    changed = adapters.make_lora(tmp_path / "changed", model)
    worker = plane.workers()[0]
    for command in (LoadAdapter("fine", str(lora)), LoadAdapter("changed", str(changed))):
        await worker.call(command)
    await worker.call(Sleep(1))
    before = plane.workers()[0].card
    assert ([adapter.name for adapter in before.adapters], before.asleep) == (
        ["fine", "changed"],
        1,
    )
    shutil.rmtree(changed)
    adapters.make_lora(changed, model, seed=5)
    os.kill(processes[0].pid, signal.SIGKILL)
    await until_ready(plane, ready=False)
    await until_ready(plane)
    worker = plane.workers()[0]
    # The first card it shows.
    assert (worker.card.adapters, worker.card.asleep) == (before.adapters[:1], 1)
    assert (await worker.call(WakeUp(), 60)).awake
    asked = Request(
        id="w",
        prompts=(Prompt.of(Tokens((5, 6, 7))),),
        params=Sampling(max_tokens=3),
        adapter="fine",
    )
    answered = [delta async for deltas in worker.send(asked) for delta in deltas]
    assert sum(len(delta.token_ids) for delta in answered) > 0
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await plane.close()


@pytest.mark.slow
async def test_workers_that_are_tied_end_together_and_are_started_again_together(
    tmp_path: Path,
) -> None:
    plane, together, several = LocalPlane(), RestartGroup(), [Starts(tmp_path) for _ in range(3)]
    tasks = [
        asyncio.create_task(Supervisor(plane, starts, backoff=Backoff(0.01), tied=together).run())
        for starts in several
    ]
    try:
        while len(plane.workers()) < 3:
            await plane.changed()
        os.kill(several[1].pids[0], signal.SIGKILL)
        for starts in several:
            await starts.reached(2)
        while len(plane.workers()) < 3:
            await plane.changed()
        assert [len(starts.pids) for starts in several] == [2, 2, 2]
        assert not any(psutil.pid_exists(starts.pids[0]) for starts in several)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await plane.close()
