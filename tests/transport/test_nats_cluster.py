"""A cluster of NATS servers loses one, and the fleet does not notice."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import nats
import nats.errors
import nats.js.errors
import pytest
from pydantic import SecretStr

from inlay.base.errors import NotFoundError
from inlay.engine.settings import EngineSettings
from inlay.messages.digest import with_digests
from inlay.messages.prompt import Buffer, Prompt, Rows
from inlay.messages.request import Request, Sampling
from inlay.router import Router
from inlay.transport.nats.settings import NatsSettings
from tests.serving import free_port
from tests.store.frontends import Frontends
from tests.store.making import plain
from tests.transport.fleet import SECRET, Fleet, found
from tests.transport.nats_server import NatsServer
from tests.transport.paced import PacedEngine, paced_settings
from tests.transport.test_nats_faults import answer, check, start

pytestmark = pytest.mark.slow

BOUND = 120


def cluster(directory: Path, size: int = 3) -> list[NatsServer]:
    """Servers that know each other."""
    ports = [free_port() for _ in range(size)]
    routes = ", ".join(f'"nats-route://127.0.0.1:{port}"' for port in ports)
    servers = []
    for number, port in enumerate(ports):
        place = directory / str(number)
        place.mkdir()
        extra = (
            f'server_name: "n{number}"\n'
            f'cluster {{ name: "c", listen: "127.0.0.1:{port}", routes: [{routes}], no_advertise: true }}'
        )
        servers.append(NatsServer(place, extra=extra))
    for server in servers:
        server.start()
    return servers


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[list[NatsServer]]:
    """A cluster of three that keeps things."""
    servers = cluster(tmp_path)
    client = await nats.connect([server.url for server in servers])
    async with asyncio.timeout(BOUND):
        while True:
            with suppress(nats.errors.Error, nats.js.errors.Error):
                # Only now have all three found each other.
                await client.jetstream(timeout=5).create_key_value(bucket="probe", replicas=3)
                break
            await asyncio.sleep(0.1)
    await client.close()
    yield servers
    for server in servers:
        server.kill()


def settings_of(servers: list[NatsServer]) -> NatsSettings:
    """To keep everything at all of them."""
    return NatsSettings(nats=[SecretStr(server.url) for server in servers], nats_replicas=3)


async def test_what_a_fleet_keeps_outlives_the_server_that_leads_it(
    servers: list[NatsServer], echo_settings: EngineSettings
) -> None:
    fleet, stores = Fleet(servers[0]), Frontends(servers[0])
    fleet.settings = stores.settings = settings_of(servers)
    async with AsyncExitStack() as undo, asyncio.timeout(BOUND):
        undo.push_async_callback(fleet.close)
        undo.push_async_callback(stores.close)
        await fleet.worker(PacedEngine(paced_settings(echo_settings.model.model), SECRET))
        plane = await fleet.frontend(SECRET)
        await found(plane)
        one, other = await stores.frontend(), await stores.frontend()
        kept, deleted = [(await one.put("alice", seed)).id for seed in (1, 2)]
        router = Router(plane)
        tasks = start(router, 10)
        jetstream = one.member.control.jetstream
        infos = [
            await jetstream.stream_info(name)
            for name in (
                f"OBJ_{one.member.subjects.kept('prompts')}",
                f"KV_{one.member.subjects.cards}",
            )
        ]
        assert [info.config.num_replicas for info in infos] == [3, 3]
        leader = infos[0].cluster
        assert leader is not None
        assert leader.leader is not None
        servers[int(leader.leader.removeprefix("n"))].kill()
        assert await other.elements("alice", kept) == plain(1)
        assert await other.elements("alice", deleted) == plain(2)
        await other.store.delete("alice", deleted)
        with pytest.raises(NotFoundError):
            await one.rows("alice", deleted)
        third = await stores.frontend()
        assert (await third.put("alice", 3)).id == (await one.put("alice", 3)).id
        assert await third.elements("alice", kept) == plain(1)
        # Who comes now finds the worker by its card.
        late = await fleet.frontend(SECRET)
        await found(late)
        await check(tasks)
        await check(start(Router(late), 3, 20), 20)


async def test_the_server_that_a_frontend_and_a_worker_are_at_dies(
    servers: list[NatsServer], echo_settings: EngineSettings
) -> None:
    fleet = Fleet(servers[0])
    fleet.settings = settings_of(servers)
    async with asyncio.timeout(BOUND):
        for _ in range(2):
            await fleet.worker(PacedEngine(paced_settings(echo_settings.model.model), SECRET))
        plane = await fleet.frontend(SECRET)
        await found(plane, 2)
    router = Router(plane)
    tasks = start(router, 10)
    rows = Rows(Buffer(os.urandom(64 * 4 * 40_000)), "float32", (40_000, 64))
    big = Request(
        id="big", prompts=(with_digests(Prompt.of(rows), SECRET),), params=Sampling(max_tokens=40)
    )
    whole = await answer(router, big)
    at = plane._member.control._client.connected_url
    assert at is not None
    (lost,) = [server for server in servers if server.port == at.port]
    again = asyncio.create_task(
        answer(router, Request(id="b", prompts=(big.prompt,), params=big.sampling))
    )
    await asyncio.sleep(0.1)
    lost.kill()
    await check(tasks)
    assert await again == whole
    await check(start(router, 3, 20), 20)
    await fleet.close()
