"""What the workers of one machine have cached reaches a router."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from inlay.base.errors import OverloadedError
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.messages.prompt import Buffer
from inlay.messages.routing import KEY_SIZE, Cleared, KvEvents, KvSnapshot, RoutingFeed, Stored
from inlay.transport.link import PeerLink
from inlay.transport.local import Arena, LocalTransport, RoutedPlane
from inlay.transport.messages import FromWorker, ToWorker
from inlay.transport.serve import serve
from tests.transport.caching import CachingHost
from tests.transport.fleet import SECRET


@asynccontextmanager
async def added(plane: RoutedPlane, host: CachingHost) -> AsyncIterator[PeerLink]:
    """A worker of the plane whose end is in this process."""
    ours, theirs = socket.socketpair()
    arena = Arena(1 << 20)
    end = await LocalTransport[ToWorker].open(theirs, arena, ToWorker, sends_shared=False)
    link = plane.add(
        await LocalTransport[FromWorker].open(ours, arena, FromWorker, sends_shared=True)
    )
    serving = asyncio.create_task(serve(end, host))
    await link.wait_ready()
    try:
        yield link
    finally:
        await plane.remove(link)
        await serving
        end.close()
        arena.close()


async def test_each_worker_tells_for_itself_whenever_it_comes(
    echo_settings: EngineSettings,
) -> None:
    engine = EchoEngine(echo_settings, SECRET)
    await engine.start()
    hosts = [CachingHost(engine, os.urandom(KEY_SIZE)) for _ in range(3)]
    plane = RoutedPlane()
    assert isinstance(plane, RoutingFeed)
    heard: asyncio.Queue[tuple[str, KvEvents]] = asyncio.Queue()
    await plane.start()
    async with added(plane, hosts[0]) as first:
        plane.listen(lambda id_, events: heard.put_nowait((id_, events)), lambda load: None)
        async with added(plane, hosts[1]) as second:
            for number, (host, link) in enumerate(((hosts[0], first), (hosts[1], second)), 1):
                assert await plane.kv_snapshot(link.id) == KvSnapshot(7, Buffer(host.keys))
                told = KvEvents(number, (Stored(os.urandom(2 * KEY_SIZE)), Cleared()))
                host.tell(told)
                assert await heard.get() == (link.id, told)
        with pytest.raises(OverloadedError, match="gone"):
            await plane.kv_snapshot(second.id)
        # Another in its place is another worker.
        async with added(plane, hosts[2]) as third:
            await plane.kv_snapshot(third.id)
            hosts[2].tell(told)
            assert await heard.get() == (third.id, told)
            assert third.id != second.id
    await plane.close()
    await engine.close()
