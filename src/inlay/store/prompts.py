"""Stored prompts as a frontend uses them, local or in a fleet; never blocks its event loop."""

import asyncio
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, Protocol, TypeVar

from inlay.base.pace import mark_background
from inlay.messages.prompt import Buffer, Rows
from inlay.store.entry import Content, FileKind, StoredPrompt, StoreStats, Target
from inlay.store.store import PromptStore

P = ParamSpec("P")
R = TypeVar("R")


def nothing(num_bytes: int) -> None:
    """For callers that count no bytes."""


class StoredPrompts(Protocol):
    """Stored prompts, each for the tenant that uploaded it.

    Errors are those of `inlay.store.PromptStore`.

    `hold` is called with bytes that are about to be needed beside what the store counts itself, and
    may refuse them by raising.
    """

    async def put(
        self, tenant: str, data: Buffer, content: Content, *, hold: Callable[[int], None] = nothing
    ) -> StoredPrompt:
        """Store a content, in memory that will never change.

        The same bytes again only start the TTL again.
        """

    async def get(self, tenant: str, id_: str) -> StoredPrompt:
        """Metadata of a stored prompt. Does not extend its TTL."""

    async def rows(
        self,
        tenant: str,
        id_: str,
        target: Target,
        *,
        look: Callable[[StoredPrompt], None],
        hold: Callable[[int], None] = nothing,
    ) -> tuple[Rows, ...]:
        """The prompts of `id_` as rows for a model.

        `look` sees what they are before anything is done for them.
        """

    async def file(
        self,
        tenant: str,
        id_: str,
        kind: FileKind = "image",
        *,
        look: Callable[[StoredPrompt], None],
        hold: Callable[[int], None] = nothing,
    ) -> Buffer:
        """The file of `id_`. `look` sees what it is before anything is done for it."""

    async def touch(self, tenant: str, id_: str) -> StoredPrompt:
        """Start the TTL of a prompt again, as a use does; its metadata."""

    async def pin(self, tenant: str, id_: str, pinned: bool) -> StoredPrompt:
        """Keep a prompt until it is unpinned or deleted, or stop to."""

    async def delete(self, tenant: str, id_: str) -> None:
        """Remove a prompt from every tier."""

    async def sweep(self) -> None:
        """Remove what has expired; to be called from time to time."""

    def stats(self) -> StoreStats:
        """The counters now."""

    def close(self) -> None:
        """Do no more."""


class Threads:
    """A few threads for what touches a file or passes over a tensor."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(
            min(4, os.cpu_count() or 1),
            thread_name_prefix="inlay-stored",
            initializer=mark_background,
        )

    async def run(self, request: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `request` in one of them; return its result.

        Who is cancelled waits for its end, so that nothing is taken away from it.
        """
        loop = asyncio.get_running_loop()
        job = loop.run_in_executor(self._pool, functools.partial(request, *args, **kwargs))
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            await asyncio.gather(job, return_exceptions=True)
            raise

    def close(self) -> None:
        """End them once they have done what they are at."""
        self._pool.shutdown(wait=False)


class LocalStoredPrompts:
    """The prompts of a frontend's own store. Closed with it."""

    def __init__(self, store: PromptStore) -> None:
        self._store = store
        self._threads = Threads()

    async def put(
        self, tenant: str, data: Buffer, content: Content, *, hold: Callable[[int], None] = nothing
    ) -> StoredPrompt:
        return await self._threads.run(self._store.put, tenant, data, content, adopt=True)

    async def get(self, tenant: str, id_: str) -> StoredPrompt:
        return self._store.get(tenant, id_)

    async def rows(
        self,
        tenant: str,
        id_: str,
        target: Target,
        *,
        look: Callable[[StoredPrompt], None],
        hold: Callable[[int], None] = nothing,
    ) -> tuple[Rows, ...]:
        stored = self._store.get(tenant, id_)
        look(stored)
        made = self._store.ready(tenant, id_, target)
        if made is None:
            # Rows that are cast, or that memory has no room for, belong to the request.
            hold(stored.bytes)
            made = await self._threads.run(self._store.rows, tenant, id_, target)
        return made

    async def file(
        self,
        tenant: str,
        id_: str,
        kind: FileKind = "image",
        *,
        look: Callable[[StoredPrompt], None],
        hold: Callable[[int], None] = nothing,
    ) -> Buffer:
        data = self._store.ready_file(tenant, id_, kind)
        stored = self._store.get(tenant, id_)
        look(stored)
        if data is None:
            hold(stored.bytes)
            data = await self._threads.run(self._store.file, tenant, id_, kind)
        return data

    async def touch(self, tenant: str, id_: str) -> StoredPrompt:
        return self._store.touch(tenant, id_)

    async def pin(self, tenant: str, id_: str, pinned: bool) -> StoredPrompt:
        return await self._threads.run(self._store.pin, tenant, id_, pinned)

    async def delete(self, tenant: str, id_: str) -> None:
        await self._threads.run(self._store.delete, tenant, id_)

    async def sweep(self) -> None:
        self._store.sweep()

    def stats(self) -> StoreStats:
        return self._store.stats()

    def close(self) -> None:
        self._threads.close()
        self._store.close()
