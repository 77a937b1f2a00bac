"""The references of a fleet: the first stands, and only the namespace's own count."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.http.metrics.engine_health import combined_status
from inlay.messages.card import SelfCheck
from inlay.messages.digest import Secret
from inlay.transport.nats.member import Member
from inlay.transport.nats.references import ReferenceRecord
from inlay.worker.host import EngineHost
from tests.transport.fleet import SECRET, Fleet, found, until
from tests.transport.nats_server import NatsServer

KEY, OTHER = "0" * 32, "1" * 32
REFERENCE = bytes(range(256)) * 740
"""As large as they become, and less than a plain NATS server takes."""


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    server = NatsServer(tmp_path)
    server.start()
    yield server
    server.kill()


async def test_the_first_stands_until_it_is_replaced(nats_server: NatsServer) -> None:
    fleet = Fleet(nats_server)
    members = [await Member.join(fleet.settings, "worker") for _ in range(2)]
    first, second = (ReferenceRecord(member, SECRET) for member in members)
    assert await first.settle(KEY, None, False) is None
    assert await first.settle(KEY, REFERENCE, False) == REFERENCE
    assert await second.settle(KEY, b"another", False) == REFERENCE
    assert await second.settle(OTHER, None, False) is None
    assert await second.settle(KEY, b"another", True) == b"another"
    assert await first.settle(KEY, None, False) == b"another"
    for member in members:
        await member.leave()


async def test_of_those_who_come_at_once_one_decides(nats_server: NatsServer) -> None:
    fleet = Fleet(nats_server)
    members = [await Member.join(fleet.settings, "worker") for _ in range(4)]
    records = [ReferenceRecord(member, SECRET) for member in members]
    kept = await asyncio.gather(
        *(record.settle(KEY, bytes([at]) * 99, False) for at, record in enumerate(records))
    )
    assert len(set(kept)) == 1
    for member in members:
        await member.leave()


async def test_one_that_the_namespace_did_not_write_counts_as_none(
    nats_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet(nats_server)
    member = await Member.join(fleet.settings, "worker")
    stranger = ReferenceRecord(member, Secret(bytes([7]) * 32))
    await stranger.settle(KEY, b"stranger's", False)
    record = ReferenceRecord(member, SECRET)
    assert await record.settle(KEY, None, False) is None
    assert "has not its checksum" in caplog.text
    assert await record.settle(KEY, b"ours", False) == b"ours"
    # Nor does one that stood under another key.
    storage = await member.facts()
    entry = await storage.get(f"references.{KEY}")
    assert entry.value is not None
    await storage.put(f"references.{OTHER}", entry.value)
    assert await record.settle(OTHER, None, False) is None
    await member.leave()


async def test_one_that_a_message_cannot_hold_is_not_kept_and_nobody_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with NatsServer(tmp_path, max_payload=64 << 10) as small:
        member = await Member.join(small.settings(), "worker")
        record = ReferenceRecord(member, SECRET)
        assert await record.settle(KEY, REFERENCE, False) == REFERENCE
        assert "NATS keeps no reference of 189472 bytes" in caplog.text
        assert await record.settle(KEY, None, False) is None
        assert await record.settle(KEY, b"a short one", False) == b"a short one"
        await member.leave()


async def test_an_emptied_store_gets_it_back_from_who_runs(server: NatsServer) -> None:
    settings = server.settings()
    member = await Member.join(settings, "worker")
    record = ReferenceRecord(member, await member.secret(SECRET))
    member.keep(record.uphold)
    await record.settle(KEY, REFERENCE, False)
    await asyncio.to_thread(server.empty)
    newcomer = await Member.join(settings, "worker")
    other = ReferenceRecord(newcomer, SECRET)

    async def back() -> bool:
        return await other.settle(KEY, None, False) == REFERENCE

    await until(back)
    await newcomer.leave()
    await member.leave()


async def test_who_asks_while_nats_is_away_waits(server: NatsServer) -> None:
    member = await Member.join(server.settings(), "worker")
    record = ReferenceRecord(member, SECRET)
    await record.settle(KEY, REFERENCE, False)
    server.kill()
    asked = asyncio.create_task(record.settle(KEY, None, False))
    await asyncio.sleep(0.1)
    assert not asked.done()
    await asyncio.to_thread(server.start)
    async with asyncio.timeout(90):
        assert await asked == REFERENCE
    await member.leave()


async def test_a_worker_that_differs_serves_in_no_pool_and_the_reason_is_told(
    nats_server: NatsServer, echo_settings: EngineSettings, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet(nats_server)
    reason = "its logprobs are not those of others"
    differs = SelfCheck(result="differs", reference="others", reason=reason)
    right = await fleet.worker(EchoEngine(echo_settings, SECRET))
    wrong = await fleet.worker(
        EchoEngine(echo_settings, SECRET),
        host=lambda engine: EngineHost(engine, self_check=differs),
    )
    plane = await fleet.frontend()
    (worker,) = await found(plane)
    while not plane.unavailable():
        await plane.changed()
    assert plane.unavailable() == {wrong.worker.id: reason}
    assert [one.id for one in plane.workers()] == [worker.id]
    assert worker.id.startswith(right.worker.id)
    assert f"worker {wrong.worker.id}: {reason}" in caplog.text
    health = combined_status(plane.announced(), plane.workers(), plane.unavailable())
    assert (health.status, health.missing) == ("degraded", {wrong.worker.id: reason})
    await fleet.close()
