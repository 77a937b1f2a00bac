"""Authorisation of operations, request timeouts and session names."""

import math

from inlay.errors import InvalidRequestError, PermissionDeniedError
from inlay.frontend.bodies.body import Headers, Scope, header
from inlay.frontend.callers.auth import ANYONE, Caller
from inlay.frontend.openapi import Operation
from inlay.frontend.server import Server
from inlay.frontend.settings import FrontendSettings

ADMIN_PORT = "inlay.admin_port"
"""Key in the ASGI scope of a request that came through the admin port."""

TIMEOUT_HEADER = b"x-request-timeout"
SESSION_HEADER = b"x-session-id"

_MAX_SESSION = 512
"""Maximum characters of a session's name."""


def caller_of(server: Server, operation: Operation, scope: Scope) -> Caller:
    """Return the caller of `operation`.

    Raises:
        AuthenticationError: a key is required, and it is missing, wrong or expired.
        PermissionDeniedError: an admin operation, and the caller is not an admin.
    """
    if not is_admin(operation, server.settings):
        return (
            ANYONE
            if operation.open
            else server.keys.check(header(scope["headers"], b"authorization"))
        )
    if scope.get(ADMIN_PORT, False):
        _check_no_page(scope["headers"])
        return ANYONE
    if not server.keys.required:
        if server.settings.admin_port is not None:
            raise PermissionDeniedError(
                f"{operation.path} is for admins: ask at the server's admin port"
            )
        raise PermissionDeniedError(
            f"{operation.path} is for admins, and this server has none: start it with "
            "--admin-port, --admin-api-key, or an admin key in --api-key-file"
        )
    caller = server.keys.check(header(scope["headers"], b"authorization"))
    if not caller.admin:
        raise PermissionDeniedError(
            f"{operation.path} is for admins; the API key may not use it. It takes an admin key, "
            "or the admin port"
        )
    return caller


def is_admin(operation: Operation, settings: FrontendSettings) -> bool:
    """Return True if an operation is for admins only."""
    if operation.path in ("/metrics", "/load"):
        return not settings.metrics_public
    if operation.path == "/tokenizer_info":
        return not settings.enable_tokenizer_info_endpoint
    return operation.admin


def _check_no_page(headers: Headers) -> None:
    # The admin port needs no key, so any web page open in a browser on this machine could use it.
    # Browsers send one of these headers with every request that has an effect; tools send neither.
    if header(headers, b"origin") is not None or header(headers, b"sec-fetch-site") not in (
        None, b"none", b"same-origin",
    ):  # fmt: skip
        raise PermissionDeniedError("web pages may not use the admin port")


def timeout_of(headers: Headers, settings: FrontendSettings) -> float | None:
    """Seconds a request may take: the client's value, bounded by the server's.

    Raises:
        InvalidRequestError: the header is not a number of seconds.
    """
    bound = settings.request_timeout
    value = header(headers, TIMEOUT_HEADER)
    if value is None:
        return bound
    try:
        asked = float(value)
    except ValueError:
        asked = math.nan
    if not (0 < asked < math.inf):
        raise InvalidRequestError(
            "X-Request-Timeout must be a number of seconds, more than 0, got "
            f"{value[:40].decode('latin-1')!r}",
            param="X-Request-Timeout",
        )
    return asked if bound is None else min(asked, bound)


def session_of(
    headers: Headers, session_id: str | None, prompt_cache_key: str | None, tenant: str
) -> str | None:
    """Name of a request's session, prefixed by its tenant; None if the request names none.

    Fields of the body take precedence over the header.

    Raises:
        InvalidRequestError: the name is empty or too long.
    """
    named, param = session_id, "session_id"
    if named is None:
        named, param = prompt_cache_key, "prompt_cache_key"
    if named is None:
        value = header(headers, SESSION_HEADER)
        if value is None:
            return None
        named, param = value.decode("latin-1"), "X-Session-Id"
    if not 0 < len(named) <= _MAX_SESSION:
        raise InvalidRequestError(
            f"{param} must have 1 to {_MAX_SESSION} characters, got {len(named)}", param=param
        )
    return f"{tenant}/{named}"
