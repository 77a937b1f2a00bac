"""The end of a reader is noticed while nothing is written, and one that reads on gets it all."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import h11
import pytest
import uvicorn

from inlay.http.bodies.connection import EXTENSION
from inlay.http.bounded_http import BoundedHttp

BODY = [b"data: 1\n\n", b"data: 2\n\n"]


class Silent:
    """An ASGI app that waits in its answer: before it begins, or after its first part."""

    def __init__(self, headers: list[tuple[bytes, bytes]], *, begins: bool) -> None:
        self.headers = headers
        self.begins = begins
        self.waits = asyncio.Event()
        self.go_on = asyncio.Event()
        self.gone = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["http_version"] == "1.0":
            send = scope["extensions"][EXTENSION].until_close(send)
        assert (await receive())["type"] == "http.request"
        if not self.begins:
            await self._wait(receive)
        await send({"type": "http.response.start", "status": 200, "headers": self.headers})
        await send({"type": "http.response.body", "body": BODY[0], "more_body": True})
        if self.begins:
            await self._wait(receive)
        await send({"type": "http.response.body", "body": BODY[1], "more_body": False})

    async def _wait(self, receive: Any) -> None:
        left = asyncio.create_task(receive())
        goes_on = asyncio.create_task(self.go_on.wait())
        self.waits.set()
        await asyncio.wait([left, goes_on], return_when=asyncio.FIRST_COMPLETED)
        if left.done():
            assert left.result()["type"] == "http.disconnect"
            self.gone.set()
        left.cancel()


@asynccontextmanager
async def served(app: Silent) -> AsyncIterator[int]:
    config = uvicorn.Config(
        app, http=BoundedHttp, ws="none", lifespan="off", log_config=None, port=0
    )
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    yield server.servers[0].sockets[0].getsockname()[1]
    await server.shutdown()


EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
SOUND = [(b"content-type", b"audio/wav")]
SILENCES = {
    "before an answer": ("1.1", EVENTS, False),
    "between events": ("1.1", EVENTS, True),
    "between pieces of sound": ("1.1", SOUND, True),
    "between events to HTTP/1.0": ("1.0", EVENTS, True),
}


async def asked(app: Silent, port: int, version: str) -> tuple[Any, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET / HTTP/{version}\r\nhost: x\r\n\r\n".encode())
    await app.waits.wait()
    return reader, writer


@pytest.mark.parametrize("silence", SILENCES)
async def test_a_reader_that_closes_in_a_silence_is_noticed(silence: str) -> None:
    version, headers, begins = SILENCES[silence]
    app = Silent(headers, begins=begins)
    async with asyncio.timeout(30), served(app) as port:
        reader, writer = await asked(app, port, version)
        if begins:
            # All that there is has been read: closing sends a FIN, and no reset.
            await reader.readuntil(BODY[0])
            if version == "1.1":
                assert await reader.readexactly(2) == b"\r\n"
        writer.close()
        await app.gone.wait()


@pytest.mark.parametrize("silence", SILENCES)
async def test_a_reader_that_only_sends_no_more_gets_the_whole_answer(silence: str) -> None:
    version, headers, begins = SILENCES[silence]
    app = Silent(headers, begins=begins)
    async with asyncio.timeout(30), served(app) as port:
        reader, writer = await asked(app, port, version)
        writer.write_eof()
        await asyncio.sleep(0.3)  # so that it has been looked for
        assert not app.gone.is_set()
        app.go_on.set()
        data = await reader.read()
        writer.close()
    if version == "1.0":
        assert data.partition(b"\r\n\r\n")[2].replace(b":\n\n", b"") == b"".join(BODY)
        return
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(data)
    parts = []
    while not isinstance(event := client.next_event(), h11.EndOfMessage):
        assert event is not h11.NEED_DATA
        if isinstance(event, h11.Data):
            parts.append(bytes(event.data))
    assert b"".join(parts) == b"".join(BODY)
