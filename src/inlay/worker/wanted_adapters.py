"""Adapters that a file says an engine is to have, followed as the file changes."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

from inlay.base.errors import InlayError
from inlay.base.watched import POLL_SECONDS, WatchedFiles
from inlay.messages.commands import LoadAdapter, UnloadAdapter
from inlay.worker.lora_modules import read_modules

log = logging.getLogger(__name__)

RETRY_SECONDS = 60.0
"""Seconds after which an adapter that could not be loaded is tried again."""


class WantedAdapters:
    """The adapters of a file, and those of them that the engine was given.

    What was loaded otherwise, as by the admin route, is left alone.

    Args:
        path: a list of name, path and sha256, YAML or JSON.
        loaded: returns the names of adapters that the engine has; None while there is no engine.
        call: has it run a command.

    Raises:
        InvalidRequestError: the file cannot be read.
    """

    def __init__(
        self,
        path: Path,
        loaded: Callable[[], Collection[str] | None],
        call: Callable[[LoadAdapter | UnloadAdapter], Awaitable[object]],
    ) -> None:
        self._path = path
        self._loaded = loaded
        self._call = call
        self._turn = asyncio.Lock()
        self._given: dict[str, LoadAdapter] = {}
        self._wanted: dict[str, LoadAdapter] = {}
        self._refused: dict[LoadAdapter, float] = {}
        self.files = WatchedFiles("adapters", [path], self._read)
        self._read()

    def _read(self) -> None:
        self._wanted = {order.name: order for order in read_modules(self._path)}
        self._refused = {}

    async def follow(self) -> None:
        """Have the engine load and unload as the file changes, until cancelled."""
        watching = asyncio.create_task(self.files.watch())
        try:
            while True:
                await self.bring()
                await asyncio.sleep(POLL_SECONDS)
        finally:
            watching.cancel()

    async def bring(self) -> None:
        """Have the engine load what it lacks and unload what is not wanted; errors are logged."""
        async with self._turn:
            has = self._loaded()
            if has is not None:
                await self._reconcile(has)

    async def _reconcile(self, has: Collection[str]) -> None:
        wanted, now = self._wanted, asyncio.get_running_loop().time()
        for name in self._given.keys() - wanted.keys():
            if await _done(self._call, UnloadAdapter(name)):
                del self._given[name]
        for name, order in wanted.items():
            if self._given.get(name) == order and name in has:
                continue
            if now < self._refused.get(order, 0.0):
                continue
            if await _done(self._call, order):
                self._given[name] = order
            else:
                self._refused[order] = now + RETRY_SECONDS


async def _done(
    call: Callable[[LoadAdapter | UnloadAdapter], Awaitable[object]],
    command: LoadAdapter | UnloadAdapter,
) -> bool:
    what = "loaded" if isinstance(command, LoadAdapter) else "unloaded"
    try:
        await call(command)
    except InlayError as error:
        log.error("the wanted adapter %r was not %s: %s", command.name, what, error.message)
        return False
    log.info("the wanted adapter %r was %s", command.name, what)
    return True
