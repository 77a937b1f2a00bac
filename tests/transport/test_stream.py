"""A socket read where bytes belong: turns, pauses, the end, and faults of the protocol."""

import asyncio
import os
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from inlay.transport import stream
from inlay.transport.listener import _pinned
from inlay.transport.stream import TURN_BYTES, Reader, SocketStream, secured
from tests.transport.fleet import identity


class Sink(Reader):
    """Collects what comes into places of one size, and counts what comes in a turn."""

    def __init__(self, size: int = 100_000) -> None:
        self.place = memoryview(bytearray(size))
        self.came = bytearray()
        self.most = self.turn = 0
        self.paused = 0
        self.pauses = False
        self.expected = 0
        self.made: Any = None
        self.error: Exception | None = None
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.made = transport

    @property
    def due(self) -> int:
        return max(0, self.expected - len(self.came))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.place

    def buffer_updated(self, nbytes: int) -> None:
        if self.error is not None:
            raise self.error
        if not self.turn:
            asyncio.get_running_loop().call_soon(self._turned)
        self.turn += nbytes
        self.came += self.place[:nbytes]
        if self.pauses:
            self.made.pause_reading()

    def _turned(self) -> None:
        self.most, self.turn = max(self.most, self.turn), 0

    def pause_writing(self) -> None:
        self.paused += 1

    def resume_writing(self) -> None:
        self.paused -= 1

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(exc)


async def until(done: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not done():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def plain(ours: socket.socket, theirs: socket.socket) -> tuple[socket.socket, socket.socket]:
    return ours, theirs


async def tls(ours: socket.socket, theirs: socket.socket) -> tuple[socket.socket, socket.socket]:
    found: tuple[ssl.SSLSocket, ssl.SSLSocket] = await asyncio.gather(
        secured(ours, _pinned(), "inlay"), secured(theirs, identity().context, None)
    )
    return found


Way = Callable[[socket.socket, socket.socket], Awaitable[tuple[socket.socket, socket.socket]]]


@pytest.fixture(params=[plain, tls], ids=["plain", "tls"])
def way(request: pytest.FixtureRequest) -> Way:
    found: Way = request.param
    return found


@asynccontextmanager
async def ends(way: Way, size: int = 100_000) -> "AsyncIterator[tuple[Sink, Sink]]":
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname())
        theirs, _ = listening.accept()
    for each in (ours, theirs):
        each.setblocking(False)
    first, second = await way(ours, theirs)
    one, other = Sink(size), Sink(size)
    SocketStream(first, one)
    SocketStream(second, other)
    try:
        yield one, other
    finally:
        for sink in (one, other):
            sink.made.abort()
            await sink.ended


@pytest.mark.parametrize("size", [7, 100_000])
async def test_bytes_come_as_they_were_sent_both_ways(way: Way, size: int) -> None:
    async with ends(way, size) as (one, other):
        sent = os.urandom(100_000 if size < 100 else 9_000_000)
        for sink in (one, other):
            sink.made.writelines([sent[:10], b"", sent[10:30], memoryview(sent)[30:]])
        await until(lambda: len(one.came) == len(other.came) == len(sent))
        assert one.came == other.came == sent
        assert not one.paused
        assert not other.paused


async def test_others_have_their_turn_while_much_is_there(way: Way) -> None:
    async with ends(way) as (one, other):
        sent = bytes(20_000_000)
        one.made.writelines([sent])
        await until(lambda: len(other.came) == len(sent))
        assert other.most + len(other.place) >= TURN_BYTES, "it reads on in a turn"
        assert other.most <= TURN_BYTES + len(other.place), "and not for ever"


@pytest.mark.skipif(sys.platform != "linux", reason="others wake a reader for each byte")
async def test_of_what_is_due_little_wakes_no_reader(way: Way) -> None:
    async with ends(way) as (one, other):
        sent = os.urandom(1_000_000)
        other.expected = len(sent)
        one.made.write(sent[:4])
        await until(lambda: other.came)
        one.made.write(sent[4:30_000])
        await asyncio.sleep(0.1)
        assert len(other.came) == 4, "it waits for more"
        other.made.resume_reading()
        await until(lambda: len(other.came) == 30_000)
        one.made.write(sent[30_000:])
        await until(lambda: len(other.came) == len(sent))
        one.made.write(b"!")
        await until(lambda: other.came == sent + b"!")


async def test_all_that_is_due_comes_in_whatever_pieces(way: Way) -> None:
    async with ends(way) as (one, other):
        sent = os.urandom(3_000_000)
        other.expected = len(sent)
        for start in range(0, len(sent), 7001):
            one.made.write(sent[start : start + 7001])
            if start % 3:
                await asyncio.sleep(0)
        await until(lambda: len(other.came) == len(sent))
        assert other.came == sent


async def test_the_end_is_told_while_more_is_due(way: Way) -> None:
    async with ends(way) as (one, other):
        other.expected = 1_000_000
        one.made.write(b"head")
        await until(lambda: other.came)
        one.made.write(bytes(1000))
        one.made.close()
        assert await asyncio.wait_for(other.ended, 10) is None
        assert len(other.came) == 1004


async def test_a_writer_is_paused_while_the_other_end_does_not_read(way: Way) -> None:
    async with ends(way) as (one, other):
        other.made.pause_reading()
        sent = os.urandom(20_000_000)
        one.made.writelines([sent])
        await until(lambda: one.paused)
        one.made.writelines([b"and more"])
        one.made.close()
        await asyncio.sleep(0.05)
        assert not one.ended.done(), "what was written is still to leave"
        other.made.resume_reading()
        await until(lambda: len(other.came) == len(sent) + 8)
        assert other.came == sent + b"and more"
        assert await other.ended is None
        assert await one.ended is None


async def test_what_is_left_of_a_record_comes_after_a_pause(way: Way) -> None:
    async with ends(way, 7) as (one, other):
        other.pauses = True
        one.made.write(bytes(1000))
        await until(lambda: other.came)
        assert len(other.came) == 7
        other.pauses = False
        other.made.resume_reading()
        await until(lambda: len(other.came) == 1000)


async def test_the_end_of_one_is_that_of_the_other(way: Way) -> None:
    async with ends(way) as (one, other):
        one.made.write(b"last")
        one.made.close()
        assert one.made.is_closing()
        await asyncio.wait_for(other.ended, 10)
        assert other.came == b"last"
        one.made.writelines([b"too late"])
        other.made.write(b"likewise")


async def test_a_reset_is_told(way: Way) -> None:
    async with ends(way) as (one, other):
        linger = (1).to_bytes(4, "little") + bytes(4)
        one.made.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        one.made.abort()
        # OpenSSL tells it from the end in some versions only.
        assert isinstance(await other.ended, ConnectionResetError) or way is tls


async def test_a_fault_of_the_protocol_ends_its_connection_alone(way: Way) -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: told.append(what))
    async with ends(way) as (one, other), ends(way) as (third, fourth):
        other.error = MemoryError("none left")
        one.made.write(b"some")
        assert await other.ended is other.error
        await one.ended
        third.made.write(b"served")
        await until(lambda: fourth.came == b"served")
    assert [what["exception"] for what in told] == [other.error]


async def test_a_handshake_that_fails_closes_the_socket() -> None:
    ours, theirs = socket.socketpair()
    for each in (ours, theirs):
        each.setblocking(False)
    theirs.send(b"not TLS at all" * 10)
    with pytest.raises(ssl.SSLError):
        await secured(ours, _pinned(), "inlay")
    assert ours.fileno() == -1
    theirs.close()
    left, _ = socket.socketpair()
    left.setblocking(False)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await secured(left, _pinned(), "inlay")
    assert left.fileno() == -1
    _.close()


async def test_the_next_address_of_a_host_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        refused = (socket.AF_INET, socket.SOCK_STREAM, 0, "", unused.getsockname())
        found = (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port))
        loop = asyncio.get_running_loop()

        async def both(host: str, port: int, **_: Any) -> list[Any]:
            return [refused, found]

        async def one(host: str, port: int, **_: Any) -> list[Any]:
            return [refused]

        monkeypatch.setattr(loop, "getaddrinfo", both)
        (await stream.connected("name", port)).close()
        monkeypatch.setattr(loop, "getaddrinfo", one)
        with pytest.raises(ConnectionRefusedError):
            await stream.connected("name", port)


async def test_it_listens_on_every_address_of_a_host() -> None:
    found = stream.listening("127.0.0.1", 0, 8)
    try:
        with pytest.raises(OSError, match="in use"):
            stream.listening("127.0.0.1", found[0].getsockname()[1], 8)
    finally:
        for sock in found:
            sock.close()
