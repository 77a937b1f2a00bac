"""Reading a request's body within its size limit, the memory budget and a time limit."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeAlias

from inlay import liveness
from inlay.errors import BodyTooLargeError, UnsupportedMediaTypeError
from inlay.frontend.bodies.admission import Reservation
from inlay.frontend.bodies.base64_extractor import Base64Extractor, ExtractedBody
from inlay.frontend.bodies.connection import EXTENSION, BodySource
from inlay.frontend.bodies.limits import EmbedsLimits
from inlay.frontend.bodies.memory import Room, private
from inlay.frontend.errors import BodyTimeoutError, ClientGone, TransferCodingError
from inlay.frontend.settings import FrontendSettings

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Headers: TypeAlias = Iterable[tuple[bytes, bytes]]

MIN_RATE = 64 * 1024
"""Minimum average bytes a second of a body, so that slow senders cannot hold the budget."""

_WHOLE_FROM = 64 * 1024
"""Bytes of a body from which it is read directly from its connection."""

LINGER = 2.0
"""Seconds a refused body is read and dropped, so that its sender sees the answer."""


def header(headers: Headers, name: bytes) -> bytes | None:
    """Return the value of the first header `name` (lower case), or None."""
    for key, value in headers:
        if key == name:
            return value
    return None


class ContentType(NamedTuple):
    """Media type of a body.

    Attributes:
        kind: lower case, without parameters; "application/json" if the header is absent.
        parameters: by name in lower case.
    """

    kind: str
    parameters: dict[str, str]


JSON = "application/json"


def content_type_of(headers: Headers) -> ContentType:
    """Return the media type of a body.

    Raises:
        UnsupportedMediaTypeError: the body is compressed.
    """
    encoding = header(headers, b"content-encoding")
    if encoding is not None and encoding.strip().lower() not in (b"", b"identity"):
        raise UnsupportedMediaTypeError(
            f"content-encoding {encoding.decode('latin-1')!r} is not supported; send the body as "
            "it is (identity)"
        )
    value = (header(headers, b"content-type") or b"").decode("latin-1")
    kind, *rest = value.split(";")
    kind = kind.strip().lower() or JSON
    pairs = (item.partition("=") for item in rest)
    parameters = {name.strip().lower(): text.strip().strip('"') for name, _, text in pairs}
    return ContentType(JSON if kind.endswith("+json") else kind, parameters)


def check_transfer(headers: Headers) -> None:
    """Raise `TransferCodingError` for a transfer coding other than chunked (RFC 9112, 6.1)."""
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if codings and [coding.strip().lower() for coding in codings] != [b"chunked"]:
        got = b", ".join(codings)[:80].decode("latin-1")
        raise TransferCodingError(
            f"transfer-encoding {got!r} is not supported; send the body as it is, or chunked"
        )


def check_content_type(media: ContentType, *allowed: str) -> None:
    """Raise `UnsupportedMediaTypeError` unless `media` is one of `allowed`."""
    if media.kind not in allowed:
        raise UnsupportedMediaTypeError(
            f"content-type {media.kind!r} is not supported; send {' or '.join(allowed)}"
        )


def declared_length(headers: Headers) -> int | None:
    """Return `Content-Length`, or None if the body is chunked."""
    value = header(headers, b"content-length")
    return int(value) if value is not None and value.isdigit() else None


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
        UnsupportedMediaTypeError: not JSON, or compressed.
        OverloadedError, BodyTimeoutError, ClientGone: as `receive_body`.
    """
    check_content_type(content_type_of(scope["headers"]), JSON)
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


def _source(scope: Scope, declared: int | None) -> BodySource | None:
    source = scope.get("extensions", {}).get(EXTENSION)
    large = declared is not None and declared >= _WHOLE_FROM
    return source if large and isinstance(source, BodySource) else None


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
