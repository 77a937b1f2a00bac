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
from inlay.errors import InlayError, NotFoundError
from inlay.http import openapi
from inlay.http.asgi import Message, Receive, Scope, Send, check_transfer, declared_length, header
from inlay.http.bodies.accounting import Reservation
from inlay.http.bodies.body import discard_body
from inlay.http.callers.access import caller_of, timeout_of
from inlay.http.cors import Cors
from inlay.http.errors import (
    BodyTimeoutError,
    ClientGone,
    ErrorForm,
    MethodNotAllowedError,
    error_headers,
    error_json,
    internal_error,
)
from inlay.http.openapi import Notes, Operation
from inlay.http.request_log import begin_span, log_request
from inlay.http.server import Call, Server

Handler: TypeAlias = Callable[[Call], Awaitable[None]]
Routes: TypeAlias = Sequence[tuple[Operation, Handler]]

_log = logging.getLogger(__name__)
_request_id = re.compile(rb"[\x21-\x7e]{1,128}")
_NO_SNIFF = (b"x-content-type-options", b"nosniff")
_KEPT_ALIVE = 64 * 1024
"""Bytes of a refused body that are read to keep the connection; a longer body closes it."""


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
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        found = self.operations.get(method)
        if found is None:
            raise MethodNotAllowedError(scope["method"], scope["path"], frozenset(self.operations))
        return found

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call: Call = scope["inlay.call"]
        call.answers_with(self.errors)
        operation, handler = self.find(scope)
        scope["inlay.route"] = self.path
        call.parameters = operation.query
        server = call.server
        call.quiet = operation.open
        if server.tracing is not None and not operation.open:
            begin_span(call, self.path)
        call.caller = caller_of(server.keys, server.settings, operation, scope)
        if operation.method == "GET" or operation.admin or operation.open:
            await handler(call)
            return
        call.timeout = timeout_of(scope["headers"], server.settings)
        peer = scope.get("client")
        client = call.reservation.client = server.clients.of(call.caller, peer[0] if peer else "")
        with client, server.inflight, call.reservation, call.ending:
            await _in_time(call, handler)


async def _in_time(call: Call, handler: Handler) -> None:
    """Run `handler`. Raises `DeadlineExceededError` if the call's time is up before it answers."""
    call.clock = asyncio.timeout(call.remaining)
    try:
        async with call.clock:
            await handler(call)
    except TimeoutError as error:
        if call.clock.expired():
            raise call.too_late() from error
        raise


def _paths(routes: Routes) -> list[Route]:
    endpoints: dict[str, _Endpoint] = {}
    for operation, handler in routes:
        endpoint = endpoints.setdefault(operation.path, _Endpoint(operation.path))
        endpoint.operations[operation.method] = (operation, handler)
    # A model's name may hold slashes.
    return [
        Route(path.replace("{id}", "{id:path}"), endpoint) for path, endpoint in endpoints.items()
    ]


def _document(routes: Routes, notes: Notes) -> bytes:
    """Return the OpenAPI document of `routes`."""
    operations = (*(operation for operation, _ in routes), _DESCRIPTION)
    return msgspec.json.encode(openapi.describe(operations, inlay.__version__, notes))


class App:
    """ASGI app of a frontend, made by `inlay.api.build_app`.

    It also serves `/openapi.json`, the description of its routes.

    Args:
        server: state that its endpoints share.
        routes: operations and what answers them.
        notes: of the description.

    Attributes:
        server: state that its endpoints share.
    """

    def __init__(self, server: Server, routes: Routes, notes: Notes) -> None:
        self.server = server
        self._document = cache(partial(_document, routes, notes))
        self._cors = Cors(server.settings.allowed_origins)
        self._paths = _paths((*routes, (_DESCRIPTION, self._openapi)))
        self._route = PathRouter(self._paths, redirect_slashes=False, default=self._no_route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request; see the ASGI specification. Other scopes are ignored."""
        if scope["type"] == "http":
            await self._answer(scope, receive, send)

    async def _openapi(self, call: Call) -> None:
        await call.bytes(self._document(), (b"content-type", b"application/json"))

    async def _no_route(self, scope: Scope, receive: Receive, send: Send) -> None:
        meant = "/v1" + scope["path"].removeprefix(scope.get("root_path", ""))
        hint = ""
        if any(path.path_regex.match(meant) for path in self._paths):
            hint = f": did you mean {meant}? A base_url ends in /v1"
        raise NotFoundError(f"{scope['method']} {scope['path']} does not exist{hint}")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        server = self.server
        given = header(scope["headers"], b"x-request-id")
        named = given is not None and _request_id.fullmatch(given) is not None
        request_id = given if named and given is not None else uuid.uuid4().hex.encode()
        added = [(b"x-request-id", request_id), _NO_SNIFF, *self._cors.headers(scope["headers"])]
        status = 0

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        preflight = self._cors.preflight(scope["method"], scope["headers"])
        if preflight is not None:
            await tagged({"type": "http.response.start", "status": 204, "headers": preflight})
            await tagged({"type": "http.response.body", "body": b""})
            return
        call = Call(
            server, scope, receive, tagged, request_id.decode(), Reservation(server.budget), added
        )
        scope["inlay.call"] = call
        failed: BaseException | None = None
        try:
            check_transfer(scope["headers"])
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
            route = scope.get("inlay.route", "other")
            if not isinstance(failed, ClientGone):
                server.metrics.answered(route, status)
            log_request(call, route, status, failed or call.failed)
            # An error holds the frames it passed through, with the request's memory. Kept here,
            # they would live, uncounted, until the garbage collector finds them.
            failed = call.failed = None


async def _refuse(call: Call, error: InlayError) -> None:
    """Answer with an error, and read the rest of the body so that the client sees the answer."""
    headers = call.scope["headers"]
    body = error_json(error, call.errors, call.request_id)
    own = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *error_headers(error),
    ]
    declared = declared_length(headers)
    unread = not call.body_read and (declared or header(headers, b"transfer-encoding") is not None)
    slow = isinstance(error, BodyTimeoutError)
    if unread and (declared is None or declared > _KEPT_ALIVE or slow):
        own.append((b"connection", b"close"))
    await call.send({"type": "http.response.start", "status": error.status, "headers": own})
    await call.send({"type": "http.response.body", "body": body, "more_body": bool(unread)})
    if unread:
        if not slow:
            await discard_body(call.receive)
        await call.send({"type": "http.response.body", "body": b""})
