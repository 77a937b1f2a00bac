"""Connections are served in turns among addresses, those that their peer has closed last."""

import asyncio
import errno
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from socket import create_connection, socket
from typing import Any

import pytest
import uvloop

from inlay.http import listener
from inlay.http.listener import MAX_STARTED, HttpListener

FLOOD, CLIENT = "127.0.0.1", "127.0.0.2"


class _Recorder(asyncio.Protocol):
    """Notes the address of each connection that begins, and what is sent on it."""

    def __init__(self, served: list[str], data: list[bytes], changed: asyncio.Event) -> None:
        self._served = served
        self._data = data
        self._changed = changed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._served.append(transport.get_extra_info("peername")[0])
        self._changed.set()

    def data_received(self, data: bytes) -> None:
        self._data.append(data)
        self._changed.set()


class _Served:
    def __init__(self, listening: socket) -> None:
        self.port = listening.getsockname()[1]
        self.addresses: list[str] = []
        self.data: list[bytes] = []
        self.opened: list[socket] = []
        self._changed = asyncio.Event()
        self.listener = HttpListener(
            listening,
            lambda: _Recorder(self.addresses, self.data, self._changed),
            None,
            backlog=256,
        )

    def connect(self, address: str, count: int = 1) -> list[socket]:
        """Open connections without giving the event loop a turn."""
        opened = [
            create_connection(("127.0.0.1", self.port), 10, source_address=(address, 0))
            for _ in range(count)
        ]
        self.opened += opened
        return opened

    async def until(self, connections: int, pieces: int = 0) -> None:
        async with asyncio.timeout(60):
            while len(self.addresses) < connections or len(self.data) < pieces:
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def serving(listening: socket | None = None) -> AsyncIterator[_Served]:
    with listening or socket() as bound:
        bound.bind(("127.0.0.1", 0))
        served = _Served(bound)
        try:
            yield served
        finally:
            served.listener.close()
            await served.listener.wait_closed()
            for each in served.opened:
                each.close()


async def test_an_address_with_one_connection_does_not_wait_for_one_with_many() -> None:
    async with serving() as served:
        served.connect(FLOOD, 50)
        served.connect(CLIENT)
        await served.until(51)
        assert served.addresses.index(CLIENT) < MAX_STARTED
        assert served.addresses.count(FLOOD) == 50


async def test_connections_that_their_peer_has_closed_come_last_and_are_read() -> None:
    async with serving() as served:
        for each in served.connect(FLOOD, 20):
            each.sendall(b"whole")
            each.close()
        served.connect(FLOOD)
        marked = served.connect(FLOOD)[0]
        marked.sendall(b"open")
        await served.until(22, pieces=21)
        # The two open ones began in the first turn: one of them was read before any closed one.
        assert served.data == [b"open"] + [b"whole"] * 20


async def test_beyond_the_bound_the_address_with_the_most_loses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "MAX_WAITING", 8)
    async with serving() as served:
        flood = served.connect(FLOOD, 20)
        served.connect(CLIENT, 3)
        await served.until(9)
        await asyncio.sleep(0.05)
        assert served.addresses.count(CLIENT) == 3
        # The first of all came when none waited, and did not wait.
        assert served.addresses.count(FLOOD) == 1 + 5
        # Those that were dropped know it.
        flood[-1].settimeout(90)
        with pytest.raises(ConnectionResetError):
            _read(flood[-1])


def _read(connection: socket) -> None:
    if not connection.recv(1):
        raise ConnectionResetError


async def test_without_files_it_tries_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener, "RETRY_SECONDS", 0.05)

    class Full(socket):
        refused = False

        def accept(self) -> tuple[socket, Any]:
            if not self.refused:
                self.refused = True
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    with caplog.at_level(logging.ERROR):
        async with serving(Full()) as served:
            served.connect(CLIENT)
            await served.until(1)
    assert "Too many open files" in caplog.text


async def test_closing_ends_the_connections_that_wait() -> None:
    async with serving() as served:
        last = served.connect(FLOOD, 40).pop()
        served.opened.remove(last)
        await asyncio.sleep(0)
    assert len(served.addresses) < 40
    last.settimeout(90)
    with last, pytest.raises(ConnectionResetError):
        _read(last)


async def _ended(turns: int) -> None:
    """A connection that is not served when its listener closes, after some turns, is ended."""
    async with serving() as served:
        (client,) = served.connect(CLIENT)
        served.opened.clear()
        client.setblocking(False)
        for _ in range(turns):
            await asyncio.sleep(0)
        is_served = bool(served.addresses)
    with client, suppress(ConnectionResetError):
        async with asyncio.timeout(60):
            assert is_served or await asyncio.get_running_loop().sock_recv(client, 1) == b""


@pytest.mark.parametrize("turns", range(6))
def test_no_connection_begins_after_closing_and_stays(turns: int) -> None:
    # As servers run: each event loop begins connections in its own turns.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_ended(turns))
