"""What routers are told goes over NATS.

Caches, snapshots of any size, and what other frontends have sent.
"""

import asyncio
import os
from collections.abc import AsyncIterator

import pytest

from inlay.base.errors import InvalidRequestError, OverloadedError
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.messages.prompt import Buffer
from inlay.messages.routing import (
    KEY_SIZE,
    Cleared,
    FrontendLoad,
    KvEvents,
    KvSnapshot,
    RoutingFeed,
    Stored,
    WorkerLoad,
)
from inlay.transport.nats.frontend import NatsPlane
from tests.transport.caching import CachingHost
from tests.transport.fleet import SECRET, Fleet, found
from tests.transport.nats_server import NatsServer


@pytest.fixture
async def fleet(nats_server: NatsServer) -> AsyncIterator[Fleet]:
    fleet = Fleet(nats_server)
    yield fleet
    await fleet.close()


class Ear:
    """Notes what a plane tells a router."""

    def __init__(self, plane: NatsPlane) -> None:
        assert isinstance(plane, RoutingFeed)
        self.events: asyncio.Queue[tuple[str, KvEvents]] = asyncio.Queue()
        self.loads: asyncio.Queue[FrontendLoad] = asyncio.Queue()
        plane.listen(
            lambda id_, events: self.events.put_nowait((id_, events)), self.loads.put_nowait
        )


async def test_what_a_worker_tells_of_its_cache_reaches_every_frontend_in_order(
    fleet: Fleet, echo_settings: EngineSettings
) -> None:
    engine = EchoEngine(echo_settings, SECRET)
    host = CachingHost(engine, b"")
    await fleet.worker(engine, host=lambda _: host)
    planes = [await fleet.frontend(SECRET) for _ in range(2)]
    ears = [Ear(plane) for plane in planes]
    ids = [(await found(plane))[0].id for plane in planes]
    for plane in planes:
        await plane._member.control.settle()
    told = [KvEvents(n, (Stored(os.urandom(3 * KEY_SIZE)), Cleared())) for n in range(1, 30)]
    for events in told:
        host.tell(events)
    for ear, id_ in zip(ears, ids, strict=True):
        assert [await ear.events.get() for _ in told] == [(id_, events) for events in told]


@pytest.mark.parametrize("blocks", [0, 10, 400_000])
async def test_all_that_a_worker_has_cached_is_told_whatever_it_comes_to(
    fleet: Fleet, echo_settings: EngineSettings, blocks: int
) -> None:
    engine = EchoEngine(echo_settings, SECRET)
    host = CachingHost(engine, os.urandom(blocks * KEY_SIZE))
    await fleet.worker(engine, host=lambda _: host)
    plane = await fleet.frontend(SECRET)
    (worker,) = await found(plane)
    assert await plane.kv_snapshot(worker.id) == KvSnapshot(7, Buffer(host.keys))
    with pytest.raises(OverloadedError, match="gone"):
        await plane.kv_snapshot("nobody.1")


async def test_a_worker_without_events_says_so(fleet: Fleet, echo_settings: EngineSettings) -> None:
    await fleet.worker(EchoEngine(echo_settings, SECRET))
    plane = await fleet.frontend(SECRET)
    (worker,) = await found(plane)
    with pytest.raises(InvalidRequestError, match="does not report what it caches"):
        await plane.kv_snapshot(worker.id)


async def test_frontends_hear_each_other_and_not_themselves(fleet: Fleet) -> None:
    planes = [await fleet.frontend(SECRET) for _ in range(3)]
    ears = [Ear(plane) for plane in planes]
    for plane in planes:
        assert plane._subscribing is not None
        await plane._subscribing
        await plane._member.control.settle()
    said = [FrontendLoad(frontend=str(n), sequence=1, loads={"w": WorkerLoad(n)}) for n in range(3)]
    for plane, load in zip(planes, said, strict=True):
        plane.publish(load)
    for number, ear in enumerate(ears):
        heard = [await ear.loads.get() for _ in range(2)]
        assert sorted(load.frontend for load in heard) == sorted(set("012") - {str(number)})
        assert all(load in said for load in heard)
        assert ear.loads.empty()
