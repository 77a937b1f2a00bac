"""A host whose engine has a cache to tell of."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from msgspec.structs import replace

from inlay.engine.api import Engine
from inlay.messages.card import ModelCard
from inlay.messages.commands import WorkerCommand
from inlay.messages.prompt import Buffer
from inlay.messages.routing import KvEvents, KvSnapshot
from inlay.worker.host import EngineHost

R = TypeVar("R")


class CachingHost(EngineHost):
    """Tells what it is told to, and can fall silent."""

    def __init__(self, engine: Engine, keys: bytes = b"") -> None:
        super().__init__(engine)
        self.keys = keys
        self.tell: Callable[[KvEvents], None] = lambda events: None
        self.silent = False
        self.awake = asyncio.Event()

    @property
    def card(self) -> ModelCard:
        return replace(super().card, kv_events=True)

    async def call(self, command: WorkerCommand[R]) -> R:
        if self.silent:
            await self.awake.wait()
        return await super().call(command)

    def watch_cache(self, tell: Callable[[KvEvents], None]) -> None:
        self.tell = tell

    async def kv_snapshot(self) -> KvSnapshot:
        return KvSnapshot(7, Buffer(self.keys))
