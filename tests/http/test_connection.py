"""A large body read straight into memory leaves the connection as any other body does."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvicorn

from inlay.http.bodies.allocator import keep_freed_memory
from inlay.http.bodies.connection import EXTENSION, Exchange, HttpConnection
from inlay.http.errors import ClientGone


class Taker:
    """An ASGI app that takes bodies of known length whole, and answers with a checksum of them."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.progress: list[int] = []
        self.patience: float | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        source = scope["extensions"][EXTENSION]
        assert isinstance(source, Exchange)
        length = int(dict(scope["headers"]).get(b"content-length", b"0"))
        body = bytearray(length)
        status = 200
        if length:
            try:
                async with asyncio.timeout(self.patience):
                    await source.fill(memoryview(body), self.progress.append)
            except ClientGone:
                self.gone.set()
                return
            except TimeoutError:
                status = 408
        answer = f"{len(body)} {sum(body)}".encode()
        headers = [(b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


class Writer:
    """An ASGI app that writes chunks on the connection until its client reads too slowly."""

    def __init__(self) -> None:
        self.arrived: bytes | None = None
        self.whole = asyncio.Event()
        self.num_chunks = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = scope["extensions"][EXTENSION]
        self.arrived = exchange.arrived()
        assert not exchange.write_chunk(b"too early")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while exchange.write_chunk(CHUNK):
            self.num_chunks += 1
        self.whole.set()
        await send({"type": "http.response.body", "body": b"end", "more_body": False})


CHUNK = b"x" * 50_000


@pytest.fixture
async def taker() -> AsyncIterator[tuple[Taker, int]]:
    app = Taker()
    async with served(app) as port:
        yield app, port


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[int]:
    config = uvicorn.Config(
        app, http=HttpConnection, ws="none", lifespan="off", log_config=None, port=0
    )
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    yield server.servers[0].sockets[0].getsockname()[1]
    await server.shutdown()


@asynccontextmanager
async def opened(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.parametrize("body", [b"", b"small"])
async def test_chunks_are_written_until_the_client_reads_too_slowly(body: bytes) -> None:
    app = Writer()
    head = f"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    async with served(app) as port, opened(port) as (reader, writer):
        writer.write(head.encode() + body)
        await app.whole.wait()
        answer = await reader.read(-1)
    assert app.arrived == body
    assert app.num_chunks > 0
    chunk = b"%x\r\n%b\r\n" % (len(CHUNK), CHUNK)
    assert answer.endswith(b"\r\n\r\n" + chunk * app.num_chunks + b"3\r\nend\r\n0\r\n\r\n")


async def test_a_body_of_which_more_is_to_come_has_not_arrived() -> None:
    app = Writer()
    async with served(app) as port, opened(port) as (_, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nsma")
        await app.whole.wait()
    assert app.arrived is None


def request(body: bytes, *, extra: str = "") -> bytes:
    return (
        f"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n{extra}\r\n".encode() + body
    )


async def answer(reader: asyncio.StreamReader) -> tuple[int, str]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = next(
        int(line.split(":")[1])
        for line in head.lower().splitlines()
        if line.startswith("content-length")
    )
    return int(head.split()[1]), (await reader.readexactly(length)).decode()


def expected(body: bytes) -> tuple[int, str]:
    return 200, f"{len(body)} {sum(body)}"


@pytest.mark.parametrize("size", [1, 100, 70_000, 3_000_000])
async def test_bodies_follow_one_another_on_a_connection(
    taker: tuple[Taker, int], size: int
) -> None:
    async with opened(taker[1]) as (reader, writer):
        for _ in range(4):
            body = os.urandom(size)
            writer.write(request(body))
            assert await answer(reader) == expected(body)


async def test_many_bodies_are_read_in_turn_and_one_given_up_holds_none_of_them(
    taker: tuple[Taker, int],
) -> None:
    async def sent(body: bytes) -> None:
        async with opened(taker[1]) as (reader, writer):
            writer.write(request(body))
            assert await answer(reader) == expected(body)

    async def left() -> None:
        async with opened(taker[1]) as (_, writer):
            writer.write(request(bytes(3_000_000))[:2_000_000])
            await writer.drain()

    await asyncio.gather(*(sent(os.urandom(3_000_000)) for _ in range(12)), left(), left())
    await asyncio.wait_for(taker[0].gone.wait(), 60)


async def test_a_body_in_small_pieces_arrives_whole(taker: tuple[Taker, int]) -> None:
    async with opened(taker[1]) as (reader, writer):
        body = os.urandom(200_000)
        data = request(body)
        for start in range(0, len(data), 7919):
            writer.write(data[start : start + 7919])
            await writer.drain()
            await asyncio.sleep(0)
        assert await answer(reader) == expected(body)


async def test_requests_sent_without_waiting_are_answered_in_order(
    taker: tuple[Taker, int],
) -> None:
    async with opened(taker[1]) as (reader, writer):
        bodies = [os.urandom(size) for size in (300_000, 5, 400_000)]
        writer.write(b"".join(request(body) for body in bodies))
        statuses = [await answer(reader) for _ in bodies]
        assert [status for status, _ in statuses] == [200] * 3
        assert statuses[0] == expected(bodies[0])


async def test_a_client_that_waits_to_be_told_is_told(taker: tuple[Taker, int]) -> None:
    async with opened(taker[1]) as (reader, writer):
        body = os.urandom(100_000)
        writer.write(request(body, extra="expect: 100-continue\r\n")[: -len(body)])
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert await answer(reader) == expected(body)


async def test_a_client_that_leaves_in_the_middle_is_noticed(taker: tuple[Taker, int]) -> None:
    app, port = taker
    async with opened(port) as (_, writer):
        writer.write(request(os.urandom(500_000))[:300_000])
        await writer.drain()
    await asyncio.wait_for(app.gone.wait(), 90)
    async with opened(port) as (reader, writer):
        writer.write(request(b"x" * 100_000))
        assert (await answer(reader))[0] == 200


async def test_a_body_given_up_on_ends_the_connection_after_the_answer(
    taker: tuple[Taker, int],
) -> None:
    app, port = taker
    app.patience = 0.3
    async with opened(port) as (reader, writer):
        data = request(os.urandom(500_000))
        writer.write(data[:300_000])
        assert (await answer(reader))[0] == 408
        writer.write(data[300_000:])
        assert await reader.read() == b""


async def test_progress_is_told(taker: tuple[Taker, int]) -> None:
    app, port = taker
    async with opened(port) as (reader, writer):
        body = os.urandom(5_000_000)
        writer.write(request(body))
        assert await answer(reader) == expected(body)
        assert app.progress == sorted(app.progress)
        assert all(count < len(body) for count in app.progress)


def test_the_allocator_says_whether_it_keeps_memory() -> None:
    assert keep_freed_memory() in (True, False)
