"""Reading a request's body within its size limit, the memory budget and a time limit."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from inlay import liveness
from inlay.errors import BodyTooLargeError
from inlay.http.asgi import Receive
from inlay.http.bodies.accounting import RequestMemory
from inlay.http.bodies.base64_extractor import RUN, Base64Extractor, ExtractedBody
from inlay.http.bodies.memory import Room, private
from inlay.http.errors import BodyTimeoutError, ClientGone
from inlay.http.server import Call
from inlay.http.settings import FrontendSettings

MIN_RATE = 64 * 1024
"""Minimum average bytes a second of a body, so that slow senders cannot hold the budget."""

_WHOLE_FROM = 64 * 1024
"""Bytes of a body from which it is read directly from its connection."""

LINGER = 2.0
"""Seconds a refused body is read and dropped, so that its sender sees the answer."""


async def receive_body(
    call: Call, *, check: Callable[[int], None], take: Callable[[bytes], None]
) -> None:
    """Pass on a body as it arrives; the bytes received, or declared, are reserved.

    Args:
        call: the HTTP request.
        check: called with the known minimum size, first that of Content-Length; raises if it is
            too large.
        take: called with each piece.

    Raises:
        OverloadedError: the memory budget is used up.
        BodyTimeoutError: the body arrives too slowly.
        ClientGone: the client left.
    """
    if call.declared is not None:
        check(call.declared)
        call.reservation.grow_to(call.declared)
    size = 0
    async with _in_time(call) as progress:
        while True:
            message = await call.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk: bytes = message.get("body", b"")
            if chunk:
                size += len(chunk)
                check(size)
                call.reservation.grow_to(size)
                take(chunk)
            if not message.get("more_body", False):
                break
            progress(size)
    _received(call)


@asynccontextmanager
async def _in_time(call: Call) -> AsyncIterator[Callable[[int], None]]:
    """Yield a callback for the number of bytes received so far.

    Raises `BodyTimeoutError` if they are too few for the time.
    """
    began = liveness.now()
    size, most = 0, call.server.settings.body_timeout
    try:
        async with liveness.timeout(most) as timer:

            def progress(came: int) -> None:
                nonlocal size
                size = came
                allowed = began + most + size / MIN_RATE
                timer.reset(min(most, allowed - liveness.now()))

            yield progress
    except TimeoutError as error:
        raise BodyTimeoutError(
            f"the body came too slowly: {size} bytes in {liveness.now() - began:.0f} s"
            + ("" if call.declared is None else f" of {call.declared}")
        ) from error


def _received(call: Call) -> None:
    """Note that nothing of the body is left, and begin to account for what is made of it."""
    call.body_read = True
    call.memory = RequestMemory(call.reservation, call.server.limits)


async def read_pieces(call: Call, *, take: Callable[[bytes | memoryview], None]) -> None:
    """Pass on a body as it arrives; a large one of known length directly from the socket.

    Arguments and errors as `receive_body`; the memory of a piece is reused afterwards.

    Raises `BodyTooLargeError`: it is over the limit of bodies.
    """
    check, declared = body_limit(call.server.settings), call.declared
    exchange = call.exchange
    arrived = None if exchange is None else exchange.arrived()
    if arrived is not None:
        check(len(arrived))
        call.reservation.grow_to(len(arrived))
        if arrived:
            take(arrived)
    elif exchange is None or declared is None or declared < _WHOLE_FROM:
        await receive_body(call, check=check, take=take)
        return
    else:
        check(declared)
        call.reservation.grow_to(declared)
        async with _in_time(call) as progress:
            await exchange.stream(declared, take, progress)
    _received(call)


async def read_body(call: Call, room: Room = private) -> ExtractedBody:
    """Read a JSON body; its large base64 strings are decoded into `room` as they arrive.

    Raises:
        BodyTooLargeError: over the limit, by Content-Length before anything is read; or too much
            JSON text.
        OverloadedError, BodyTimeoutError, ClientGone: as `receive_body`.
    """
    if call.declared is not None and call.declared < RUN:
        # No string in it is long enough to be extracted.
        text = bytearray()
        await read_pieces(call, take=text.extend)
        body = ExtractedBody([text], len(text))
    else:
        extractor = Base64Extractor(call.declared, room, call.server.limits.check_json)
        await read_pieces(call, take=extractor.feed)
        body = extractor.close()
    call.server.metrics.body_read(call.route, body.size)
    return body


async def read_whole(call: Call, check: Callable[[int], None]) -> memoryview | None:
    """Read a whole body directly into one piece of memory.

    None if it is small, of unknown length, or the HTTP server does not support it. Arguments and
    errors as `receive_body`.
    """
    declared, exchange = call.declared, call.exchange
    if exchange is None or declared is None or declared < _WHOLE_FROM:
        return None
    check(declared)
    call.reservation.grow_to(declared)
    whole = private(declared)
    async with _in_time(call) as progress:
        await exchange.fill(whole, progress)
    _received(call)
    return whole


def body_limit(settings: FrontendSettings) -> Callable[[int], None]:
    """Return a function that raises `BodyTooLargeError` for sizes over the limit of bodies."""

    def check(size: int) -> None:
        if size > settings.max_body_bytes:
            raise BodyTooLargeError(
                f"the body of {size} bytes is over the limit of {settings.max_body_bytes} bytes"
            )

    return check


async def discard_body(receive: Receive) -> None:
    """Read and drop the rest of a body for at most `LINGER` s.

    A connection closed with unread data is reset, and its client would not see the answer.
    """
    try:
        async with asyncio.timeout(LINGER):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return
