"""Workers and frontends of a fleet in one process, around a real NATS server."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import cache
from typing import Any

from inlay.base.errors import InlayError
from inlay.engine.api import Engine
from inlay.messages.card import PROTOCOL, ModelCard
from inlay.messages.digest import Secret
from inlay.transport.api import Worker
from inlay.transport.embeds_cache import EmbedsCache
from inlay.transport.endpoint import Endpoint
from inlay.transport.link import PeerLink
from inlay.transport.nats.frontend import NatsPlane
from inlay.transport.nats.member import Member
from inlay.transport.nats.settings import NatsSettings
from inlay.transport.nats.worker import NatsWorker
from inlay.transport.tls import Identity, load_identity, make_certificate
from inlay.worker.host import EngineHost
from tests.transport.nats_server import NatsServer

SECRET = Secret(bytes(32))


@cache
def identity() -> Identity:
    return load_identity(make_certificate())


class FleetWorker:
    """An engine of this process that a fleet uses."""

    def __init__(
        self,
        engine: Engine,
        host: EngineHost,
        member: Member,
        worker: NatsWorker,
        endpoint: Endpoint,
    ) -> None:
        self.engine = engine
        self.host = host
        self.member = member
        self.worker = worker
        self.endpoint = endpoint

    @classmethod
    async def start(
        cls,
        engine: Engine,
        settings: NatsSettings,
        *,
        secret: Secret = SECRET,
        kept_bytes: int = 1 << 28,
        host: "Callable[[Engine], EngineHost] | None" = None,
        dials: bool = False,
        **options: Any,
    ) -> "FleetWorker":
        """Start `engine` and announce it; `options` are those of `NatsWorker`."""
        await engine.start()
        embeds_cache = EmbedsCache(kept_bytes)
        handler = EngineHost(engine, embeds_cache=embeds_cache) if host is None else host(engine)
        endpoint = Endpoint(handler, secret, identity(), embeds_cache)
        handler.connects(None if dials else await endpoint.open("127.0.0.1", "127.0.0.1", 0))
        member = await Member.join(settings, "worker")
        worker = NatsWorker(member, handler, dial=endpoint.dial if dials else None, **options)
        await worker.start()
        await worker.wait_announced()
        return cls(engine, handler, member, worker, endpoint)

    @property
    def cache(self) -> EmbedsCache:
        return self.host._embeds_cache

    async def cut(self) -> None:
        """Cut the connections of frontends, as a network does."""
        for connection in self.endpoint._serving.values():
            connection.abort()

    async def kill(self) -> None:
        """End as a killed process does: its connections are closed, and nobody is told why."""
        for task in self.worker._tasks:
            task.cancel()
        await asyncio.gather(*self.worker._tasks, return_exceptions=True)
        self.member.control._outbox.clear()
        await self.member.control.close()
        await self.cut()
        await self.endpoint.close()
        await self.engine.close()

    async def close(self) -> None:
        """Leave."""
        await self.worker.close()
        await self.endpoint.close()


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
        self._stack.push_async_callback(worker.close)
        return worker

    async def frontend(
        self, secret: Secret = SECRET, *, protocol: int = PROTOCOL, listens: bool = False
    ) -> NatsPlane:
        """One more frontend, which knows nobody yet."""
        member = await Member.join(self.settings, "frontend")
        plane = NatsPlane(
            member, secret, identity=identity() if listens else None, protocol=protocol
        )
        if listens:
            await plane.listen_for_workers("127.0.0.1", "127.0.0.1", 0)
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


def links(plane: NatsPlane) -> list[PeerLink]:
    """Its connections to workers."""
    return [one.link for one in plane._connected.values() if one.link is not None]


def card_of(plane: NatsPlane) -> ModelCard:
    """Of its first worker."""
    return plane.workers()[0].card


async def until(done: Callable[[], Awaitable[bool]]) -> None:
    """Return once it is true; NATS may be away meanwhile."""
    async with asyncio.timeout(90):
        while True:
            try:
                if await done():
                    return
            except InlayError:
                pass
            await asyncio.sleep(0.05)
