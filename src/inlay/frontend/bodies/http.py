"""The HTTP/1.1 of one connection, bounded where uvicorn's is not: request lines, headers, trailers, and requests in a row."""

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from inlay import liveness
from inlay.errors import InlayError, InvalidRequestError
from inlay.frontend.bodies.connection import Connection
from inlay.frontend.errors import error_json

MAX_HEAD = 64 * 1024
"""Bytes of a request line and its headers, or of trailers, at most. What one read brings may be beyond it before it is seen."""

HEAD_TIMEOUT = 20.0
"""Seconds a head may take from its connection, or from its first byte on one that was kept, to its end."""

MAX_WAITING = 16
"""Requests that may wait on one connection for the one before them. No known client sends even one."""


class HeadTooLargeError(InlayError):
    """The request line and headers are over `MAX_HEAD`."""

    status = 431
    type = "invalid_request_error"


class HeadTimeoutError(InlayError):
    """The request line and headers did not come in time."""

    status = 408
    type = "timeout_error"


class BoundedHttp(Connection):
    """uvicorn's protocol, which closes connections that would otherwise take memory or stay half open without end.

    uvicorn has no limit for any of these, and they come before anyone has asked for a key.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unsettled = 0
        self._head_timer: liveness.Timer | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count what is neither body nor the end of anything: heads, chunk headers and trailers."""
        if self.transport.is_closing():
            return
        # Set back by the parser's callbacks, which say that something got done.
        self._unsettled += len(data)
        super().data_received(data)
        if self._unsettled > MAX_HEAD:
            self._give_up(HeadTooLargeError(f"the head of the request is over the limit of {MAX_HEAD} bytes"))
        elif len(self.pipeline) > MAX_WAITING:
            self._give_up(None)

    def on_message_begin(self) -> None:
        """Another request: its head is due."""
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._unsettled = 0
        self._head_came()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of the body; it has limits of its own."""
        self._unsettled = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is there."""
        self._unsettled = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP; uvicorn would answer in plain text."""
        self._give_up(InvalidRequestError(msg))

    def _await_head(self) -> None:
        if self._head_timer is None:
            late = HeadTimeoutError(f"the head of the request did not come within {HEAD_TIMEOUT:g} s")
            self._head_timer = liveness.Timer(HEAD_TIMEOUT, lambda: self._give_up(late))

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self, error: InlayError | None) -> None:
        """Close the connection, with a word to its client where no answer is under way."""
        if self.transport.is_closing():
            return
        under_way = cast("RequestResponseCycle | None", self.cycle)  # None before the first request
        if error is not None and (under_way is None or under_way.response_complete):
            body = error_json(error)
            head = (
                f"HTTP/1.1 {error.status} \r\ncontent-type: application/json\r\nconnection: close\r\n"
                f"content-length: {len(body)}\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


__all__ = ["BoundedHttp"]
