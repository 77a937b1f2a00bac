"""Pages that a worker keeps in host memory outlive the engine's process."""

import asyncio
import os
import signal
from collections.abc import Sequence

import pytest

from inlay.engine.ranks import Rank
from inlay.engine.settings import EngineSettings
from inlay.messages.card import Stats
from inlay.messages.commands import AnyCommand, ReadStats
from inlay.messages.digest import Secret
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Request, Sampling
from inlay.telemetry import TelemetrySettings
from inlay.transport.local import LocalPlane
from inlay.worker import Backoff, Supervisor, WorkerProcess
from inlay.worker.process import starting
from tests.engine.conformance import ids
from tests.models import tiny
from tests.worker.test_supervisor import until_ready

SECRET = Secret(bytes(32))
NAMES = "abcdef"


async def answers(plane: LocalPlane) -> list[list[int]]:
    """Outputs of prompts that do not fit into the cache together."""
    found = []
    for name in NAMES:
        request = Request(
            id=name,
            prompts=(Prompt.of(Tokens(ids(ord(name), 100))),),
            params=Sampling(max_tokens=8, temperature=0.0, ignore_eos=True),
        )
        stream = plane.workers()[0].send(request)
        found.append([id_ async for some in stream for one in some for id_ in one.token_ids])
    return found


async def stats_of(plane: LocalPlane) -> Stats:
    found: Stats = await plane.workers()[0].call(ReadStats())
    return found


@pytest.mark.slow
async def test_pages_that_were_kept_outlive_a_killed_engine() -> None:
    settings = EngineSettings.of(
        model=str(tiny("llama")),
        device="cpu",
        num_threads=1,
        kv_cache_memory_bytes=24 * 4096,
        max_model_len=160,
        kv_offloading_size=0.004,
        health_probe_interval=0,
        self_check_interval=0,
    )
    begin = starting(Rank(settings), SECRET, TelemetrySettings())
    processes: list[WorkerProcess] = []

    async def start(restore: Sequence[AnyCommand]) -> WorkerProcess:
        processes.append(await begin(restore))
        return processes[-1]

    plane = LocalPlane()
    task = asyncio.create_task(Supervisor(plane, start, backoff=Backoff(0.01)).run())
    try:
        await until_ready(plane)
        truth = await answers(plane)
        while not (await stats_of(plane)).kv_host_bytes:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.01)
        os.kill(processes[0].pid, signal.SIGKILL)
        await until_ready(plane, ready=False)
        await until_ready(plane)
        assert (await stats_of(plane)).kv_host_bytes > 0
        assert (await stats_of(plane)).kv_pages_offloaded == 0
        assert await answers(plane) == truth
        while not (await stats_of(plane)).kv_pages_loaded:
            assert await answers(plane) == truth
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await plane.close()
