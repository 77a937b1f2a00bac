"""The private parts of nats-py that `inlay.transport.nats.client` uses are there, and do harm."""

import asyncio
import inspect
from contextlib import suppress

import nats.errors
import pytest
from nats.aio.client import Client
from nats.aio.transport import TcpTransport
from nats.protocol import parser

from inlay.transport.nats.client import NatsClient
from inlay.transport.nats.connection import NatsConnection
from inlay.transport.nats.member import Member
from tests.transport.nats_server import NatsServer

BOUND = 60.0


def test_a_message_is_taken_by_the_method_that_is_overridden() -> None:
    theirs = inspect.signature(Client._process_msg)
    assert list(theirs.parameters) == list(inspect.signature(NatsClient._process_msg).parameters)
    assert "self.nc._process_msg(" in inspect.getsource(parser)


def test_a_connection_can_be_cut_and_what_is_unsent_forgotten() -> None:
    client = NatsClient()
    assert isinstance(client._pending, list)
    assert client._pending_data_size == 0
    assert "self._io_writer" in inspect.getsource(TcpTransport)
    client._pending.append(b"unsent")
    client.drop_unsent()
    assert client._pending == []


async def test_a_task_that_is_cancelled_in_the_moment_of_its_answer_ends(
    nats_server: NatsServer,
) -> None:
    member = await Member.join(nats_server.settings(), "worker")
    await member.recorded_fingerprint()
    waiting = member.control._client._resp_map

    async def look_again_and_again() -> None:
        while True:
            await member.recorded_fingerprint()

    looking = asyncio.create_task(look_again_and_again())
    while not waiting:  # noqa: ASYNC110 - no event says that it asks
        await asyncio.sleep(0)
    (answer,) = waiting.values()
    answer.add_done_callback(lambda _: looking.cancel())
    await asyncio.wait({looking}, timeout=BOUND)
    assert looking.cancelled()
    await member.leave()


async def test_a_task_that_is_cancelled_while_it_makes_room_ends(nats_server: NatsServer) -> None:
    connection = NatsConnection(nats_server.settings(), "writer")
    await connection.open()
    client = connection._client

    async def write_on() -> None:
        while True:
            await client.publish("anything", bytes(client._max_pending_size // 2))

    writing = asyncio.create_task(write_on())
    while client._pending_data_size <= client._max_pending_size:  # noqa: ASYNC110
        await asyncio.sleep(0)
    writing.cancel()
    await asyncio.wait({writing}, timeout=BOUND)
    assert writing.cancelled()
    await connection.close()


async def test_an_attempt_to_connect_can_be_given_up_in_the_moment_it_succeeds(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    connecting: asyncio.Task[None]
    reply = TcpTransport.readline

    async def reply_and_cancel(self: TcpTransport) -> bytes:
        line: bytes = await reply(self)  # type: ignore[no-untyped-call]
        own = asyncio.current_task()
        assert own is not None
        own.add_done_callback(lambda _: connecting.cancel())
        return line

    monkeypatch.setattr(TcpTransport, "readline", reply_and_cancel)
    client = NatsClient()
    connecting = asyncio.create_task(client.connect(nats_server.url))
    await asyncio.wait({connecting}, timeout=BOUND)
    assert connecting.cancelled()
    await client.close()


async def test_an_answer_to_a_flush_that_was_given_up_ends_no_reading(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with NatsServer(tmp_path_factory.mktemp("frozen")) as server:
        client = NatsClient()
        await client.connect(server.url, allow_reconnect=False)
        server.freeze()
        with suppress(nats.errors.TimeoutError):
            await client.flush(timeout=1)
        server.thaw()
        await client.flush()
        assert client._reading_task is not None
        assert not client._reading_task.done()
        await client.close()
