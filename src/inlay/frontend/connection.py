"""HTTP connections on which a large body goes from the socket straight into its buffer.

uvicorn hands a body on in pieces, each copied on its way from socket to bytes, parser, cycle and message, with a task switch
every 64 KB. A body of known length needs none of that: `BodySource.fill` takes the transport over for exactly as many bytes,
has the event loop read into the caller's memory, and gives the transport back before the next request's first byte.
"""

import asyncio
from collections.abc import Callable, MutableMapping
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from inlay.frontend.errors import ClientGone

EXTENSION = "inlay.body"
"""Key of the `BodySource` in the extensions of a scope."""

_AT_A_TIME = 1 << 20
"""Bytes of one read at most: the kernel rarely has more, and progress should be seen."""


class Connection(HttpToolsProtocol):
    """uvicorn's connection, whose scopes hold a `BodySource`."""

    _given_up = False

    def on_headers_complete(self) -> None:
        """Called by the parser; starts the app."""
        super().on_headers_complete()
        scope: MutableMapping[str, Any] = cast("MutableMapping[str, Any]", self.scope)
        scope.setdefault("extensions", {})[EXTENSION] = BodySource(self, self.cycle)

    def data_received(self, data: bytes) -> None:
        """Called by the transport."""
        if not self._given_up:
            super().data_received(data)

    def start_over(self) -> None:
        """A body was read past the parser: the next byte begins a request."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def give_up(self) -> None:
        """A body was read in part past the parser: nothing that follows can be understood."""
        self._given_up = True
        self.cycle.keep_alive = False


class BodySource:
    """The body of one request, to be read whole into memory of the caller's."""

    def __init__(self, connection: Connection, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle

    async def fill(self, view: memoryview, progress: Callable[[int], None]) -> None:
        """Read a body of exactly `len(view)` bytes.

        Args:
            view: writable; filled from the start.
            progress: called with the number of bytes that have come, now and then.

        Raises:
            ClientGone: the client left before the end.
        """
        connection, cycle = self._connection, self._cycle
        if cycle.disconnected:
            raise ClientGone
        if cycle.waiting_for_100_continue:
            connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            cycle.waiting_for_100_continue = False
        here = len(cycle.body)
        view[:here] = cycle.body
        cycle.body = bytearray()
        if cycle.more_body and here < len(view):
            await _Filling(connection, view, here, progress).run()
            connection.start_over()
        cycle.more_body = False


class _Filling(asyncio.BufferedProtocol):
    """Holds the transport until `view` is full."""

    def __init__(
        self, connection: Connection, view: memoryview, start: int, progress: Callable[[int], None]
    ) -> None:
        self._connection = connection
        self._transport = connection.transport
        self._view = view
        self._position = start
        self._progress = progress
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
            self._view = memoryview(b"")
            self._transport.set_protocol(self._connection)
        self._transport.resume_reading()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._position : self._position + _AT_A_TIME]

    def buffer_updated(self, nbytes: int) -> None:
        self._position += nbytes
        if self._position == len(self._view):
            # The next bytes are another request's, and the parser's.
            self._transport.pause_reading()
            if not self._done.done():
                self._done.set_result(None)
        else:
            self._progress(self._position)

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
        # Told before the app ends without an answer, which uvicorn would take for a fault and log.
        self._connection.cycle.disconnected = True
        if not self._done.done():
            self._done.set_exception(ClientGone())
