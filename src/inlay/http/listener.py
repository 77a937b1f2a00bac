"""Accepting connections so that a flood of them does not hold up a new one.

The event loop's own servers take connections in the order in which they came. A client that opens
connections, sends something and closes them at once then fills the system's queue with connections
that nobody waits for, and a new one waits behind them all. So everything is accepted at once, which
costs little, and given to the event loop a few at a time: addresses take turns, and connections
that their peer has closed come last. Clients behind one address, as of a proxy, share its turns.
"""

import asyncio
import logging
import select
from collections import deque
from collections.abc import Callable
from socket import socket

from inlay.base.fair_queue import FairQueue
from inlay.http.tls import Tls

log = logging.getLogger(__name__)

MAX_ACCEPTED = 64
"""Connections accepted in one turn of the event loop."""
MAX_STARTED = 4
"""Connections that begin to be served in one turn of the event loop."""
MAX_WAITING = 4096
"""Connections that wait to be served; beyond it an address with the most loses its newest."""
MAX_CLOSED = 1024
"""Connections kept that their peer has closed; beyond it the oldest ends unserved."""
RETRY_SECONDS = 1.0
"""Seconds until accepting is tried again after the system refused, as it does without files."""

_CLOSED = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


class HttpListener:
    """A listening socket whose connections are served by protocols, in a fair order.

    Args:
        listening: a bound socket; its owner closes it after this.
        make_protocol: makes the protocol of a connection.
        tls: of new connections, or None.
        backlog: connections that may wait to be accepted.
    """

    def __init__(
        self,
        listening: socket,
        make_protocol: Callable[[], asyncio.Protocol],
        tls: Tls | None,
        backlog: int,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._make_protocol = make_protocol
        self._tls = tls
        self._waiting: FairQueue[socket] = FairQueue()
        self._closed: deque[socket] = deque()
        self._starting: set[asyncio.Task[object]] = set()
        self._next: asyncio.Handle | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._is_closing = False
        listening.setblocking(False)
        listening.listen(backlog)
        self._loop.add_reader(listening, self._accept)

    def close(self) -> None:
        """Accept nothing more and end the connections that wait or begin; those served go on."""
        self._is_closing = True
        self._loop.remove_reader(self._listening)
        for handle in (self._next, self._retry):
            if handle is not None:
                handle.cancel()
        while len(self._waiting):
            self._waiting.take().close()
        while self._closed:
            self._closed.popleft().close()
        # A handshake takes as long as its peer likes. Without one a turn or two are left, in which
        # a connection that is cancelled may begin nevertheless.
        for task in self._starting if self._tls is not None else ():
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until the connections that were beginning have ended."""
        if self._starting:
            await asyncio.wait(self._starting)

    def _accept(self) -> None:
        # Nobody waits where no turn is to come: the first of them need not either.
        for came in range(MAX_ACCEPTED):
            try:
                connection, address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:
                log.error("no connection can be accepted for %g s: %s", RETRY_SECONDS, error)
                self._loop.remove_reader(self._listening)
                self._retry = self._loop.call_later(RETRY_SECONDS, self._accept_again)
                break
            connection.setblocking(False)
            if self._next is None and not came and not _is_closed(connection):
                self._serve(connection)
            else:
                client = address[0] if isinstance(address, tuple) else address
                self._waiting.push(connection, client, 0)
                if len(self._waiting) > MAX_WAITING:
                    self._waiting.take_from_most().close()
                self._start_soon()

    def _accept_again(self) -> None:
        self._loop.add_reader(self._listening, self._accept)

    def _start_soon(self) -> None:
        if self._next is None and (len(self._waiting) or self._closed):
            self._next = self._loop.call_soon(self._start)

    def _start(self) -> None:
        self._next = None
        started = 0
        while started < MAX_STARTED and len(self._waiting):
            connection = self._waiting.take()
            if _is_closed(connection):
                self._closed.append(connection)
                if len(self._closed) > MAX_CLOSED:
                    self._closed.popleft().close()
            else:
                self._serve(connection)
                started += 1
        if not started and self._closed:
            # It may have sent a whole request first, and still read the answer.
            self._serve(self._closed.popleft())
        self._start_soon()

    def _serve(self, connection: socket) -> None:
        serving = self._loop.create_task(self._connect(connection))
        self._starting.add(serving)
        serving.add_done_callback(self._starting.discard)

    async def _connect(self, connection: socket) -> None:
        try:
            transport, _ = await self._loop.connect_accepted_socket(
                self._make_protocol,
                connection,
                ssl=None if self._tls is None else self._tls.context,
            )
            if self._is_closing:
                transport.close()
        except OSError as error:
            # A peer that left, or whose TLS handshake failed, concerns nobody else.
            log.debug("a connection did not begin: %s", error)
            connection.close()


def _is_closed(connection: socket) -> bool:
    """Return True if the peer has closed its end, with or without having sent something."""
    poll = select.poll()
    poll.register(connection, _CLOSED)
    return bool(poll.poll(0))
