"""A cluster of NATS servers loses one, and the fleet does not notice."""

import asyncio
import os
from pathlib import Path

import pytest
from pydantic import SecretStr

from inlay.digest import with_digests
from inlay.engine.settings import EngineSettings
from inlay.plane.nats.settings import NatsSettings
from inlay.prompt import Buffer, Prompt, Rows
from inlay.protocol.work import Sampling, Work
from inlay.router import Router
from tests.plane.fleet import Fleet, found
from tests.plane.nats_server import NatsServer
from tests.plane.paced import SECRET, PacedEngine, paced_settings
from tests.plane.test_nats_faults import answer, check, start
from tests.serving import free_port

pytestmark = pytest.mark.slow


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


async def test_the_server_that_a_frontend_and_a_worker_are_at_dies(
    tmp_path: Path, echo_settings: EngineSettings
) -> None:
    servers = cluster(tmp_path)
    settings = NatsSettings(nats=[SecretStr(server.url) for server in servers], nats_replicas=3)
    fleet = Fleet(servers[0])
    fleet.settings = settings
    try:
        async with asyncio.timeout(60):
            for _ in range(2):
                await fleet.worker(PacedEngine(paced_settings(echo_settings.model), SECRET))
            plane = await fleet.frontend(SECRET)
            await found(plane, 2)
        router = Router(plane)
        tasks = start(router, 10)
        rows = Rows(Buffer(os.urandom(64 * 4 * 40_000)), "float32", (40_000, 64))
        big = Work(id="big", prompt=with_digests(Prompt.of(rows), SECRET), sampling=Sampling(max_tokens=40))
        whole = await answer(router, big)
        at = plane._member.control._client.connected_url
        assert at is not None
        (lost,) = [server for server in servers if server.port == at.port]
        again = asyncio.create_task(answer(router, Work(id="b", prompt=big.prompt, sampling=big.sampling)))
        await asyncio.sleep(0.1)
        lost.kill()
        await check(tasks)
        assert await again == whole
        await check(start(router, 3, 20), 20)
        await fleet.close()
    finally:
        for server in servers:
            server.kill()
