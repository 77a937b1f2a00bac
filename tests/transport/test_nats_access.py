"""NATS' own ways to be let in and to encrypt."""

import asyncio
import os
from pathlib import Path

import nkeys
import pytest
from pydantic import SecretStr

from inlay.base.errors import InlayError, InvalidRequestError
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.messages.prompt import Buffer, Prompt, Rows
from inlay.messages.request import Request, Sampling
from inlay.transport.nats.member import Member
from inlay.transport.nats.settings import NatsSettings
from tests.certificates import certificate
from tests.transport.fleet import SECRET, Fleet, found
from tests.transport.nats_server import NatsServer
from tests.transport.test_conformance import collect, ids

BOUND = 60
"""Seconds within which everything must have come to an end: nothing hangs."""


async def served(settings: NatsSettings, server: NatsServer, engine: EngineSettings) -> None:
    """A worker and a frontend that meet there, and a prompt that takes more than a message."""
    fleet = Fleet(server)
    fleet.settings = settings
    await fleet.worker(EchoEngine(engine, SECRET))
    plane = await fleet.frontend(SECRET)
    (worker,) = await found(plane)
    rows = Rows(Buffer(os.urandom(64 * 4 * 9000)), "float32", (9000, 64))
    answer = await collect(
        worker.send(Request(id="a", prompts=(Prompt.of(rows),), params=Sampling(max_tokens=9)))
    )
    assert len(ids(answer)) == 9
    await fleet.close()


async def test_a_fleet_talks_over_tls_that_asks_for_certificates_of_both_sides(
    tmp_path: Path, echo_settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    server_cert, server_key = certificate(tmp_path, "server")
    cert, key = certificate(tmp_path, "member")
    tls = f'tls {{ cert_file: "{server_cert}", key_file: "{server_key}", ca_file: "{cert}", verify: true }}'
    with NatsServer(tmp_path, extra=tls) as server:
        url = SecretStr(server.url.replace("nats://", "tls://"))
        ours = {"nats_tls_ca": server_cert, "nats_tls_cert": cert, "nats_tls_key": key}
        await served(NatsSettings(nats=[url], **ours), server, echo_settings)  # type: ignore[arg-type]
        monkeypatch.setattr("inlay.transport.nats.connection.CONNECT_SECONDS", 1.0)
        for lacking in ({"nats_tls_ca": server_cert}, {**ours, "nats_tls_ca": cert}):
            with pytest.raises(InlayError):
                await Member.join(NatsSettings(nats=[url], **lacking), "worker")  # type: ignore[arg-type]


async def test_a_fleet_logs_in_with_an_nkey(tmp_path: Path, echo_settings: EngineSettings) -> None:
    known, unknown = (
        nkeys.from_seed(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)) for _ in "ab"
    )
    files = []
    for name, pair in (("known", known), ("unknown", unknown)):
        files.append(tmp_path / name)
        files[-1].write_bytes(bytes(pair.seed))
    users = f'authorization {{ users: [ {{ nkey: "{known.public_key.decode()}" }} ] }}'
    with NatsServer(tmp_path, extra=users) as server:
        url = SecretStr(server.url)
        await served(NatsSettings(nats=[url], nats_nkey_seed=files[0]), server, echo_settings)
        with pytest.raises(InvalidRequestError, match="does not let us in"):
            await Member.join(NatsSettings(nats=[url], nats_nkey_seed=files[1]), "worker")


async def test_files_that_cannot_be_used_are_named(tmp_path: Path, nats_server: NatsServer) -> None:
    url = SecretStr(nats_server.url)
    missing = tmp_path / "missing"
    for wrong, said in (
        ({"nats_tls_ca": missing}, "No such file"),
        ({"nats_tls_key": missing}, "needs --nats-tls-cert"),
        ({"nats_creds": missing}, "missing"),
        ({"nats_nkey_seed": missing}, "missing"),
    ):
        with pytest.raises(InvalidRequestError, match=said):
            await Member.join(NatsSettings(nats=[url], **wrong), "worker")  # type: ignore[arg-type]


async def test_the_log_says_that_nats_is_lost_and_that_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def said(what: str) -> set[str]:
        """Lines with `what`, once there is one."""
        while True:
            lines = {
                record.getMessage() for record in caplog.records if what in record.getMessage()
            }
            if lines:
                return lines
            await asyncio.sleep(0.02)

    with NatsServer(tmp_path) as server:
        member = await Member.join(server.settings(), "frontend")
        names = {member.id}
        server.kill()
        lost = f"the connection to NATS at {server.url} is cut; it is tried again until it holds"
        async with asyncio.timeout(BOUND):
            assert await said("is cut") == {f"{name}: {lost}" for name in names}
        server.start()
        async with asyncio.timeout(BOUND):
            back = await said("again, after")
        assert {line.partition(": ")[0] for line in back} == names
        await member.leave()
