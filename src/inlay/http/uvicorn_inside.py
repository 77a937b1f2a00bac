"""Names inside of uvicorn that inlay's connections override or read; none of them is its API.

A release that renames one would make an override dead in silence, and with it a limit that guards
the server. So they are looked for at every start.
"""

from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from inlay.base.errors import InvalidRequestError

TESTED = "0.54"
"""The minor release that these were read in; pyproject.toml allows no other."""

OVERRIDDEN = (
    "_start_asgi_task",
    "on_response_complete",
    "send_400_response",
    "timeout_keep_alive_handler",
)
"""Methods of the protocol that uvicorn itself must call; asyncio and httptools call the others."""

STATE = ("cycle", "flow", "headers", "loop", "parser", "pipeline", "scheme", "scope", "transport")
"""Attributes of the protocol."""

CYCLE = (
    "body",
    "chunked_encoding",
    "disconnected",
    "expected_content_length",
    "flow",
    "keep_alive",
    "message_event",
    "more_body",
    "response_complete",
    "response_started",
    "transport",
    "waiting_for_100_continue",
)
"""Attributes of a request and its answer."""

SERVER = ("startup", "capture_signals", "main_loop", "shutdown")
"""Methods of the server."""


def missing(
    protocol: type = HttpToolsProtocol,
    cycle: type = RequestResponseCycle,
    server: type = uvicorn.Server,
) -> list[str]:
    """Return the names that these classes of uvicorn do not have, or do not call."""
    called = {name for each in _functions(protocol) for name in each.__code__.co_names}
    state, of_cycle = (set(vars(each)["__init__"].__code__.co_names) for each in (protocol, cycle))
    return [
        *_lacks(protocol, OVERRIDDEN, called & set(vars(protocol))),
        *_lacks(protocol, STATE, state),
        *_lacks(cycle, CYCLE, of_cycle),
        *_lacks(server, SERVER, set(vars(server))),
    ]


def check() -> None:
    """Raise `InvalidRequestError` for a uvicorn whose inside is another."""
    if found := missing():
        raise InvalidRequestError(
            f"uvicorn {version('uvicorn')} has no {', '.join(found)}, which the limits of inlay's "
            f"HTTP server need; they were tested with {TESTED}: pip install 'uvicorn~={TESTED}.0'"
        )


def _functions(kind: type) -> Iterable[Callable[..., Any]]:
    return [each for each in vars(kind).values() if hasattr(each, "__code__")]


def _lacks(kind: type, names: Iterable[str], known: set[str]) -> list[str]:
    return [f"{kind.__name__}.{name}" for name in names if name not in known]
