"""The engine process of a fleet's worker, as its supervising process sees it."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from inlay.base.errors import DeadlineExceededError, OverloadedError
from inlay.messages.card import Address, ModelCard
from inlay.messages.commands import ReadStats, WorkerCommand
from inlay.messages.routing import KvEvents
from inlay.transport.link import PeerLink
from inlay.transport.local import LocalPlane

R = TypeVar("R")

log = logging.getLogger(__name__)

NO_ENGINE = "the worker has no engine now"
PREPARE_SECONDS = 60.0
"""Seconds after which a process that is still being prepared is announced."""

_GUARD_SECONDS = 1.0
_CALL_SECONDS = 600.0
"""Seconds after which a command ends that nobody waits for; a client waits less."""


class EngineProxy:
    """`inlay.transport.nats.worker.AnnouncedEngine` around whichever process a plane has now."""

    def __init__(self, plane: LocalPlane) -> None:
        self._plane = plane
        self._link: PeerLink | None = None
        self._announce: Callable[[ModelCard], None] = lambda card: None
        self._on_cache_events: Callable[[KvEvents], None] | None = None

    def watch(self, announce: Callable[[ModelCard], None]) -> Callable[[], None]:
        """Have `follow` call `announce` with each card."""
        self._announce = announce

        def unwatch() -> None:
            self._announce = lambda card: None

        return unwatch

    def watch_cache(self, tell: Callable[[KvEvents], None]) -> None:
        """As `CacheEventSource.watch_cache`, of every process there will be."""
        self._on_cache_events = tell

    async def follow(
        self,
        away: Callable[[], None],
        prepare: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """Announce the cards of the process, and call `away` when it is gone, until cancelled.

        `prepare` runs with each new process before it is announced, for `PREPARE_SECONDS`: then it
        goes on behind the announcement.
        """
        card: ModelCard | None = None
        async with asyncio.TaskGroup() as preparing:
            while True:
                link = next(iter(self._plane.workers()), None)
                if link is not self._link:
                    if self._link is not None:
                        away()
                    self._link, card = link, None
                    if link is not None and prepare is not None:
                        await _awaited(preparing.create_task(prepare()))
                        continue  # It may have another card now, or be gone.
                if link is not None and link.card != card:
                    first, card = card is None, link.card
                    self._announce(card)
                    if first and card.kv_events and self._on_cache_events is not None:
                        link.watch_cache(self._on_cache_events)
                await self._plane.changed()

    async def guard(self, kill: Callable[[], object], seconds: float) -> None:
        """Call `kill` when the process has not answered for `seconds` (`inlay.base.liveness`).

        Such a process stands still: its engine may take its time, what answers is another thread.
        Runs until cancelled.
        """
        while True:
            link = self._link
            if link is not None:
                try:
                    await link.call(ReadStats(), seconds)
                except DeadlineExceededError:
                    log.error(
                        "the worker's process has not answered for %g s: it is killed", seconds
                    )
                    kill()
                except OverloadedError as error:
                    log.debug("nothing to guard: %s", error.message)
            await asyncio.sleep(_GUARD_SECONDS)

    async def call(self, command: WorkerCommand[R]) -> R:
        if self._link is None:
            raise OverloadedError(NO_ENGINE, retry_after=1)
        return await self._link.call(command, _CALL_SECONDS)

    def adapters(self) -> list[str] | None:
        """Names of the adapters that the engine has; None while there is none."""
        if self._link is None or not self._link.ready:
            return None
        return [adapter.name for adapter in self._link.card.adapters]

    def dial(self, address: Address, token: bytes) -> None:
        """Have the process connect to a frontend; one that has no process yet invites again."""
        if self._link is not None:
            self._link.dial(address, token)

    def forget_prompt(self, key: str | None) -> None:
        """As `RequestHandler.forget_prompt`; a process that comes later has no copies."""
        if self._link is not None:
            self._link.forget_prompt(key)


async def _awaited(preparing: asyncio.Task[None]) -> None:
    _, late = await asyncio.wait({preparing}, timeout=PREPARE_SECONDS)
    if late:
        log.warning(
            "the worker is not all prepared after %g s, as by the adapters that it is to have: it "
            "is announced without the rest, which goes on",
            PREPARE_SECONDS,
        )
