"""What a fleet has when NATS comes back with an empty store."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.messages.digest import Secret
from inlay.transport.nats.frontend import NatsPlane
from inlay.transport.nats.member import Member
from inlay.transport.nats.prompts import NatsPrompts
from tests.transport.fleet import SECRET, Fleet, found, until
from tests.transport.nats_server import NatsServer


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    server = NatsServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.mark.parametrize("own", [None, SECRET], ids=["made", "of a file"])
async def test_a_running_member_writes_the_secret_back(
    server: NatsServer, own: Secret | None
) -> None:
    settings = server.settings()
    member = await Member.join(settings, "worker")
    secret = await member.secret(own)
    await asyncio.to_thread(server.empty)

    async def back() -> bool:
        return await member.recorded_fingerprint() == secret.fingerprint

    await until(back)
    newcomer = await Member.join(settings, "frontend")
    assert (await newcomer.secret(own)).root == secret.root
    assert member.stranger is newcomer.stranger is None
    await newcomer.leave()
    await member.leave()


async def test_the_older_of_two_secrets_stays_and_who_has_the_younger_says_so(
    server: NatsServer,
) -> None:
    settings = server.settings()
    member = await Member.join(settings, "worker")
    secret = await member.secret(None)
    # The store is emptied, and somebody comes before any member has looked.
    await (await member.facts()).purge("secret")
    newcomer = await Member.join(settings, "frontend")
    other = await newcomer.secret(None)
    assert other.root != secret.root
    plane = NatsPlane(newcomer, other)
    assert plane.unavailable() == {}
    server.kill()
    await asyncio.to_thread(server.start)

    async def said() -> bool:
        return bool(plane.unavailable())

    await until(said)
    (reason,) = plane.unavailable().values()
    assert f"has the secret {secret.fingerprint}, and this member {other.fingerprint}" in reason
    assert await newcomer.recorded_fingerprint() == secret.fingerprint
    assert member.stranger is None
    await newcomer.leave()
    await member.leave()


async def test_workers_are_found_and_prompts_can_be_stored_again(
    server: NatsServer, echo_settings: EngineSettings
) -> None:
    fleet = Fleet(server)
    worker = await fleet.worker(EchoEngine(echo_settings, SECRET))
    await worker.member.secret(SECRET)
    member = await Member.join(fleet.settings, "frontend")
    await member.secret(SECRET)
    prompts = await NatsPrompts.open(member)
    await asyncio.to_thread(server.empty)

    async def stored() -> bool:
        await prompts.list()
        return True

    await until(stored)
    # One that comes now knows only what NATS holds.
    assert len(await found(await fleet.frontend(SECRET), 1)) == 1
    await member.leave()
    await fleet.close()
