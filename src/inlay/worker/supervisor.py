"""Keeps a worker process running: starts it, and again when it has died."""

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from inlay.base.errors import EngineError
from inlay.messages.card import ModelCard
from inlay.messages.commands import AnyCommand, LoadAdapter, Sleep
from inlay.transport.link import PeerLink
from inlay.transport.local import LocalPlane
from inlay.worker.process import WorkerProcess

log = logging.getLogger(__name__)

Start: TypeAlias = Callable[[Sequence[AnyCommand]], Awaitable[WorkerProcess]]
"""Starts a process that runs these commands before it is ready."""


@dataclass(frozen=True)
class Backoff:
    """Seconds to wait before the next start: twice as long as before the last.

    Attributes:
        first: after the first death, and after one that follows a stable time.
        most: the longest.
        stable: for how long a worker must have been ready for its death to count as the first.
    """

    first: float = 0.5
    most: float = 30.0
    stable: float = 60.0


class Supervisor:
    """One worker of a local plane, over as many processes as it takes.

    Attributes:
        card: what the worker announced last, or None before it ever was ready.

    Args:
        plane: where the worker is to be found; it is told when the worker is missing, and why.
        start: starts a process.
        backoff: between starts.
        name: of the worker among those the plane misses.
        tied: with whom its processes end, if with anybody.
    """

    def __init__(
        self,
        plane: LocalPlane,
        start: Start,
        *,
        backoff: Backoff = Backoff(),
        name: str = "worker",
        tied: "RestartGroup | None" = None,
    ) -> None:
        self._plane = plane
        self._start = start
        self._backoff = backoff
        self._name = name
        self._process: WorkerProcess | None = None
        self.card: ModelCard | None = None
        self._tied = tied
        if tied is not None:
            tied.members.append(self)

    @property
    def runs(self) -> bool:
        """True if there is a process now."""
        return self._process is not None

    def kill(self) -> None:
        """End the process that runs now, if any, without waiting for what it does."""
        if self._process is not None:
            self._process.kill()

    async def run(self) -> NoReturn:
        """Keep a worker running until cancelled; then end it.

        Raises:
            InlayError: the first process never became ready, so none would.
        """
        self._plane.set_unavailable(self._name, "it is loading")
        delay = self._backoff.first
        while True:
            seconds, reason = await self._live()
            if self._tied is not None:
                self._tied.died(self)
            if seconds > self._backoff.stable:
                delay = self._backoff.first
            log.error("%s; it is started again in %g s", reason, delay)
            self._plane.set_unavailable(self._name, f"{reason}; it is being started again")
            await asyncio.sleep(delay)
            # What failed holds, in circles, requests whose rows lie in the memory that was shared
            # with it, and so all of that.
            gc.collect()
            delay = min(2 * delay, self._backoff.most)

    async def _live(self) -> tuple[float, str]:
        """One process from its start to its end.

        The seconds it was ready, and why it is not any more.

        Raises:
            InlayError: as `run`.
        """
        clock = asyncio.get_running_loop().time
        ready_at: float | None = None
        process = self._process = await self._start(restoring(self.card))
        link = self._plane.add(process.channel)
        try:
            await link.wait_settled()
            if link.ready:
                ready_at = clock()
                self._plane.set_unavailable(self._name, None)
                await link.wait_gone()
        finally:
            self.card = link.last_card or self.card
            await process.close()
            await self._plane.remove(link)
            self._process = None
        reason = _reason(process, link)
        if self.card is None:
            raise link.failure or EngineError(f"{reason} before it was ready")
        return (0.0 if ready_at is None else clock() - ready_at), reason


class RestartGroup:
    """Workers none of which can go on without the others.

    When one process dies all end, and all are started again.
    """

    def __init__(self) -> None:
        self.members: list[Supervisor] = []
        self._falling: set[Supervisor] = set()

    def died(self, member: Supervisor) -> None:
        """The process of `member` is gone."""
        if member in self._falling:
            self._falling.remove(member)
            return
        for other in self.members:
            if other is not member and other.runs:
                self._falling.add(other)
                other.kill()


def _reason(process: WorkerProcess, link: PeerLink) -> str:
    said = f"the worker process {process.fate}"
    return said if link.failure is None else f"{said}: {link.failure.message}"


def restoring(card: ModelCard | None) -> list[AnyCommand]:
    """Return the commands that restore the adapters and the sleep of `card` at a new worker."""
    if card is None:
        return []
    commands: list[AnyCommand] = [
        LoadAdapter(adapter.name, adapter.path, in_place=True, content_id=adapter.content_id)
        for adapter in card.adapters
    ]
    return [*commands, Sleep(card.asleep)] if card.asleep else commands
