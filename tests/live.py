"""Real servers for tests.

One worker process, and as many frontends over it as are asked for, each on a port of its own.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from inlay.api import build_app
from inlay.engine.settings import EngineSettings
from inlay.http import App, FrontendSettings
from inlay.http.frontend_part import OpenShared
from inlay.http.serve import serve
from inlay.messages.card import Stats
from inlay.messages.commands import ReadStats
from inlay.messages.digest import Secret
from inlay.render import Renderer
from inlay.router import Router
from inlay.store import PromptStore, StoreSettings
from inlay.store.settings import BatchSettings, ResponseSettings
from inlay.transport.local import LocalPlane
from inlay.worker import spawn
from inlay.worker.process import WorkerProcess
from tests.models import EOS_ID, VOCAB_SIZE, tiny

T = TypeVar("T")
SECRET = Secret(bytes(range(32)))


def until(done: Callable[[], bool]) -> None:
    """Wait for what happens soon after an answer has been sent."""
    deadline = time.monotonic() + 90
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@dataclass
class Fleet:
    """A loop in a thread, a plane to one worker, and the frontends before it."""

    loop: asyncio.AbstractEventLoop
    plane: LocalPlane
    router: Router
    path: Path
    processes: "list[WorkerProcess]" = field(default_factory=list)
    apps: dict[str, App] = field(default_factory=dict)
    at_end: list[Callable[[], Coroutine[Any, Any, None]]] = field(default_factory=list)
    """What is done when the frontends have ended."""
    _serving: list["asyncio.Task[bool]"] = field(default_factory=list)
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run in the fleet's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(180)

    def serve(
        self,
        *,
        store: PromptStore | None = None,
        batches: BatchSettings | None = None,
        responses: ResponseSettings | None = None,
        open_shared: OpenShared | None = None,
        **settings: Any,
    ) -> str:
        """The base URL of a new frontend.

        It closes `store`, or one in memory of its own, in the end.
        """
        frontend = FrontendSettings(port=0, **settings)
        if store is None and frontend.enable_prompt_embeds:
            store = StoreSettings().open(SECRET)
        return self.run(self._serve(frontend, store, batches, responses, open_shared))

    async def _serve(
        self,
        settings: FrontendSettings,
        store: PromptStore | None,
        batches: BatchSettings | None,
        responses: ResponseSettings | None,
        open_shared: OpenShared | None,
    ) -> str:
        app = build_app(
            self.router,
            settings,
            secret=SECRET,
            store=store,
            batches=batches,
            responses=responses,
            open_shared=open_shared,
        )
        started: asyncio.Future[str] = self.loop.create_future()
        self._serving.append(
            self.loop.create_task(
                serve(app, settings, on_started=started.set_result, stop=self._stop)
            )
        )
        url = await started
        self.apps[url] = app
        return url

    def idle_within(self, seconds: float) -> bool:
        """Return True if the engine is idle before `seconds` have passed."""
        deadline = time.monotonic() + seconds
        while self.running():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def running(self) -> int:
        """Return the number of running and waiting requests of the engine."""
        return self.run(self._running())

    async def _running(self) -> int:
        (worker,) = self.plane.workers()
        stats: Stats = await worker.call(ReadStats())
        return stats.running + stats.waiting

    async def close(self) -> None:
        """Stop the frontends."""
        self._stop.set()
        await asyncio.gather(*self._serving)
        for act in self.at_end:
            await act()


@contextmanager
def fleet(
    path: Path, *, workers: int = 1, others: Sequence[EngineSettings] = (), **engine: Any
) -> Iterator[Fleet]:
    """Workers with the model at `path`, and `others`, ready, until the block ends."""
    holder: dict[str, Any] = {}
    up, down = threading.Event(), threading.Event()

    async def life() -> None:
        # Tests look at what engines count.
        given = {"health_probe_interval": 0, "self_check_interval": 0, **engine}
        settings = EngineSettings.of(
            model=str(path), served_model_name=["tiny", "org/tiny"], **given
        )
        each = [*[settings] * workers, *others]
        processes = [await spawn(settings, SECRET) for settings in each]
        plane = LocalPlane([process.channel for process in processes])
        try:
            await plane.start()
            await plane.wait_ready()
            holder["fleet"] = running = Fleet(
                asyncio.get_running_loop(), plane, Router(plane), path, processes
            )
            up.set()
            await asyncio.to_thread(down.wait)
            await running.close()
        finally:
            await plane.close()
            for process in processes:
                await process.close()

    def thread() -> None:
        try:
            asyncio.run(life())
        except BaseException as error:
            holder["error"] = error
            up.set()

    runner = threading.Thread(target=thread)
    runner.start()
    up.wait()
    if "error" in holder:
        runner.join()
        raise holder["error"]
    try:
        yield holder["fleet"]
    finally:
        down.set()
        runner.join()
    if "error" in holder:
        raise holder["error"]


@pytest.fixture(scope="session")
def llama() -> Iterator[Fleet]:
    with fleet(tiny("llama")) as running:
        yield running


@pytest.fixture(scope="session")
def url(llama: Fleet) -> str:
    """A frontend that takes embeddings."""
    return llama.serve(enable_prompt_embeds=True)


@pytest.fixture(scope="session")
def plain_url(llama: Fleet) -> str:
    """A frontend as it is without any settings."""
    return llama.serve()


@pytest.fixture(scope="session")
def blanks(llama: Fleet) -> dict[str, float]:
    """Against white space between the parts of JSON, of which a random model has no end."""
    renderer = Renderer.load(llama.path)
    return {
        str(id_): -100.0
        for id_ in range(VOCAB_SIZE)
        if id_ != EOS_ID and not renderer.decode([id_]).strip()
    }
