"""A worker has the adapters it is to have before it is announced, unless they take too long."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from inlay.engine.settings import EngineSettings
from inlay.messages.card import ModelCard
from inlay.messages.commands import LoadAdapter, UnloadAdapter
from inlay.messages.digest import Secret
from inlay.transport.local import LocalPlane
from inlay.worker import EngineProxy, engine_proxy, spawn
from inlay.worker.wanted_adapters import WantedAdapters
from tests.worker.test_adapters import HIDDEN, write_prompt

pytestmark = pytest.mark.usefixtures("started_processes")

SECRET = Secret(bytes(32))


@asynccontextmanager
async def announced(
    directory: Path, store: Callable[[], Awaitable[object]]
) -> AsyncIterator["asyncio.Queue[list[str]]"]:
    """The adapters of each card that is announced, of a worker whose adapters come by `store`."""
    said = {"vocab_size": 9, "hidden_size": HIDDEN, "max_position_embeddings": 64}
    (directory / "config.json").write_text(json.dumps(said))
    path = write_prompt(directory / "adapter")
    (directory / "wanted.json").write_text(json.dumps([{"name": "a", "path": str(path)}]))
    settings = EngineSettings.of(
        model=str(directory), engine="echo", enable_lora=True, allowed_lora_sources=["file:///"]
    )
    process = await spawn(settings, SECRET)
    plane = LocalPlane([process.channel])
    await plane.start()
    proxy = EngineProxy(plane)
    cards: asyncio.Queue[list[str]] = asyncio.Queue()

    def announce(card: ModelCard) -> None:
        cards.put_nowait([adapter.name for adapter in card.adapters])

    async def call(command: LoadAdapter | UnloadAdapter) -> object:
        await store()
        return await proxy.call(command)

    proxy.watch(announce)
    wanted = WantedAdapters(directory / "wanted.json", proxy.adapters, call)
    following = asyncio.create_task(proxy.follow(lambda: None, wanted.bring))
    try:
        async with asyncio.timeout(90):
            yield cards
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await plane.close()
        await process.close()


async def test_a_worker_is_announced_with_its_adapters(tmp_path: Path) -> None:
    async with announced(tmp_path, lambda: asyncio.sleep(0)) as cards:
        assert await cards.get() == ["a"]


async def test_a_store_that_hangs_does_not_keep_a_worker_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_proxy, "PREPARE_SECONDS", 0.1)
    answers = asyncio.Event()
    async with announced(tmp_path, answers.wait) as cards:
        assert await cards.get() == []
        assert "announced without the rest" in caplog.text
        answers.set()
        while await cards.get() != ["a"]:
            pass
