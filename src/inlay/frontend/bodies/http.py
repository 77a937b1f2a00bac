"""The HTTP/1.1 of one connection, bounded where uvicorn's is not.

Request lines, headers, trailers, and requests in a row.
"""

import asyncio
from socket import SO_ERROR, SOL_SOCKET
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from inlay import liveness
from inlay.errors import InlayError, InvalidRequestError
from inlay.frontend.bodies.connection import Connection
from inlay.frontend.errors import error_json

MAX_HEAD = 64 * 1024
"""Bytes of a request line and its headers, or of trailers, at most.

What one read brings may be beyond it before it is seen.
"""

HEAD_TIMEOUT = 20.0
"""Seconds a head may take from its connection, or from its first byte on one that was kept, to its end."""

_LOOK_AGAIN = 0.1
"""Seconds after which a client that sends no more is looked at again: it may have left."""

MAX_WAITING = 16
"""Requests that may wait on one connection for the one before them.

No known client sends even one.
"""


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

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection of a client that sends no more but has sent a whole request, and may read its answer.

        A client that has left looks the same until something is sent to it, hence an interim
        response, which every HTTP/1.1 client has to pass over (RFC 9110, 15.2): of one that has
        left it brings a reset, and the request ends. Over TLS there are no half-closed connections.
        """
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is None or cycle.response_complete or cycle.more_body or self.scheme == "https":
            return False
        cycle.keep_alive = False
        if not self.pipeline and not cycle.response_started and self.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._look_for_reset()
        return True

    def _look_for_reset(self) -> None:
        """Close the connection of a client that has left, and look again later."""
        if self.transport.is_closing():
            return
        # Reading would only find the end again.
        if self.transport.get_extra_info("socket").getsockopt(SOL_SOCKET, SO_ERROR):
            self.transport.abort()
        else:
            self.loop.call_later(_LOOK_AGAIN, self._look_for_reset)

    def data_received(self, data: bytes) -> None:
        """Count what is neither body nor the end of anything: heads, chunk headers and trailers."""
        if self.transport.is_closing():
            return
        # Set back by the parser's callbacks, which say that something got done.
        self._unsettled += len(data)
        super().data_received(data)
        if self._unsettled > MAX_HEAD:
            self._give_up(
                HeadTooLargeError(f"the head of the request is over the limit of {MAX_HEAD} bytes")
            )
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

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Start the app once the rest of the body, or the end of the connection, had its chance to be read.

        An upload that broke off before its turn came then costs no more than its head: of thousands
        of them at once each would else be routed, counted and logged before the next connection is
        accepted.
        """

        def start() -> None:
            if not self.transport.is_closing():
                super(BoundedHttp, self)._start_asgi_task(cycle, app)

        # Called after the data that is being parsed, and again after what is read then.
        self.loop.call_soon(lambda: self.loop.call_soon(start) if cycle.more_body else start())

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP; uvicorn would answer in plain text."""
        self._give_up(InvalidRequestError(msg))

    def _await_head(self) -> None:
        if self._head_timer is None:
            late = HeadTimeoutError(
                f"the head of the request did not come within {HEAD_TIMEOUT:g} s"
            )
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
