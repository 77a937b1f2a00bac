"""Large payloads go from the socket to where they belong, past the client of NATS, and what would break the client goes nowhere.

nats-py copies a payload seven times on its way in and once on its way out, which for large ones is
most of what they cost. It keeps what it is good at: connecting, logging in, TLS, other servers,
subscriptions, pings. A `Sorter` stands between its transport and its reader, follows the protocol
just far enough to know which bytes are the payload of whose message
(https://docs.nats.io/reference/reference-protocols/nats-protocol), has the event loop read those of
one family of subjects into memory that is asked for, and hands every other byte on.

The server lets subjects be any bytes but spaces; nats-py ends its reading, or the connection, at
those that are not text. Nobody of a fleet uses such a subject, so the `Sorter` drops those
messages.
"""

import asyncio
import logging
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import ParseResult

from nats.aio.transport import TcpTransport

log = logging.getLogger(__name__)

SCRATCH_BYTES = 16 * 1024
"""Read at a time where it is not known what comes."""
_AT_A_TIME = 256 * 1024
"""Bytes of a payload that are read at a time, so that others have their turn."""
_LINE_END = 2
_SHOWN = 200
"""Bytes of a bad line that are logged."""
_MESSAGES = (b"MSG", b"HMSG")
_PRINTABLE = re.compile(rb"[\x20-\x7e]*\r\n")


@dataclass(frozen=True)
class Sink:
    """Takes the payloads of some messages.

    Attributes:
        prefix: of their subjects.
        place: gives writable memory for the payload of a message, of (subject, bytes), or None
            where nobody wants it.
        placed: told the subject when all of the payload is there.
    """

    prefix: str
    place: Callable[[str, int], "memoryview | None"]
    placed: Callable[[str], None]


_NOBODY = Sink("", lambda subject, size: None, lambda subject: None)


class Sorter(asyncio.BufferedProtocol):
    """Between a transport and the protocol that nats-py reads from."""

    def __init__(self, inner: asyncio.Protocol, sink: Callable[[], Sink | None]) -> None:
        """Begins where a line of the protocol does.

        Args:
            inner: gets what is not taken.
            sink: says who takes what now.
        """
        self._inner = inner
        self._sink = sink
        self._scratch = bytearray(SCRATCH_BYTES)
        self._line = b""
        self._subject = ""
        self._taker: Sink | None = None
        self._into: memoryview | None = None
        # Bytes of a payload that are still to come, and after it.
        self._left = self._tail = 0

    # What the transport calls.

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes are to be; a view, of which asyncio's TLS fills slices."""
        if self._into is not None and self._left:
            return self._into[:_AT_A_TIME]
        return memoryview(self._scratch)

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes have come."""
        if self._into is not None and self._left:
            self._took(nbytes)
            return
        at = 0
        while at < nbytes:
            if self._left or self._tail:
                at += self._payload(memoryview(self._scratch)[at:nbytes])
            else:
                at = self._control(at, nbytes)

    def eof_received(self) -> bool | None:
        """The other end sends no more."""
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._into = None
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        """What is to be sent piles up."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """It does no more."""
        self._inner.resume_writing()

    # The protocol.

    def _control(self, at: int, stop: int) -> int:
        """Read a line, or the beginning of one; where it ends."""
        end = self._scratch.find(b"\n", at, stop) + 1
        piece = bytes(self._scratch[at : end or stop])
        self._line += piece
        if not end:
            return stop
        line, self._line = self._line, b""
        words = line.split()
        if len(words) >= 4 and words[0] in _MESSAGES and words[-1].isdigit():
            self._left, self._tail = int(words[-1]), _LINE_END
            sink = self._sink()
            self._taker = None
            if not _PRINTABLE.fullmatch(line):
                log.warning("a message is dropped whose subject is no text: %r", line[:_SHOWN])
                self._taker = _NOBODY
                return end
            if (
                sink is not None
                and words[0] == b"MSG"
                and words[1].startswith(sink.prefix.encode())
            ):
                self._taker = sink
                self._subject = words[1].decode()
                self._into = sink.place(self._subject, self._left)
                self._took(0)
                return end
        self._inner.data_received(line)
        return end

    def _payload(self, data: memoryview) -> int:
        """Take what of `data` belongs to the message; how much that is."""
        if self._taker is None:
            whole = min(len(data), self._left + self._tail)
            self._inner.data_received(bytes(data[:whole]))
            taken = min(whole, self._left)
            self._left -= taken
            self._tail -= whole - taken
            return whole
        if not self._left:
            taken = min(len(data), self._tail)
            self._tail -= taken
            return taken
        taken = min(len(data), self._left)
        if self._into is not None:
            self._into[:taken] = data[:taken]
        self._took(taken)
        return taken

    def _took(self, num_bytes: int) -> None:
        self._left -= num_bytes
        if self._into is None:
            return
        self._into = self._into[num_bytes:]
        if not self._left and self._taker is not None:
            self._into = None
            self._taker.placed(self._subject)


class DirectTransport(TcpTransport):
    """nats-py's transport with a `Sorter` in it, from the beginning of every connection.

    Attributes:
        sink: who takes what; nobody anything until it is set.
    """

    def __init__(self) -> None:
        """Not connected."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.sink: Sink | None = None

    def __bool__(self) -> bool:
        """True: else the client puts another in its place."""
        return True

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        """As nats-py calls it."""
        await super().connect(uri, buffer_size, connect_timeout)
        self._sort()

    async def connect_tls(
        self,
        uri: "str | ParseResult",
        ssl_context: ssl.SSLContext,
        buffer_size: int,
        connect_timeout: int,
    ) -> None:
        """As nats-py calls it."""
        await super().connect_tls(uri, ssl_context, buffer_size, connect_timeout)
        self._sort()

    def _sort(self) -> None:
        if self._io_writer is None:
            raise AssertionError("it is not connected")
        transport = self._io_writer.transport
        transport.set_protocol(
            Sorter(cast("asyncio.Protocol", transport.get_protocol()), lambda: self.sink)
        )

    async def publish(self, subject: str, payload: "bytes | memoryview") -> None:
        """Send a message, not copied, and return when there is room for more.

        Raises `OSError` when the connection is lost.
        """
        self.writelines((f"PUB {subject} {len(payload)}\r\n".encode(), payload, b"\r\n"))  # type: ignore[no-untyped-call]
        await self.drain()  # type: ignore[no-untyped-call]


__all__ = ["DirectTransport", "Sink", "Sorter"]
