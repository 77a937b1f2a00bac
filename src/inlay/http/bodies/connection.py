"""HTTP/1.1 connections with limits that uvicorn lacks, large bodies and events without messages.

uvicorn passes a body on in pieces, each copied from socket to bytes, parser, cycle and message,
with a task switch every 64 KB. For a body of known length, an `Exchange` takes over the transport
for exactly that many bytes. The event loop reads into the caller's memory, or into one reused
buffer, and the transport is given back before the next request's first byte.
"""

import asyncio
from collections.abc import Callable, MutableMapping
from socket import SO_ERROR, SOL_SOCKET
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from inlay import liveness
from inlay.errors import InlayError, InvalidRequestError
from inlay.http.errors import ClientGone, error_json

EXTENSION = "inlay.exchange"
"""Key of the `Exchange` in the extensions of a scope."""

_AT_A_TIME = 256 * 1024
"""Maximum bytes of one read, so that they are processed while in the CPU cache."""

_IN_A_ROW = 1 << 20
"""Bytes of one body after which others are served: libuv would read 32 times in a row."""

MAX_HEAD = 64 * 1024
"""Maximum bytes of a request line with its headers, or of trailers.

One read may exceed it before it is checked.
"""

HEAD_TIMEOUT = 20.0
"""Seconds for a head, from the connection or, on a kept connection, from the head's first byte."""

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


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with an `Exchange` in its scopes."""

    _given_up = False

    def on_headers_complete(self) -> None:
        """Start the app; called by the parser."""
        super().on_headers_complete()
        scope: MutableMapping[str, Any] = cast("MutableMapping[str, Any]", self.scope)
        scope.setdefault("extensions", {})[EXTENSION] = Exchange(self, self.cycle)

    def data_received(self, data: bytes) -> None:
        """Parse received data; called by the transport."""
        if not self._given_up:
            super().data_received(data)

    def start_over(self) -> None:
        """Reset the parser after a body that bypassed it: the next byte begins a request."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def give_up(self) -> None:
        """Ignore all further data after a partly read body: it cannot be parsed."""
        self._given_up = True
        self.cycle.keep_alive = False


class Exchange:
    """One request and its response, on their connection."""

    def __init__(self, connection: Connection, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle

    def arrived(self) -> bytes | None:
        """Take a body that has arrived whole; None if more of it is to come."""
        cycle = self._cycle
        return None if cycle.more_body or cycle.disconnected else bytes(self._begin())

    def writable(self) -> bool:
        """Return True if a part of the response can be written at once.

        False if that takes ASGI's `send`: the client reads slowly or has left, or the response has
        not begun or is not chunked.
        """
        cycle = self._cycle
        return not (cycle.flow.write_paused or cycle.disconnected or not cycle.chunked_encoding)

    def write_chunk(self, data: bytes) -> bool:
        """Write a part of the response if it is `writable`; False if nothing is written."""
        if not self.writable():
            return False
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def chunk_writer(self, before: bytes, after: bytes) -> Callable[[bytes], None]:
        """Return what writes chunks of these bytes and what is between, while it is `writable`."""
        fixed, write = len(before) + len(after), self._cycle.transport.write
        end = after + b"\r\n"

        def write_between(data: bytes) -> None:
            write(b"%x\r\n%b%b%b" % (fixed + len(data), before, data, end))

        return write_between

    async def fill(self, view: memoryview, progress: Callable[[int], None]) -> None:
        """Read a body of exactly `len(view)` bytes into `view`, from the start.

        Args:
            view: writable.
            progress: called at intervals with the number of bytes received.

        Raises:
            ClientGone: the client left before the end.
        """
        here = self._begin()
        view[: len(here)] = here
        await self._rest(
            len(view),
            len(here),
            lambda position: view[position : position + _AT_A_TIME],
            lambda _: None,
            progress,
        )

    async def stream(
        self, size: int, take: Callable[[memoryview], None], progress: Callable[[int], None]
    ) -> None:
        """Read a body of exactly `size` bytes piece by piece.

        Args:
            size: of the body.
            take: called with each piece, whose memory is reused; its errors are raised.
            progress: as for `fill`.

        Raises:
            ClientGone: the client left before the end.
        """
        here = self._begin()
        if here:
            take(memoryview(here))
        room = memoryview(bytearray(min(_AT_A_TIME, max(size - len(here), 1))))
        await self._rest(
            size,
            len(here),
            lambda position: room[: size - position],
            lambda count: take(room[:count]),
            progress,
        )

    def _begin(self) -> bytearray:
        """Return the bytes received so far."""
        connection, cycle = self._connection, self._cycle
        if cycle.disconnected:
            raise ClientGone
        if cycle.waiting_for_100_continue:
            connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            cycle.waiting_for_100_continue = False
        here = cycle.body
        cycle.body = bytearray()
        return here

    async def _rest(
        self,
        size: int,
        position: int,
        space: Callable[[int], memoryview],
        came: Callable[[int], None],
        progress: Callable[[int], None],
    ) -> None:
        connection, cycle = self._connection, self._cycle
        if cycle.more_body and position < size:
            await _Filling(connection, size, position, space, came, progress).run()
            connection.start_over()
        cycle.more_body = False


class _Filling(asyncio.BufferedProtocol):
    """Protocol that holds the transport until a body is complete.

    Args:
        connection: owner of the transport.
        size: bytes of the body.
        position: number of bytes received so far.
        space: returns the memory for the bytes from a position on.
        came: called with the number of bytes written there.
        progress: called with the number of bytes received.
    """

    def __init__(
        self,
        connection: Connection,
        size: int,
        position: int,
        space: Callable[[int], memoryview],
        came: Callable[[int], None],
        progress: Callable[[int], None],
    ) -> None:
        self._connection = connection
        self._transport = connection.transport
        self._size = size
        self._position = position
        self._space = space
        self._came = came
        self._progress = progress
        self._in_a_row = 0
        self._paused = False
        self._done: asyncio.Future[None] = connection.loop.create_future()

    async def run(self) -> None:
        self._transport.set_protocol(self)
        self._connection.flow.resume_reading()
        try:
            await self._done
        except BaseException:
            self._connection.give_up()
            raise
        finally:
            self._space = lambda _: memoryview(b"")
            self._came = lambda _: None
            # The future holds the error, whose frames hold this object and all that was read.
            # Dropping it breaks the cycle, so that the memory is freed without a collection.
            self._done = self._connection.loop.create_future()
            self._done.cancel()
            self._transport.set_protocol(self._connection)
            if self._paused:
                self._transport.resume_reading()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._space(self._position)

    def buffer_updated(self, nbytes: int) -> None:
        try:
            self._came(nbytes)
        except Exception as error:
            self._end(error)
            return
        self._position += nbytes
        if self._position == self._size:
            self._end(None)
            return
        self._progress(self._position)
        self._in_a_row += nbytes
        if self._in_a_row >= _IN_A_ROW:
            self._pause()
            self._connection.loop.call_soon(self._go_on)

    def _pause(self) -> None:
        self._paused = True
        self._transport.pause_reading()

    def _go_on(self) -> None:
        self._in_a_row = 0
        if not self._done.done():
            self._paused = False
            self._transport.resume_reading()

    def _end(self, error: Exception | None) -> None:
        # The next bytes belong to another request, and to the parser.
        self._pause()
        if self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)

    def eof_received(self) -> None:
        self._lose()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose()
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def _lose(self) -> None:
        # Set before the app ends without an answer, which uvicorn would log as a fault.
        self._connection.cycle.disconnected = True
        if not self._done.done():
            self._done.set_exception(ClientGone())


class BoundedHttp(Connection):
    """uvicorn's protocol with limits on heads, trailers, pipelining and half-open connections.

    uvicorn has no limit for any of these, and they are reached before authentication.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unsettled = 0
        self._head_timer: liveness.Timer | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of the head."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer of the head."""
        self._head_came()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep a half-closed connection whose client has sent a whole request.

        Such a client may still read the answer. A client that has left looks the same until
        something is sent to it. So an interim response is sent, which every HTTP/1.1 client ignores
        (RFC 9110, 15.2): if the client has left, it causes a reset and the request ends. TLS has no
        half-closed connections.
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
        if self.transport.is_closing():
            return
        # The parser's callbacks reset it when a head or a piece of a body is complete.
        self._unsettled += len(data)
        super().data_received(data)
        if self._unsettled > MAX_HEAD:
            self._give_up(
                HeadTooLargeError(f"the head of the request is over the limit of {MAX_HEAD} bytes")
            )
        elif len(self.pipeline) > MAX_WAITING:
            self._give_up(None)

    def on_message_begin(self) -> None:
        """Start the timer of the next head."""
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        """Stop the timer: the head is complete."""
        self._unsettled = 0
        self._head_came()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Reset the count: bodies have limits of their own."""
        self._unsettled = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Reset the count: the request is complete."""
        self._unsettled = 0
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
            late = HeadTimeoutError(
                f"the head of the request did not come within {HEAD_TIMEOUT:g} s"
            )
            self._head_timer = liveness.Timer(HEAD_TIMEOUT, lambda: self._give_up(late))

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
