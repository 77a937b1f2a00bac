"""Frontends' stores over one real NATS server, for tests."""

import asyncio
import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from inlay.messages.digest import Secret
from inlay.messages.prompt import Rows
from inlay.store import StoredPrompt
from inlay.store.fleet import FleetStore
from inlay.store.space import FleetLimits
from inlay.store.store import PromptStore
from inlay.transport.nats.member import Member
from inlay.transport.nats.prompts import NatsPrompts
from inlay.transport.nats.settings import NatsSettings
from tests.store.making import TTL, Clock, target, upload_of
from tests.transport.nats_server import NatsServer

SECRET = Secret(bytes(range(32)))


class Frontend:
    """One frontend's store.

    Attributes:
        store: what is tested.
        shared: what it shares, as it sees it.
        local: its own tiers.
    """

    def __init__(
        self, member: Member, shared: NatsPrompts, local: PromptStore, store: FleetStore
    ) -> None:
        self.member = member
        self.shared = shared
        self.local = local
        self.store = store

    async def put(self, tenant: str, seed: int, *, rows: int = 16) -> StoredPrompt:
        return await self.store.put(tenant, *upload_of(seed, rows=rows))

    async def rows(
        self, tenant: str, id_: str, dtype: str = "float32", **more: Any
    ) -> tuple[Rows, ...]:
        return await self.store.rows(tenant, id_, target(dtype), **{"look": seen, **more})

    async def elements(self, tenant: str, id_: str) -> bytes:
        """Its rows as float32, joined."""
        return b"".join(bytes(rows.data.view) for rows in await self.rows(tenant, id_))

    async def settled(self) -> None:
        """Return when nothing is done in the background any more."""
        while self.store._later_tasks:
            await asyncio.gather(*self.store._later_tasks, return_exceptions=True)

    async def close(self) -> None:
        self.store.close()
        await self.member.leave()


def seen(stored: StoredPrompt) -> None:
    """Nothing is to be checked."""


class Frontends:
    """Those of one namespace."""

    def __init__(self, server: NatsServer, clock: Callable[[], float] | None = None) -> None:
        self.settings: NatsSettings = server.settings(secrets.token_hex(8))
        self.clock = clock or Clock()
        self._stack = AsyncExitStack()

    async def frontend(
        self,
        *,
        memory_bytes: int = 1 << 20,
        key: bytes | None = None,
        secret: Secret = SECRET,
        **limits: Any,
    ) -> Frontend:
        member = await Member.join(self.settings, "frontend")
        shared = await NatsPrompts.open(member)
        local = PromptStore(secret, memory_bytes=memory_bytes, ttl=TTL, clock=self.clock)
        made = FleetLimits(**{"max_bytes": 1 << 24, "ttl": TTL, **limits})
        store = FleetStore(secret, shared, local, made, encryption_key=key, clock=self.clock)
        await store.start()
        frontend = Frontend(member, shared, local, store)
        self._stack.push_async_callback(frontend.close)
        return frontend

    async def close(self) -> None:
        await self._stack.aclose()
