"""A connected socket as a transport of asyncio, with TLS or without.

Event loops have transports of their own. They read once a turn, and with TLS they copy what came
into one buffer, decrypt it into a second one and hand out a third. This one has OpenSSL work on the
socket itself, reads to where bytes belong, and goes on while more is there.
"""

import asyncio
import socket
import ssl
import sys
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from typing import Any

TURN_BYTES = 1024 * 1024
"""Bytes after which other connections have their turn."""
_RECORD_BYTES = 16 * 1024
"""Bytes of a TLS record, at most: what one call encrypts or decrypts."""
_WAKE_BYTES = 128 * 1024
"""Bytes for which the system wakes this, where at least as many are due."""
_PIECES = 64
"""Pieces that are handed to the system at a time."""
_CORK: int | None = getattr(socket, "TCP_CORK", None)
_WAITS = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Reader(asyncio.BufferedProtocol):
    """Protocol that a `SocketStream` reads for."""

    @property
    def due(self) -> int:
        """Bytes still to come that are of no use before all of them are there."""
        return 0


class SocketStream(asyncio.Transport):
    """Reads a socket into what its protocol gives, and writes what the protocol has.

    The protocol has at most one `writelines` waiting: it is paused while any of that is unsent.

    Args:
        sock: connected and not blocking; an `ssl.SSLSocket` after its handshake.
        protocol: is told of the connection at once.
    """

    def __init__(self, sock: socket.socket, protocol: Reader) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._fd = sock.fileno()
        self._tls = sock if isinstance(sock, ssl.SSLSocket) else None
        self._protocol = protocol
        self._unsent: deque[memoryview] = deque()
        self._waits = self._closing = self._ended = self._corked = False
        self._reads = True
        self._wake_at = 1
        tcp = sock.family != getattr(socket, "AF_UNIX", None)
        # Linux wakes for fewer bytes too where its buffer holds no more.
        self._may_wait = tcp and sys.platform == "linux"
        if tcp:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._loop.add_reader(self._fd, self._read)
        protocol.connection_made(self)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return the socket as `socket`, and with TLS as `ssl_object`."""
        found = {"socket": self._sock, "ssl_object": self._tls}.get(name)
        return default if found is None else found

    def pause_reading(self) -> None:
        """Read nothing more."""
        self._reads = False
        self._loop.remove_reader(self._fd)

    def resume_reading(self) -> None:
        """Read on after `pause_reading`."""
        if not self.is_closing():
            self._reads = True
            self._loop.add_reader(self._fd, self._read)
            # What is left of a record is out of the socket, which does not wake this for it.
            self._loop.call_soon(self._read)

    def is_closing(self) -> bool:
        """Return True once it is being closed."""
        return self._closing or self._ended

    def write(self, data: Any) -> None:
        """Write bytes."""
        self.writelines([data])

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        """Write pieces; what does not leave now does later, from where it is."""
        if self.is_closing():
            return
        pieces = list_of_data if self._tls is None else _records(list_of_data)
        self._unsent.extend(memoryview(piece) for piece in pieces if len(piece))
        if not self._waits:
            self._write()

    def close(self) -> None:
        """Close it once what was written has left."""
        if not self.is_closing():
            self._closing = True
            self.pause_reading()
            if not self._unsent:
                self._finish()

    def abort(self) -> None:
        """Close it at once."""
        self._end(None)

    def _read(self) -> None:
        try:
            self._read_turn()
            if self._may_wait and not self._ended:
                self._wait_for(self._protocol.due)
        except OSError as error:
            self._end(error)
        except Exception as error:
            told = {"message": "a connection is cut", "exception": error, "transport": self}
            self._loop.call_exception_handler(told)
            self._end(error)

    def _read_turn(self) -> None:
        left = TURN_BYTES
        while self._reads:
            place = memoryview(self._protocol.get_buffer(-1))
            if left <= 0:
                # The rest of a record is out of the socket, which would not wake this for it.
                place = place[: 0 if self._tls is None else self._tls.pending()]
                if not place:
                    return
            count = self._fill(place)
            if not count:
                return
            self._protocol.buffer_updated(count)
            if count < len(place):
                return
            left -= count

    def _wait_for(self, due: int) -> None:
        """Have the system wake this for several records of what is due, not for each."""
        # OpenSSL may hold a part of a record already.
        wake_at = _WAKE_BYTES if due >= _WAKE_BYTES + _RECORD_BYTES else 1
        if wake_at != self._wake_at:
            self._wake_at = wake_at
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake_at)

    def _fill(self, place: memoryview) -> int:
        """Read what is there; return its number of bytes. Ends the connection at its end."""
        count = 0
        try:
            if self._tls is None:
                count = self._sock.recv_into(place)
            else:
                # A call reads one record.
                read: Any = self._tls.read
                while count < len(place) and (came := read(len(place) - count, place[count:])):
                    count += came
        except _WAITS:
            return count
        if not count:
            self._end(None)
        return count

    def _write(self) -> None:
        unsent, tls = self._unsent, self._tls
        if tls is not None and len(unsent) > 1:
            # Or each record is a segment of its own, which wakes the other end.
            self._cork(True)
        try:
            while unsent:
                if tls is None:
                    self._sent(self._sock.sendmsg(islice(unsent, _PIECES)))
                else:
                    # The same bytes again after a wait: their record may be half sent.
                    count = tls.send(unsent[0])
                    if count < len(unsent[0]):
                        unsent[0] = unsent[0][count:]
                    else:
                        unsent.popleft()
            self._cork(False)
        except _WAITS:
            if not self._waits:
                self._waits = True
                self._loop.add_writer(self._fd, self._write)
                self._protocol.pause_writing()
        except OSError as error:
            self._end(error)
        else:
            if self._waits:
                self._waits = False
                self._loop.remove_writer(self._fd)
                if self._closing:
                    self._finish()
                else:
                    self._protocol.resume_writing()

    def _cork(self, corked: bool) -> None:
        if corked != self._corked and _CORK is not None:
            self._corked = corked
            self._sock.setsockopt(socket.IPPROTO_TCP, _CORK, corked)

    def _sent(self, count: int) -> None:
        while count:
            piece = self._unsent[0]
            if count < len(piece):
                self._unsent[0] = piece[count:]
                return
            count -= len(piece)
            self._unsent.popleft()

    def _finish(self) -> None:
        if self._tls is not None:
            # Says that this is the end; the other's word is not waited for.
            with suppress(OSError, ValueError):
                self._tls.unwrap()
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._ended:
            return
        self._ended = True
        self.pause_reading()
        self._loop.remove_writer(self._fd)
        self._unsent.clear()
        self._loop.call_soon(self._lost, error)

    def _lost(self, error: Exception | None) -> None:
        self._sock.close()
        self._protocol.connection_lost(error)


def _records(pieces: Iterable[Any]) -> Iterable[Any]:
    """Join small pieces: each would be a record of its own."""
    small: list[Any] = []
    size = 0
    for piece in pieces:
        if size + len(piece) > _RECORD_BYTES and small:
            yield b"".join(small)
            small, size = [], 0
        if len(piece) > _RECORD_BYTES:
            yield piece
        else:
            small.append(piece)
            size += len(piece)
    if small:
        yield b"".join(small)


async def secured(sock: socket.socket, context: ssl.SSLContext, name: str | None) -> ssl.SSLSocket:
    """Return a connected socket after its TLS handshake; it is closed if that fails.

    Args:
        sock: not blocking.
        context: of a server, or of a client.
        name: of the server, for a client; None of a server.

    Raises:
        OSError: the other end does not do its part.
    """
    with sock:
        tls = context.wrap_socket(
            sock,
            server_side=name is None,
            server_hostname=name,
            do_handshake_on_connect=False,
        )
    try:
        while True:
            try:
                tls.do_handshake()
                return tls
            except ssl.SSLWantReadError:
                await readable(tls)
            except ssl.SSLWantWriteError:
                await _writable(tls)
    except BaseException:
        tls.close()
        raise


async def readable(sock: socket.socket) -> None:
    """Return once there is something to read."""
    loop = asyncio.get_running_loop()
    await _ready(sock.fileno(), loop.add_reader, loop.remove_reader)


async def _writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    await _ready(sock.fileno(), loop.add_writer, loop.remove_writer)


async def _ready(
    fd: int, add: Callable[[int, Callable[[], None]], None], remove: Callable[[int], object]
) -> None:
    came = asyncio.Event()
    add(fd, came.set)
    try:
        await came.wait()
    finally:
        remove(fd)


async def connected(host: str, port: int) -> socket.socket:
    """Return a socket that is connected over TCP. Raises `OSError`."""
    loop = asyncio.get_running_loop()
    failed = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in await loop.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    ):
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, address)
            return sock
        except OSError as error:
            sock.close()
            failed = error
        except BaseException:
            sock.close()
            raise
    raise failed


def listening(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Return sockets that listen on a TCP port of all addresses of `host`. Raises `OSError`."""
    found: list[socket.socket] = []
    try:
        for family, _, _, _, address in sorted(
            set(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE))
        ):
            sock = socket.create_server(address, family=family, backlog=backlog)
            sock.setblocking(False)
            found.append(sock)
    except OSError:
        for sock in found:
            sock.close()
        raise
    return found
