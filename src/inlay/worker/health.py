"""The health port of `inlay worker`: what a supervisor asks whether the process is frozen.

    GET /live     200 while the process runs its event loop; busy engines are elsewhere
    GET /ready    200 once all its engines take requests, else 503

An engine's process that stands still is ended by this process itself; a port that the kernel opens
says nothing of either.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from inlay.base.errors import InvalidRequestError

_REQUEST_BYTES = 8192
_SECONDS = 5.0
_MAX_CONNECTIONS = 32
"""Questions answered at a time; further ones are closed unanswered."""


@asynccontextmanager
async def health_port(host: str, port: int | None, ready: Callable[[], bool]) -> AsyncIterator[int]:
    """Answer on `host` and `port` until the block ends; yields the port, 0 without one.

    Args:
        host: address to listen on.
        port: 0 for a free one; None for none at all.
        ready: returns True if requests are taken.

    Raises:
        InvalidRequestError: the port cannot be opened.
    """
    if port is None:
        yield 0
        return
    slots = asyncio.Semaphore(_MAX_CONNECTIONS)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(
            OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError
        ):
            if not slots.locked():
                async with slots, asyncio.timeout(_SECONDS):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(_response(head.split(b" ")[:2], ready()))
                    await writer.drain()
        writer.close()

    try:
        server = await asyncio.start_server(answer, host, port, limit=_REQUEST_BYTES)
    except OSError as error:
        raise InvalidRequestError(
            f"cannot listen on {host}:{port} for --health-port: {error.strerror or error}"
        ) from error
    async with server:
        yield server.sockets[0].getsockname()[1]


def _response(asked: list[bytes], ready: bool) -> bytes:
    match asked:
        case [b"GET", b"/live"]:
            status, text = b"200 OK", b"live"
        case [b"GET", b"/ready"] if ready:
            status, text = b"200 OK", b"ready"
        case [b"GET", b"/ready"]:
            status, text = b"503 Service Unavailable", b"not ready"
        case _:
            status, text = b"404 Not Found", b"/live and /ready are served"
    head = b"HTTP/1.1 %b\r\ncontent-type: text/plain\r\ncontent-length: %d\r\nconnection: close"
    return head % (status, len(text)) + b"\r\n\r\n" + text
