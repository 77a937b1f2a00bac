"""HTTP/1.1 connections with limits that uvicorn lacks."""

import asyncio
from socket import SO_ERROR, SOL_SOCKET
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from inlay.base import liveness
from inlay.base.errors import InlayError, InvalidRequestError
from inlay.http.bodies.connection import HttpConnection
from inlay.http.errors import error_json

MAX_HEAD = 64 * 1024
"""Maximum bytes of a request line with its headers, or of trailers.

One read may exceed it before it is checked.
"""

MAX_HEADERS = 512
"""Maximum number of headers: a parser takes a microsecond for each, however short they are."""

MAX_TARGET = 8 * 1024
"""Maximum bytes of a path with its query: it is unquoted and compared with every route."""

HEAD_TIMEOUT = 20.0
"""Seconds for a head, from the connection or, on a kept connection, from the head's first byte."""

READ_TIMEOUT = 120.0
"""Seconds after which a client that takes nothing of its answer is given up."""

MAX_PIECES, MIN_PIECE = 4096, 32
"""Pieces in which a body may come however small they are, and bytes of each, on average, beyond.

Each costs the parser a microsecond in which nobody else has a turn.
"""

_PARSED, _HEADS = 4096, 512
"""Bytes that are parsed before what they came to is looked at: of a body, and of heads.

4,096 bytes of heads may be 180 requests, which take 4 ms.
"""

_LOOK_AGAIN = 0.1
"""Interval in seconds at which a half-closed connection is checked: its client may have left."""

MAX_WAITING = 16
"""Maximum pipelined requests on one connection.

No known client sends any.
"""


class HeadTooLargeError(InlayError):
    """Request line and headers over `MAX_HEAD`."""

    status = 431
    type = "invalid_request_error"


class HeadTimeoutError(InlayError):
    """The request line and headers did not come in time."""

    status = 408
    type = "timeout_error"


LONG_HEAD = f"the head of the request is over the limit of {MAX_HEAD} bytes"
MANY_HEADERS = f"the head of the request is over the limit of {MAX_HEADERS} headers"
LONG_TARGET = f"the path with its query is over the limit of {MAX_TARGET} bytes"
"""Messages of `HeadTooLargeError`."""


class BoundedHttp(HttpConnection):
    """uvicorn's protocol with limits on what comes, and on the time of clients that do not read.

    uvicorn has none for heads, pieces of bodies, trailers, pipelining and half-open connections,
    and they are reached before authentication.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.url = b""
        self._unsettled = self._pieces = self._arrived = 0
        self._head_timer: liveness.Timer | None = None
        self._reader_timer: liveness.Timer | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of the head."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self._head_came()
        self._stop_reader_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Give the client time to read."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """Note that it reads."""
        self._stop_reader_timer()
        super().resume_writing()
        self._await_last_reads()

    def on_response_complete(self) -> None:
        """Give the client time to read the rest, where the connection then closes."""
        super().on_response_complete()
        self._await_last_reads()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection once the client has read the rest."""
        super().timeout_keep_alive_handler()
        self._await_last_reads()

    def _await_last_reads(self) -> None:
        if self.transport.is_closing():
            self._await_reader()

    def _await_reader(self) -> None:
        """Cut the connection when nothing of what is buffered is taken for `READ_TIMEOUT`.

        Nothing is written meanwhile.
        """
        waiting = self.transport.get_write_buffer_size()

        def look() -> None:
            self._reader_timer = None
            if self.transport.get_write_buffer_size() == waiting:
                self.transport.abort()
            else:
                self._await_reader()

        if waiting and self._reader_timer is None:
            self._reader_timer = liveness.Timer(READ_TIMEOUT, look)

    def _stop_reader_timer(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep a half-closed connection whose client has sent a whole request.

        Such a client may still read the answer. A client that has left looks the same until
        something is sent to it. So something is sent that says nothing: if the client has left, it
        causes a reset and the request ends. TLS has no half-closed connections.
        """
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is None or cycle.response_complete or cycle.more_body or self.scheme == "https":
            return False
        cycle.keep_alive = False
        if not self.pipeline:
            self.transport.write(self._says_nothing(cycle))
        self._look_for_reset()
        return True

    def _says_nothing(self, cycle: RequestResponseCycle) -> bytes:
        """Return bytes that a client ignores here; HTTP/1.0 has some for events alone."""
        if not cycle.response_started:
            # Every HTTP/1.1 client ignores an interim response (RFC 9110, 15.2).
            known = self.scope["http_version"] == "1.1"
            return b"HTTP/1.1 100 Continue\r\n\r\n" if known else b""
        # The size of the next chunk begins with it (RFC 9112, 7.1).
        return b"0" if cycle.chunked_encoding else self.comment

    def _look_for_reset(self) -> None:
        """Close the connection if it was reset; else check again later."""
        if self.transport.is_closing():
            return
        # Reading would only return the end of the stream again.
        if self.transport.get_extra_info("socket").getsockopt(SOL_SOCKET, SO_ERROR):
            self.transport.abort()
        else:
            self.loop.call_later(_LOOK_AGAIN, self._look_for_reset)

    def data_received(self, data: bytes) -> None:
        """Count the bytes of heads, chunk headers and trailers."""
        start = 0
        while start < len(data):
            if self.transport.is_closing() or self._given_up:
                return
            cycle = cast("RequestResponseCycle | None", self.cycle)
            in_body = cycle is not None and cycle.more_body
            part = data[start : start + (_PARSED if in_body else _HEADS)]
            start += len(part)
            # The parser's callbacks reset it when a head or a piece of a body is complete.
            self._unsettled += len(part)
            super().data_received(part)
            if self._unsettled > MAX_HEAD:
                self._give_up(HeadTooLargeError(LONG_HEAD))
            elif self._head_timer is not None and len(self.url) > MAX_TARGET:
                self._give_up(HeadTooLargeError(LONG_TARGET))
            elif self._head_timer is not None and len(self.headers or ()) > MAX_HEADERS:
                self._give_up(HeadTooLargeError(MANY_HEADERS))
            if len(self.pipeline) > MAX_WAITING:
                self._give_up(None)

    def on_message_begin(self) -> None:
        """Start the timer of the next head."""
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        """Stop the timer: the head is complete."""
        self._unsettled = self._pieces = self._arrived = 0
        self._head_came()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Reset the count: bodies have limits of their own. Refuse one in too many pieces."""
        self._unsettled = 0
        if self._given_up:
            return
        self._pieces += 1
        self._arrived += len(body)
        if self._pieces > MAX_PIECES and self._arrived < MIN_PIECE * self._pieces:
            self.refuse(
                InvalidRequestError(
                    f"the body came in {self._pieces} chunks of {self._arrived} bytes in all; more "
                    f"than {MAX_PIECES} must have {MIN_PIECE} bytes or more, on average"
                )
            )
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Reset the count: the request is complete, unless a part of it was dropped."""
        self._unsettled = 0
        if not self._given_up:
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Start the app after one more read of the socket.

        An upload that was broken off then costs no more than its head. Otherwise each of thousands
        of them would be routed, counted and logged before the next connection is accepted.
        """

        def start() -> None:
            if not self.transport.is_closing():
                super(BoundedHttp, self)._start_asgi_task(cycle, app)

        # The first callback runs after the current data, the second after the next read.
        self.loop.call_soon(lambda: self.loop.call_soon(start) if cycle.more_body else start())

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP with a JSON error; uvicorn would send plain text."""
        self._give_up(InvalidRequestError(msg))

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = liveness.Timer(HEAD_TIMEOUT, self._head_is_late)

    def _head_is_late(self) -> None:
        says = f"the head of the request did not come within {HEAD_TIMEOUT:g} s"
        self._give_up(HeadTimeoutError(says))

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self, error: InlayError | None) -> None:
        """Close the connection, with an error response unless another one has begun."""
        if self.transport.is_closing():
            return
        under_way = cast("RequestResponseCycle | None", self.cycle)  # None before the first request
        if error is not None and (under_way is None or under_way.response_complete):
            body = error_json(error)
            head = (
                f"HTTP/1.1 {error.status} \r\ncontent-type: application/json\r\nconnection: "
                f"close\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
        self._await_reader()
