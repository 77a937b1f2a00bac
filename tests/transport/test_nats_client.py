"""The private parts of nats-py that `inlay.transport.nats.client` uses are there, and do harm."""

import asyncio
import inspect
from contextlib import suppress
from pathlib import Path

import nats.errors
import pytest
from nats.aio.client import Client
from nats.aio.transport import TcpTransport
from nats.protocol import parser

from inlay.base.errors import OverloadedError
from inlay.transport.nats.client import NatsClient
from inlay.transport.nats.connection import NatsConnection
from inlay.transport.nats.member import Member
from tests.transport.nats_server import NatsServer

BOUND = 60.0


def test_a_message_is_taken_by_the_method_that_is_overridden() -> None:
    theirs = inspect.signature(Client._process_msg)
    assert list(theirs.parameters) == list(inspect.signature(NatsClient._process_msg).parameters)
    assert "self.nc._process_msg(" in inspect.getsource(parser)


def test_an_error_is_taken_by_the_method_that_is_overridden() -> None:
    theirs = inspect.signature(Client._process_err)
    assert list(theirs.parameters) == list(inspect.signature(NatsClient._process_err).parameters)
    assert "self.nc._process_err(" in inspect.getsource(parser)


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


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(b"SUB a..b 99\r\n", id="a subject that is none"),
        pytest.param(b"WHAT\r\n", id="an operation that is none"),
        pytest.param(b"PUB a 99999999\r\n", id="too large a message"),
        pytest.param(b"PUB " + b"a" * 5000 + b" 0\r\n\r\n", id="too long a line"),
    ],
)
async def test_a_connection_outlives_what_the_server_calls_an_error(
    nats_server: NatsServer, line: bytes
) -> None:
    connection = NatsConnection(nats_server.settings(), "sender")
    await connection.open()
    await connection._client._send_command(line)
    with suppress(OverloadedError):
        await connection.settle()
    await still_taken(connection)
    await connection.close()


async def test_one_subscription_too_many_ends_no_other(tmp_path: Path) -> None:
    with NatsServer(tmp_path, extra="max_subscriptions: 3") as server:
        connection = NatsConnection(server.settings(), "reader")
        await connection.open()
        since = connection.since
        heard = asyncio.Event()
        await connection.subscribe("first", lambda _: heard.set())
        for name in ("second", "third", "fourth"):
            await connection.subscribe(name, lambda _: None)
        await connection.settle()
        connection.publish("first", b"")
        await asyncio.wait_for(heard.wait(), BOUND)
        assert connection.since == since
        await connection.close()


async def still_taken(connection: NatsConnection) -> None:
    """Wait until a message that it sends reaches it again."""
    heard = asyncio.Event()
    async with asyncio.timeout(BOUND):
        while not heard.is_set():
            if connection.connected:
                with suppress(nats.errors.Error):
                    await connection.subscribe("self", lambda _: heard.set())
                connection.publish("self", b"")
            await asyncio.sleep(0.05)
