"""A line that ends its worker process, again and again, beside lines that do not."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from inlay.api import build_app
from inlay.engine.settings import EngineSettings
from inlay.http import FrontendSettings
from inlay.http.serve import serve
from inlay.messages.commands import AnyCommand
from inlay.messages.digest import Secret
from inlay.messages.request import Request, Sampling
from inlay.router import Router
from inlay.store.settings import BatchSettings
from inlay.transport.link import PeerLink
from inlay.transport.local import LocalPlane
from inlay.worker import Backoff, Supervisor, WorkerProcess, spawn
from inlay_batches import answering
from tests.batches.test_batches import COMPLETION, begin, client_of, ended, line, rows
from tests.models import tiny

pytestmark = pytest.mark.slow

SECRET = Secret(bytes(32))
DEADLY = 13
"""`max_tokens` of the line that ends workers."""


class Workers:
    """Starts a worker after each that has ended."""

    def __init__(self, path: Path) -> None:
        self._settings = EngineSettings.of(
            model=str(path), engine="echo", served_model_name=["tiny"], max_num_seqs=4
        )
        self.pids: list[int] = []

    async def __call__(self, restore: Sequence[AnyCommand]) -> WorkerProcess:
        process = await spawn(self._settings, SECRET, restore=restore)
        self.pids.append(process.pid)
        return process


@asynccontextmanager
async def served(workers: Workers) -> AsyncIterator[str]:
    plane = LocalPlane()
    supervising = asyncio.create_task(Supervisor(plane, workers, backoff=Backoff(0.01, 0.1)).run())
    settings, stop = FrontendSettings(port=0), asyncio.Event()
    batches = BatchSettings(batch_store="memory")
    app = build_app(Router(plane), settings, secret=SECRET, batches=batches)
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(app, settings, on_started=started.set_result, stop=stop))
    try:
        while not plane.workers():
            await plane.changed()
        yield await started
    finally:
        stop.set()
        await serving
        supervising.cancel()
        await asyncio.gather(supervising, return_exceptions=True)
        await plane.close()


async def test_a_line_that_ends_its_worker_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "_WAIT_SECONDS", 0.01)
    workers = Workers(tiny("llama"))
    send, ended_by = PeerLink.send, list[str]()

    def deadly(link: PeerLink, request: Request, *more: Any) -> Any:
        params = request.params
        if not (isinstance(params, Sampling) and params.max_tokens == DEADLY):
            return send(link, request, *more)
        ended_by.append(request.id)
        worker = psutil.Process(workers.pids[-1])
        worker.suspend()  # it is not to answer before it ends
        while worker.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
            time.sleep(0.001)
        stream = send(link, request, *more)
        worker.kill()
        return stream

    monkeypatch.setattr(PeerLink, "send", deadly)
    names = [f"a{number}" for number in range(40)]
    bodies = {name: {**COMPLETION, "max_tokens": 4} for name in names}
    bodies["a17"] = {**COMPLETION, "max_tokens": DEADLY}
    data = b"".join(line(name, "/v1/completions", body) for name, body in bodies.items())

    async with served(workers) as url:

        def run() -> tuple[Any, dict[str, Any], dict[str, Any]]:
            client = client_of(url)
            batch = ended(client, begin(client, data, "/v1/completions"))
            return batch, rows(client, batch.output_file_id), rows(client, batch.error_file_id)

        batch, output, error = await asyncio.to_thread(run)
    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (39, 1)
    assert set(output) == set(names) - {"a17"}
    assert set(error) == {"a17"}
    assert error["a17"]["response"]["status_code"] == 503
    assert 3 <= len(ended_by) <= 9
    # One after each, but that after the last, where no other line was left, is not waited for.
    assert len(workers.pids) in (len(ended_by), 1 + len(ended_by))


async def test_lines_wait_for_a_worker_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a line that fails is tried: nothing of it has been at a worker."""
    monkeypatch.setattr(answering, "_WAIT_SECONDS", 0.01)
    back = asyncio.Event()

    class Away(Workers):
        async def __call__(self, restore: Sequence[AnyCommand]) -> WorkerProcess:
            if self.pids:
                await back.wait()
            return await super().__call__(restore)

    workers = Away(tiny("llama"))
    data = b"".join(line(f"a{number}", "/v1/completions", COMPLETION) for number in range(8))
    async with served(workers) as url:
        client = client_of(url)
        begun = asked = 0
        ask = answering.ServerWork._ask

        async def counted(work: Any, *given: Any) -> Any:
            nonlocal begun, asked
            if not begun:
                # Not before: a batch is not looked at while no worker is there.
                os.kill(workers.pids[0], signal.SIGKILL)
            begun += 1
            found = await ask(work, *given)
            asked += 1
            if asked == 8 * (answering.TRIES + 2):
                back.set()
            return found

        monkeypatch.setattr(answering.ServerWork, "_ask", counted)
        batch = await asyncio.to_thread(begin, client, data, "/v1/completions")
        batch = await asyncio.to_thread(ended, client, batch)
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (8, 0)
