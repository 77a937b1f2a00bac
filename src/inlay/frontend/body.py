"""Reading a request's body: within a limit, within the budget, within time."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, TypeAlias

from inlay.errors import BodyTooLargeError, UnsupportedMediaTypeError
from inlay.frontend.admission import Reservation
from inlay.frontend.errors import BodyTimeoutError, ClientGone
from inlay.frontend.settings import FrontendSettings

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Headers: TypeAlias = Iterable[tuple[bytes, bytes]]

MIN_RATE = 64 * 1024
"""Bytes a second a body must keep up in the long run, so that a trickle cannot hold the budget."""

LINGER = 2.0
"""Seconds a refused body is read on and thrown away, so that its sender gets to see the answer."""


def header(headers: Headers, name: bytes) -> bytes | None:
    """The first header called `name` (lower case)."""
    for key, value in headers:
        if key == name:
            return value
    return None


def check_media(headers: Headers) -> None:
    """Raise `UnsupportedMediaTypeError` unless the body is JSON as it is."""
    encoding = header(headers, b"content-encoding")
    if encoding is not None and encoding.strip().lower() not in (b"", b"identity"):
        raise UnsupportedMediaTypeError(
            f"content-encoding {encoding.decode('latin-1')!r} is not supported; send the body as it is (identity)"
        )
    media = header(headers, b"content-type")
    if media is None:
        return
    kind = media.split(b";", 1)[0].strip().lower()
    if kind and kind != b"application/json" and not kind.endswith(b"+json"):
        raise UnsupportedMediaTypeError(
            f"content-type {media.decode('latin-1')!r} is not supported; send application/json"
        )


def declared_length(headers: Headers) -> int | None:
    """`Content-Length`, or None when the body is chunked."""
    value = header(headers, b"content-length")
    return int(value) if value is not None and value.isdigit() else None


async def read_body(
    scope: Scope, receive: Receive, settings: FrontendSettings, reservation: Reservation
) -> bytes | bytearray:
    """The whole body of a request.

    Raises:
        BodyTooLargeError: over the limit; told from Content-Length before anything is read.
        UnsupportedMediaTypeError: not JSON, or compressed.
        OverloadedError: the budget for bodies is used up.
        BodyTimeoutError: it comes too slowly.
        ClientGone: the client left.
    """
    headers: Headers = scope["headers"]
    check_media(headers)
    declared = declared_length(headers)
    limit = settings.max_body_bytes
    if declared is not None:
        if declared > limit:
            raise _too_large(declared, limit)
        reservation.grow_to(declared)
    loop = asyncio.get_running_loop()
    began = loop.time()
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout) as clock:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk: bytes = message.get("body", b"")
                more: bool = message.get("more_body", False)
                if not more and not body:
                    body_size = len(chunk)
                    if body_size > limit:
                        raise _too_large(body_size, limit)
                    reservation.grow_to(body_size)
                    return chunk
                body += chunk
                if len(body) > limit:
                    raise _too_large(len(body), limit)
                reservation.grow_to(len(body))
                if not more:
                    return body
                allowed = began + settings.body_timeout + len(body) / MIN_RATE
                clock.reschedule(min(loop.time() + settings.body_timeout, allowed))
    except TimeoutError as error:
        raise BodyTimeoutError(
            f"the body came too slowly: {len(body)} bytes in {loop.time() - began:.0f} s"
            + ("" if declared is None else f" of {declared}")
        ) from error


def _too_large(size: int, limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the body of {size} bytes is over the limit of {limit} bytes")


async def discard_body(receive: Receive) -> None:
    """Read and drop what is left of a body for at most `LINGER` s.

    A connection closed on unread data is reset, and its client never sees why.
    """
    try:
        async with asyncio.timeout(LINGER):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return
