"""Workers and frontends of a fleet in one process, around a real NATS server."""

import asyncio
import uuid
from contextlib import AsyncExitStack
from typing import Any

from inlay.card import PROTOCOL, ModelCard
from inlay.digest import Secret
from inlay.engine.api import Engine
from inlay.transport.api import RequestHandler, Worker
from inlay.transport.nats.frontend import NatsPlane
from inlay.transport.nats.member import Member
from inlay.transport.nats.settings import NatsSettings
from inlay.transport.nats.worker import NatsWorker
from inlay.worker.host import EngineHost
from tests.transport.nats_server import NatsServer


class FleetWorker:
    """An engine of this process that a fleet uses."""

    def __init__(self, engine: Engine, member: Member, worker: NatsWorker) -> None:
        self.engine = engine
        self.member = member
        self.worker = worker

    @classmethod
    async def start(
        cls,
        engine: Engine,
        settings: NatsSettings,
        *,
        handler: RequestHandler | None = None,
        **options: Any,
    ) -> "FleetWorker":
        """Start `engine` and announce it; `options` are those of `NatsWorker`."""
        await engine.start()
        member = await Member.join(settings, "worker")
        worker = NatsWorker(member, handler or EngineHost(engine), **options)
        await worker.start()
        await worker.wait_announced()
        return cls(engine, member, worker)

    async def kill(self) -> None:
        """End as a killed process does: its connections are closed, and nobody is told why."""
        for task in self.worker._tasks:
            task.cancel()
        await asyncio.gather(*self.worker._tasks, return_exceptions=True)
        for connection in (self.member.control, self.member.bulk):
            connection._outbox.clear()
            await connection.close()
        await self.engine.close()


class Fleet:
    """A namespace of one's own on a server."""

    def __init__(self, server: NatsServer, namespace: str | None = None) -> None:
        self.server = server
        self.settings = server.settings(namespace or uuid.uuid4().hex)
        self.workers: list[FleetWorker] = []
        self._stack = AsyncExitStack()

    async def worker(self, engine: Engine, **options: Any) -> FleetWorker:
        """One more worker."""
        worker = await FleetWorker.start(engine, self.settings, **options)
        self.workers.append(worker)
        self._stack.push_async_callback(engine.close)
        self._stack.push_async_callback(worker.worker.close)
        return worker

    async def frontend(self, secret: Secret, *, protocol: int = PROTOCOL) -> NatsPlane:
        """One more frontend, which knows nobody yet."""
        member = await Member.join(self.settings, "frontend")
        plane = NatsPlane(member, secret_fingerprint=secret.fingerprint, protocol=protocol)
        await plane.start()
        self._stack.push_async_callback(plane.close)
        return plane

    async def close(self) -> None:
        """End everything that has not ended."""
        await self._stack.aclose()


async def found(plane: NatsPlane, workers: int = 1) -> list[Worker]:
    """The plane's workers, once there are so many."""
    while len(plane.workers()) < workers:
        await plane.changed()
    return list(plane.workers())


def card_of(plane: NatsPlane) -> ModelCard:
    """Of its first worker."""
    return plane.workers()[0].card
