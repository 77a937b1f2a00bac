"""A plane of worker processes on this machine."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import count

from inlay.transport.api import FrameTransport, Loss
from inlay.transport.link import PeerLink, SettleWith
from inlay.transport.messages import FromWorker


class LocalPlane:
    """`inlay.transport.api.Plane` to this machine's worker processes, which come and go.

    `settle` as `PeerLink`'s.
    """

    def __init__(
        self, channels: Iterable[FrameTransport[FromWorker]] = (), settle: SettleWith | None = None
    ) -> None:
        self._settle = settle
        self._changed = asyncio.Event()
        self._numbers = count()
        self._links = [self._link(channel) for channel in channels]
        self._tasks: dict[PeerLink, asyncio.Task[None]] = {}
        self._asking: dict[PeerLink, asyncio.Task[None]] = {}
        self._missing: dict[str, str] = {}
        self._losses: Counter[tuple[str, Loss]] = Counter()

    def _link(self, channel: FrameTransport[FromWorker]) -> PeerLink:
        return PeerLink(f"local-{next(self._numbers)}", channel, self._tell, settle=self._settle)

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Begin to listen to the workers."""
        for link in self._links:
            self._listen(link)

    def _listen(self, link: PeerLink) -> None:
        self._tasks[link] = asyncio.create_task(link.run())
        self._asking[link] = asyncio.create_task(link.ask_on())

    def add(self, channel: FrameTransport[FromWorker]) -> PeerLink:
        """Listen to one more worker, of the plane until it is removed."""
        link = self._link(channel)
        self._links.append(link)
        self._listen(link)
        return link

    async def remove(self, link: PeerLink) -> None:
        """Disconnect from a worker and forget it."""
        if link.last_card is not None:
            self._losses[link.last_card.name, "restarted"] += 1
        link.close()
        self._asking.pop(link).cancel()
        await self._tasks.pop(link)
        self._links.remove(link)

    async def wait_ready(self) -> None:
        """Return when every worker is ready.

        Raises:
            InlayError: one ended before; its own reason where it gave one.
        """
        for link in tuple(self._links):
            await link.wait_ready()

    def workers(self) -> Sequence[PeerLink]:
        """The workers that are ready now."""
        return [link for link in self._links if link.ready]

    def set_unavailable(self, name: str, reason: str | None) -> None:
        """Say that a worker is not there that should be, and why; with None, that it is."""
        if reason is None:
            self._missing.pop(name, None)
        else:
            self._missing[name] = reason

    def losses(self) -> Mapping[tuple[str, Loss], int]:
        return self._losses

    def unavailable(self) -> Mapping[str, str]:
        return self._missing

    async def changed(self) -> None:
        """Return at the next change of the set of ready workers or of a card."""
        await self._changed.wait()

    def room(self, num_bytes: int) -> memoryview | None:
        """Of the only worker's shared memory.

        None where there are several, or too little of it is free.
        """
        return self._links[0].room(num_bytes) if len(self._links) == 1 else None

    async def close(self) -> None:
        """Disconnect; the workers abort what is under way and end."""
        for link in tuple(self._tasks):
            await self.remove(link)
