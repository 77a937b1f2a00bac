"""Messages that no member of a fleet would send, from a client that NATS let in.

Nobody else notices them.
"""

import asyncio
import socket
from pathlib import Path

import pytest

from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Request, Sampling
from inlay.transport.nats.connection import NatsConnection
from tests.transport.fleet import SECRET, Fleet, found
from tests.transport.nats_server import NatsServer
from tests.transport.test_conformance import collect, ids

BOUND = 60
"""Seconds within which everything must have come to an end: nothing hangs."""

HOSTILE = {
    "a subject that is not UTF-8": b"PUB %s.\xff 1\r\nx\r\n",
    "a reply that is not UTF-8": b"PUB %s.a r\xff 1\r\nx\r\n",
    "a subject that the client takes for two words": b"PUB %s.a\x0bb 1\r\nx\r\n",
    "headers that are none": b"HPUB %s.a 3 4\r\nabcx\r\n",
    "headers that are not UTF-8": b"HPUB %s.a 15 16\r\nNATS/1.0 \xff\xff\r\n\r\nx\r\n",
}


def send(server: NatsServer, *lines: bytes) -> None:
    """As another client, and return when the server has taken it."""
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(
            b'CONNECT {"verbose":false,"headers":true}\r\n' + b"".join(lines) + b"PING\r\n"
        )
        answer = b""
        while b"PONG" not in answer:
            said = client.recv(4096)
            assert said, answer
            assert b"-ERR" not in said, said
            answer += said


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE)
async def test_a_connection_outlives_what_the_library_cannot_read(
    nats_server: NatsServer, line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    connection = NatsConnection(nats_server.settings(), "reader")
    await connection.open()
    heard: asyncio.Queue[str] = asyncio.Queue()
    await connection.subscribe("hostile.*", lambda message: heard.put_nowait(message.subject))
    await connection.settle()
    await asyncio.to_thread(send, nats_server, line % b"hostile")
    async with asyncio.timeout(BOUND):
        while heard.empty():
            connection.publish("hostile.next", b"")
            await asyncio.sleep(0.05)
    assert set(heard._queue) <= {"hostile.next", "hostile.a"}  # type: ignore[attr-defined]
    assert "not answered" not in caplog.text
    await connection.close()


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE)
async def test_a_frontend_and_a_worker_go_on_after_messages_that_no_member_sends(
    nats_server: NatsServer, echo_settings: EngineSettings, line: bytes
) -> None:
    fleet = Fleet(nats_server)
    worker = await fleet.worker(EchoEngine(echo_settings, SECRET))
    plane = await fleet.frontend(SECRET)
    (link,) = await found(plane)
    namespace = fleet.settings.namespace
    subjects = [f"inlay.{namespace}.{kind}".encode() for kind in ("beat", "load", "cache")]
    subjects += [
        f"inlay.{namespace}.chunk.{id_}.x.1".encode()
        for id_ in (worker.worker.id, plane._member.id)
    ]
    await asyncio.to_thread(send, nats_server, *(line % subject for subject in subjects))
    request = Request(id="a", prompts=(Prompt.of(Tokens((5, 6))),), params=Sampling(max_tokens=9))
    async with asyncio.timeout(BOUND):
        assert len(ids(await collect(link.send(request)))) == 9
    await fleet.close()


async def test_a_connection_whose_reading_has_ended_is_replaced(tmp_path: Path) -> None:
    with NatsServer(tmp_path) as server:
        connection = NatsConnection(server.settings(), "reader")
        await connection.open()
        heard = asyncio.Event()
        await connection.subscribe("replaced", lambda _: heard.set())
        await connection.settle()
        reading = connection._client._reading_task
        assert reading is not None
        reading.cancel()
        async with asyncio.timeout(BOUND):
            while not heard.is_set():
                connection.publish("replaced", b"")
                await asyncio.sleep(0.05)
        await connection.close()
