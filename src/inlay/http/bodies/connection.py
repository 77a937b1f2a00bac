"""HTTP/1.1 connections with large bodies and events without messages.

uvicorn passes a body on in pieces, each copied from socket to bytes, parser, cycle and message,
with a task switch every 64 KB. For a body of known length, an `Exchange` takes over the transport
for exactly that many bytes. The event loop reads into the caller's memory, or into one reused
buffer, and the transport is given back before the next request's first byte.
"""

import asyncio
from collections import deque
from collections.abc import Callable, MutableMapping
from contextvars import Context, copy_context
from typing import Any, TypeAlias, cast
from weakref import WeakKeyDictionary

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from inlay.base.errors import InlayError
from inlay.http.asgi import Message, Send
from inlay.http.errors import ClientGone

EXTENSION = "inlay.exchange"
"""Key of the `Exchange` in the extensions of a scope."""

_AT_A_TIME = 256 * 1024
"""Maximum bytes of one read, so that they are processed while in the CPU cache."""

_IN_A_ROW = _AT_A_TIME
"""Bytes of one body after which others are served: libuv would read 32 times in a row."""

_AT_ONCE = 4
"""Bodies that are read on in one turn of the event loop.

Each read waits for the interpreter: while 16 bodies came together all others waited 20 ms a turn.
"""


class HttpConnection(HttpToolsProtocol):
    """uvicorn's connection, with an `Exchange` in its scopes.

    Attributes:
        refusal: error of a body that is not read further, or None.
        comment: what readers of a response ignore that ends with the connection.
    """

    _given_up = False
    refusal: InlayError | None = None
    comment = b""

    def on_headers_complete(self) -> None:
        """Start the app; called by the parser."""
        super().on_headers_complete()
        scope: MutableMapping[str, Any] = cast("MutableMapping[str, Any]", self.scope)
        scope.setdefault("extensions", {})[EXTENSION] = Exchange(self, self.cycle)
        if scope["http_version"] == "1.0":
            # RFC 9110, 10.1.1: such a client does not know interim responses.
            self.cycle.waiting_for_100_continue = False

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

    def refuse(self, error: InlayError) -> None:
        """Give up, and have whoever reads the body raise `error`."""
        self.give_up()
        self.refusal = error
        self.cycle.message_event.set()


class TextWriter:
    """Writer of parts of a response that differ in one text.

    One object, not closures: after each pause of the server what an event touches is cold.
    """

    __slots__ = ("_before", "_cycle", "_encode", "_end", "_fixed", "_write")

    def __init__(
        self,
        cycle: RequestResponseCycle,
        before: bytes,
        after: bytes,
        encode: Callable[[str], bytes],
    ) -> None:
        self._cycle = cycle
        self._fixed, self._before, self._end = len(before) + len(after), before, after + b"\r\n"
        self._encode = encode
        self._write = cycle.transport.write

    def ready(self) -> bool:
        cycle = self._cycle
        return not (cycle.flow.write_paused or cycle.disconnected or not cycle.chunked_encoding)

    def write(self, text: str) -> None:
        """Write one with `text`; only if it is `ready`."""
        data = self._encode(text)
        self._write(b"%x\r\n%b%b%b" % (self._fixed + len(data), self._before, data, self._end))


class Exchange:
    """One request and its response, on their connection."""

    __slots__ = ("_connection", "_cycle")

    def __init__(self, connection: HttpConnection, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle

    def check(self) -> None:
        """Raise the error of a body that is not read further."""
        if self._connection.refusal is not None:
            raise self._connection.refusal

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

    def until_close(self, send: Send) -> Send:
        """Return `send` for a client of HTTP/1.0, which is never sent chunks (RFC 9112, 6.1).

        A body of unknown length ends with the connection, which uvicorn closes after the answer.
        """
        cycle, sized = self._cycle, False

        async def unframed(message: Message) -> None:
            nonlocal sized
            if message["type"] == "http.response.start":
                headers = {name.lower(): value for name, value in message["headers"]}
                sized = b"content-length" in headers
                cycle.chunked_encoding = None if sized else False
                if headers.get(b"content-type", b"").startswith(b"text/event-stream"):
                    self._connection.comment = b":\n\n"
            elif not sized:
                # uvicorn compares what was promised with what is sent.
                cycle.expected_content_length += len(message.get("body", b""))
            await send(message)

        return unframed

    def text_writer(
        self, before: bytes, after: bytes, encode: Callable[[str], bytes]
    ) -> TextWriter:
        """Return what writes texts between these bytes, each as a part of the response."""
        return TextWriter(self._cycle, before, after, encode)

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


_Turn: TypeAlias = tuple[Callable[[], None], Context]
_waiting: WeakKeyDictionary[asyncio.AbstractEventLoop, deque[_Turn]] = WeakKeyDictionary()


def _in_turn(loop: asyncio.AbstractEventLoop, go_on: Callable[[], None]) -> None:
    """Call `go_on`, which reads a body on, in a later turn of its event loop."""
    waiting = _waiting.setdefault(loop, deque())
    waiting.append((go_on, copy_context()))
    if len(waiting) == 1:
        loop.call_soon(_next, loop)


def _next(loop: asyncio.AbstractEventLoop) -> None:
    waiting = _waiting[loop]
    for _ in range(min(_AT_ONCE, len(waiting))):
        go_on, context = waiting.popleft()
        loop.call_soon(go_on, context=context)
    if waiting:
        loop.call_soon(_next, loop)


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
        connection: HttpConnection,
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
            _in_turn(self._connection.loop, self._go_on)

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
