"""Reading a request's body within its size limit, the memory budget and a time limit."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from inlay import liveness
from inlay.errors import BodyTooLargeError
from inlay.http.asgi import Receive, Scope, declared_length
from inlay.http.bodies.accounting import EmbedsLimits, Reservation
from inlay.http.bodies.base64_extractor import Base64Extractor, ExtractedBody
from inlay.http.bodies.connection import EXTENSION, Exchange
from inlay.http.bodies.memory import Room, private
from inlay.http.errors import BodyTimeoutError, ClientGone
from inlay.http.settings import FrontendSettings

MIN_RATE = 64 * 1024
"""Minimum average bytes a second of a body, so that slow senders cannot hold the budget."""

_WHOLE_FROM = 64 * 1024
"""Bytes of a body from which it is read directly from its connection."""

LINGER = 2.0
"""Seconds a refused body is read and dropped, so that its sender sees the answer."""


async def receive_body(
    scope: Scope,
    receive: Receive,
    settings: FrontendSettings,
    reservation: Reservation,
    *,
    check: Callable[[int], None],
    take: Callable[[bytes], None],
) -> None:
    """Pass on a body as it arrives.

    Args:
        scope: of the request.
        receive: of the request.
        settings: of the frontend.
        reservation: reserves the bytes received, or those that Content-Length declares.
        check: called with the known minimum size, first that of Content-Length; raises if it is
            too large.
        take: called with each piece.

    Raises:
        OverloadedError: the memory budget is used up.
        BodyTimeoutError: the body arrives too slowly.
        ClientGone: the client left.
    """
    declared = declared_length(scope["headers"])
    if declared is not None:
        check(declared)
        reservation.grow_to(declared)
    size = 0
    async with _in_time(settings, declared) as progress:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk: bytes = message.get("body", b"")
            if chunk:
                size += len(chunk)
                check(size)
                reservation.grow_to(size)
                take(chunk)
            if not message.get("more_body", False):
                return
            progress(size)


@asynccontextmanager
async def _in_time(
    settings: FrontendSettings, declared: int | None
) -> AsyncIterator[Callable[[int], None]]:
    """Yield a callback for the number of bytes received so far.

    Raises `BodyTimeoutError` if they are too few for the time.
    """
    began = liveness.now()
    size = 0
    try:
        async with liveness.timeout(settings.body_timeout) as timer:

            def progress(came: int) -> None:
                nonlocal size
                size = came
                allowed = began + settings.body_timeout + size / MIN_RATE
                timer.reset(min(settings.body_timeout, allowed - liveness.now()))

            yield progress
    except TimeoutError as error:
        raise BodyTimeoutError(
            f"the body came too slowly: {size} bytes in {liveness.now() - began:.0f} s"
            + ("" if declared is None else f" of {declared}")
        ) from error


async def read_pieces(
    scope: Scope,
    receive: Receive,
    settings: FrontendSettings,
    reservation: Reservation,
    *,
    check: Callable[[int], None],
    take: Callable[[bytes | memoryview], None],
) -> None:
    """Pass on a body as it arrives; a large one of known length directly from the socket.

    Arguments and errors as `receive_body`; the memory of a piece is reused afterwards.
    """
    exchange = exchange_of(scope)
    arrived = None if exchange is None else exchange.arrived()
    if arrived is not None:
        check(len(arrived))
        reservation.grow_to(len(arrived))
        if arrived:
            take(arrived)
        return
    declared = declared_length(scope["headers"])
    source = _source(scope, declared)
    if source is None or declared is None:
        await receive_body(scope, receive, settings, reservation, check=check, take=take)
        return
    check(declared)
    reservation.grow_to(declared)
    async with _in_time(settings, declared) as progress:
        await source.stream(declared, take, progress)


async def read_body(
    scope: Scope,
    receive: Receive,
    settings: FrontendSettings,
    reservation: Reservation,
    limits: EmbedsLimits,
    room: Room = private,
) -> ExtractedBody:
    """Read a JSON body; its large base64 strings are decoded into `room` as they arrive.

    Raises:
        BodyTooLargeError: over the limit, by Content-Length before anything is read; or too much
            JSON text.
        OverloadedError, BodyTimeoutError, ClientGone: as `receive_body`.
    """
    lift = Base64Extractor(declared_length(scope["headers"]), room, limits.check_json)
    await read_pieces(
        scope, receive, settings, reservation, check=body_limit(settings), take=lift.feed
    )
    return lift.close()


async def read_whole(
    scope: Scope, settings: FrontendSettings, reservation: Reservation, check: Callable[[int], None]
) -> memoryview | None:
    """Read a whole body directly into one piece of memory.

    None if it is small, of unknown length, or the HTTP server does not support it. Arguments and
    errors as `receive_body`.
    """
    declared = declared_length(scope["headers"])
    source = _source(scope, declared)
    if source is None or declared is None:
        return None
    check(declared)
    reservation.grow_to(declared)
    whole = private(declared)
    async with _in_time(settings, declared) as progress:
        await source.fill(whole, progress)
    return whole


def exchange_of(scope: Scope) -> Exchange | None:
    """Return the connection's side of a request, if the HTTP server is this one."""
    exchange = scope.get("extensions", {}).get(EXTENSION)
    return exchange if isinstance(exchange, Exchange) else None


def _source(scope: Scope, declared: int | None) -> Exchange | None:
    return exchange_of(scope) if declared is not None and declared >= _WHOLE_FROM else None


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
