"""ASGI app: routing, authentication, and errors as responses."""

import asyncio
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import cache, partial
from typing import TypeAlias

import msgspec
from starlette.routing import Route
from starlette.routing import Router as PathRouter

import inlay
from inlay.base.errors import InlayError, NotFoundError
from inlay.http import openapi
from inlay.http.asgi import Message, Receive, Scope, Send
from inlay.http.bodies.accounting import Reservation
from inlay.http.bodies.connection import EXTENSION, Exchange
from inlay.http.bounded_http import (
    LONG_TARGET,
    MANY_HEADERS,
    MAX_HEADERS,
    MAX_TARGET,
    HeadTooLargeError,
)
from inlay.http.cors import Cors
from inlay.http.errors import (
    OPENAI,
    BodyTimeoutError,
    ClientGone,
    ErrorForm,
    MethodNotAllowedError,
    TransferCodingError,
    error_headers,
    error_json,
    internal_error,
)
from inlay.http.openapi import Operation, Refused
from inlay.http.request_log import begin_span, log_request
from inlay.http.server import Call, Server, preparing_for

Handler: TypeAlias = Callable[[Call], Awaitable[None]]
Routes: TypeAlias = Sequence[tuple[Operation, Handler]]

_log = logging.getLogger(__name__)
_request_id = re.compile(rb"[\x21-\x7e]{1,128}")
_NO_SNIFF = (b"x-content-type-options", b"nosniff")
_PIECE = 256 * 1024
"""Bytes of an answer that are written at a time."""

_KEPT_ALIVE = 64 * 1024
"""Bytes of a refused body that are read to keep the connection; a longer body closes it."""

_PREFIX_PARTS = 4
"""Parts at the beginning of an unknown path that may be a proxy's prefix."""

_LINGER = 2.0
"""Seconds a refused body is read and dropped, so that its sender sees the answer."""


_DESCRIPTION = Operation("GET", "/openapi.json", "OpenAPI description.", open=True)


class _Endpoint:
    """The handlers of one path, by method."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.operations: dict[str, tuple[Operation, Handler]] = {}

    @property
    def errors(self) -> ErrorForm:
        """Form of the errors of all its methods."""
        return next(iter(self.operations.values()))[0].errors

    def find(self, scope: Scope) -> tuple[Operation, Handler]:
        """Return the operation of a method, and its handler."""
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        found = self.operations.get(method)
        if found is None:
            raise MethodNotAllowedError(scope["method"], scope["path"], frozenset(self.operations))
        return found

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call: Call = scope["inlay.call"]
        if self.errors is not OPENAI:
            call.answers_with(self.errors)
        operation, handler = self.find(scope)
        call.route = self.path
        server = call.server
        call.quiet = operation.open
        if server.tracing is not None and not operation.open:
            begin_span(call)
        call.caller = server.keys.caller_of(operation, scope, call.headers)
        if operation.method == "GET" or operation.admin or operation.open:
            with call.reservation:
                await handler(call)
            return
        clock = call.start_clock()
        peer = scope.get("client")
        client = call.reservation.client = server.clients.of(call.caller, peer[0] if peer else "")
        preparing_for.set(call.reservation)
        with client, server.inflight, call.reservation, call.ending:
            try:
                async with clock:
                    await handler(call)
            except TimeoutError as error:
                if clock.expired():
                    raise call.too_late() from error
                raise


def _paths(routes: Routes) -> list[Route]:
    endpoints: dict[str, _Endpoint] = {}
    for operation, handler in routes:
        endpoint = endpoints.setdefault(operation.path, _Endpoint(operation.path))
        endpoint.operations[operation.method] = operation, handler
    # A model's name may hold slashes.
    return [
        Route(path.replace("{id}", "{id:path}"), endpoint) for path, endpoint in endpoints.items()
    ]


def _document(routes: Routes, refused: Refused, root_path: str) -> bytes:
    """Return the OpenAPI document of `routes`."""
    operations = (*(operation for operation, _ in routes), _DESCRIPTION)
    return msgspec.json.encode(openapi.describe(operations, inlay.__version__, refused, root_path))


class App:
    """ASGI app of a frontend, made by `inlay.api.build_app`.

    It also serves `/openapi.json`, the description of its routes.

    Attributes:
        server: state that its endpoints share.
    """

    def __init__(self, server: Server, routes: Routes, refused: Refused) -> None:
        self.server = server
        self._document = cache(partial(_document, routes, refused, server.settings.root_path))
        origins = server.settings.allowed_origins
        self._cors = Cors(origins) if origins else None
        self._paths = _paths((*routes, (_DESCRIPTION, self._openapi)))
        self._route = PathRouter(self._paths, redirect_slashes=False, default=self._no_route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request; see the ASGI specification. Other scopes are ignored."""
        if scope["type"] == "http":
            await self._answer(scope, receive, send)

    async def _openapi(self, call: Call) -> None:
        await call.bytes(self._document(), (b"content-type", b"application/json"))

    async def _no_route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a path of no route; serve one whose prefix the proxy in front has kept."""
        root: str = scope.get("root_path", "")
        path: str = scope["path"].removeprefix(root)  # as it came: the prefix is put before it
        if root and path.startswith(f"{root}/"):
            scope["path"], path = path, path.removeprefix(root)
            if self._is_route(path):
                await self._route(scope, receive, send)
                return
        raise NotFoundError(f"{scope['method']} {path} does not exist{self._hint(path)}")

    def _hint(self, path: str) -> str:
        """Return what to do about a path of no route, where something near it is one."""
        if self._is_route(f"/v1{path}"):
            return f": did you mean /v1{path}? A base_url ends in /v1"
        at = 0
        for _ in range(_PREFIX_PARTS):
            at = path.find("/", at + 1)
            if at < 0:
                break
            prefix, rest = path[:at], path[at:]
            if rest != "/" and self._is_route(rest):
                proxy = f" If a proxy keeps {prefix}, start the server with --root-path {prefix}"
                return f": did you mean {rest}?" + ("" if prefix == "/v1" else proxy)
        return ""

    def _is_route(self, path: str) -> bool:
        return any(one.path_regex.match(path) for one in self._paths)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        server = self.server
        exchange: Exchange | None = scope.get("extensions", {}).get(EXTENSION)
        if exchange is not None and scope["http_version"] == "1.0":
            send = exchange.until_close(send)
        headers = dict(reversed(scope["headers"]))
        request_id = headers.get(b"x-request-id", b"")
        if _request_id.fullmatch(request_id) is None:
            request_id = uuid.uuid4().hex.encode()
        added = [(b"x-request-id", request_id), _NO_SNIFF]
        preflight = None
        if self._cors is not None:
            added += self._cors.headers(headers)
            preflight = self._cors.preflight(scope["method"], headers)
        status = 0

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *added]
            await _send_in_pieces(send, message)

        if preflight is not None:
            await tagged({"type": "http.response.start", "status": 204, "headers": preflight})
            await tagged({"type": "http.response.body", "body": b""})
            return
        length = headers.get(b"content-length", b"")
        call = Call(
            server,
            scope,
            receive,
            tagged,
            request_id.decode(),
            Reservation(server.budget),
            headers,
            added,
            int(length) if length.isdigit() else None,
            exchange,
        )
        scope["inlay.call"] = call
        failed: BaseException | None = None
        try:
            _check_head(scope)
            await self._route(scope, receive, tagged)
        except ClientGone as error:
            failed = error
            server.metrics.left()
        except InlayError as error:
            failed = error
            server.metrics.failed(error)
            if status:
                raise  # the server cuts the connection: a body without its end is not whole
            await _refuse(call, error)
        except Exception as error:
            failed = error
            _log.exception("request %s to %s failed", call.request_id, scope["path"])
            if status:
                raise
            await _refuse(call, internal_error(call.request_id))
        finally:
            if not isinstance(failed, ClientGone):
                server.metrics.answered(call.route, status)
            log_request(call, status, failed or call.failed)
            # An error holds the frames it passed through, with the request's memory. Kept here,
            # they would live, uncounted, until the garbage collector finds them.
            failed = call.failed = None


async def _send_in_pieces(send: Send, message: Message) -> None:
    """Send a message, a long body in pieces.

    The server takes any size at once. Of a client that does not read its answer no more than a
    piece is then in the connection's buffer, and the request holds what is left.
    """
    body, more = message.get("body", b""), message.get("more_body", False)
    if len(body) <= _PIECE:
        await send(message)
        return
    for start in range(0, len(body), _PIECE):
        piece = body[start : start + _PIECE]
        await send({"type": message["type"], "body": piece, "more_body": True})
    if not more:
        await send({"type": message["type"], "body": b""})


def _check_head(scope: Scope) -> None:
    """Check a head that came whole in one piece, which the parser has let through.

    Raises:
        HeadTooLargeError: the path with its query is too long, or there are too many headers.
        TransferCodingError: a transfer coding other than chunked (RFC 9112, 6.1).
    """
    target = scope.get("raw_path", b"") + scope.get("query_string", b"")
    if len(target) > MAX_TARGET:
        raise HeadTooLargeError(LONG_TARGET)
    if len(scope["headers"]) > MAX_HEADERS:
        raise HeadTooLargeError(MANY_HEADERS)
    codings = [value for name, value in scope["headers"] if name == b"transfer-encoding"]
    if codings and [coding.strip().lower() for coding in codings] != [b"chunked"]:
        got = b", ".join(codings)[:80].decode("latin-1")
        raise TransferCodingError(
            f"transfer-encoding {got!r} is not supported; send the body as it is, or chunked"
        )


async def _refuse(call: Call, error: InlayError) -> None:
    """Answer with an error, and read the rest of the body so that the client sees the answer."""
    body = error_json(error, call.errors, call.request_id)
    own = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *error_headers(error),
    ]
    declared = call.declared
    unread = not call.body_read and (declared or b"transfer-encoding" in call.headers)
    slow = isinstance(error, BodyTimeoutError)
    if unread and (declared is None or declared > _KEPT_ALIVE or slow):
        own.append((b"connection", b"close"))
    await call.send({"type": "http.response.start", "status": error.status, "headers": own})
    await call.send({"type": "http.response.body", "body": body, "more_body": bool(unread)})
    if unread:
        if not slow:
            await _discard_body(call.receive)
        await call.send({"type": "http.response.body", "body": b""})


async def _discard_body(receive: Receive) -> None:
    """Read and drop the rest of a body for at most `_LINGER` s.

    A connection closed with unread data is reset, and its client would not see the answer.
    """
    try:
        async with asyncio.timeout(_LINGER):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return
