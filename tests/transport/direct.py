"""A plane without a process: the engine runs on the caller's loop.

For tests; messages are encoded and decoded as anywhere.
"""

import asyncio
import socket
from collections.abc import Callable

from inlay.engine.api import Engine
from inlay.transport.local import Arena, LocalPlane, LocalTransport
from inlay.transport.messages import FromWorker, ToWorker
from inlay.transport.serve import serve
from inlay.worker.host import EngineHost

ARENA_BYTES = 1 << 20


class DirectPlane(LocalPlane):
    """A local plane whose workers' ends live in this process."""

    def __init__(self, engines: list[Engine], channels: list[LocalTransport[FromWorker]]) -> None:
        super().__init__(channels)
        self._engines = engines
        self._serving: list[asyncio.Task[None]] = []
        self.worker_ends: list[LocalTransport[ToWorker]] = []
        self.hosts: list[EngineHost] = []

    @classmethod
    async def around(
        cls, *engines: Engine, host: Callable[[Engine], EngineHost] = EngineHost
    ) -> "DirectPlane":
        """Start `engines` and a plane to them, each behind a `host`."""
        ends: list[LocalTransport[FromWorker]] = []
        worker_ends: list[LocalTransport[ToWorker]] = []
        for engine in engines:
            await engine.start()
            ours, theirs = socket.socketpair()
            arena = Arena(ARENA_BYTES)
            ends.append(
                await LocalTransport[FromWorker].open(ours, arena, FromWorker, sends_shared=True)
            )
            worker_ends.append(
                await LocalTransport[ToWorker].open(theirs, arena, ToWorker, sends_shared=False)
            )
        plane = cls(list(engines), ends)
        plane.worker_ends = worker_ends
        plane.hosts = [host(engine) for engine in engines]
        plane._serving = [
            asyncio.create_task(serve(end, host_))
            for end, host_ in zip(worker_ends, plane.hosts, strict=True)
        ]
        await plane.start()
        await plane.wait_ready()
        return plane

    async def close(self) -> None:
        """Disconnect, and end the engines."""
        await super().close()
        await asyncio.gather(*self._serving)
        for end in self.worker_ends:
            end.close()
            end.arena.close()
        for engine in self._engines:
            await engine.close()
