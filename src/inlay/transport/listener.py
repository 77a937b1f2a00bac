"""Listening for connections and dialling them: TCP with TLS, and beside it for neighbours.

Neighbours, processes of one user on one machine, find each other by
`inlay.transport.local.same_host`; all others, and those whom anything hinders, use TCP.
"""

import asyncio
import hashlib
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias, TypeVar

from inlay.base.errors import OverloadedError
from inlay.messages.card import Address
from inlay.messages.digest import Secret
from inlay.transport import stream
from inlay.transport.connection import HANDSHAKE_SECONDS, TcpPeer
from inlay.transport.embeds_cache import EmbedsCache
from inlay.transport.handshake import Handshake, HandshakeError
from inlay.transport.local import same_host
from inlay.transport.local.same_host import NOTHING_SHARED, SharedMemory
from inlay.transport.memory import ReceiveMemory
from inlay.transport.stream import SocketStream

log = logging.getLogger(__name__)

T = TypeVar("T")
_Tasks: TypeAlias = set[asyncio.Task[None]]

_BACKLOG = 1024
_ACCEPT_AGAIN_SECONDS = 1.0
MAX_UNPROVEN = 128
"""Connections at a time whose other end has not proved itself, from before the TLS handshake on;
more are closed at once. An address has as many as remain free, so that one alone has half of them:
the event loop looks at each of them as often as at one that comes."""


class Listener:
    """Accepts connections whose other end knows the namespace's secret.

    Args:
        secret: the namespace's.
        hears: the type, or union of types, of the messages that will come.
        memory: for large messages of all connections together.
        accepted: takes each connection once its other end has proved itself.
        tls: the server's context, as `inlay.transport.tls` makes one; None for tests.
        fingerprint: SHA-256 of its certificate; empty without TLS.
        cache: of named buffers; those that are here are not sent again.
        neighbours: whether it listens for them too; with TLS alone, as the fingerprint is a part
            of the name by which it is found.
    """

    def __init__(
        self,
        secret: Secret,
        hears: Any,
        memory: ReceiveMemory,
        accepted: "Callable[[TcpPeer[Any]], None]",
        *,
        tls: ssl.SSLContext | None = None,
        fingerprint: bytes = b"",
        cache: EmbedsCache | None = None,
        neighbours: bool = True,
    ) -> None:
        self._secret = secret
        self._hears = hears
        self._memory = memory
        self._accepted = accepted
        self._tls = tls
        self._fingerprint = fingerprint
        self._cache = cache
        self._unproven: set[TcpPeer[Any]] = set()
        self._neighbours = neighbours and bool(fingerprint)
        self._greeting: _Tasks = set()
        self._securing: _Tasks = set()
        self._coming: Counter[str] = Counter()

    async def listen(self, host: str, port: int) -> int:
        """Listen on a TCP port, any free one for 0; the port. Raises `OSError`."""
        found = stream.listening(host, port, _BACKLOG)
        for listening in found:
            self._start(self._securing, self._accept_from(listening, self._secured), listening)
        port = int(found[0].getsockname()[1])
        try:
            near = same_host.listening(port, self._fingerprint) if self._neighbours else None
        except OSError as error:
            log.warning("neighbours will use TCP: %s", error)
        else:
            if near is not None:
                self._start(self._greeting, self._accept_from(near, self._greeted), near)
        return port

    def _start(
        self, tasks: _Tasks, doing: Coroutine[Any, Any, None], sock: socket.socket
    ) -> asyncio.Task[None]:
        """Start a task, after whose cancellation `sock` is closed, even if it never ran."""

        def ended(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            if task.cancelled():
                sock.close()

        task = asyncio.create_task(doing)
        tasks.add(task)
        task.add_done_callback(ended)
        return task

    async def _accept_from(
        self, listening: socket.socket, take: Callable[[socket.socket, Any], None]
    ) -> None:
        with listening:
            while True:
                accepting = asyncio.ensure_future(asyncio.get_running_loop().sock_accept(listening))
                try:
                    came, address = await asyncio.shield(accepting)
                except asyncio.CancelledError:
                    # One that was accepted in the same turn is nobody's.
                    if not accepting.cancel():
                        _close_accepted(accepting)
                    raise
                except OSError as error:
                    log.warning("no connection is accepted: %s", error)
                    await asyncio.sleep(_ACCEPT_AGAIN_SECONDS)
                    continue
                take(came, address)

    def _greeted(self, near: socket.socket, _: Any) -> None:
        if len(self._greeting) + len(self._unproven) > MAX_UNPROVEN:
            near.close()
        else:
            self._start(self._greeting, self._greet(near), near)

    async def _greet(self, near: socket.socket) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                shared = await same_host.greeted(near, self._memory)
            self._accept(near, shared)
        except (OSError, ValueError) as error:
            log.warning("a neighbour is refused: %s", error)
            near.close()

    def _secured(self, came: socket.socket, address: tuple[str, int]) -> None:
        host = address[0]
        if self._coming[host] >= MAX_UNPROVEN - self._coming.total():
            came.close()
        else:
            self._coming[host] += 1
            securing = self._start(self._securing, self._secure(came, host), came)
            securing.add_done_callback(lambda _: self._came(host))

    def _came(self, host: str) -> None:
        self._coming[host] -= 1
        if not self._coming[host]:
            del self._coming[host]

    async def _secure(self, came: socket.socket, host: str) -> None:
        try:
            if self._tls is not None:
                async with asyncio.timeout(HANDSHAKE_SECONDS):
                    came = await stream.secured(came, self._tls, None)
            connection = self._accept(came)
            self._coming[host] += 1
            connection.ready.add_done_callback(lambda _: self._came(host))
        except OSError as error:
            log.info("a connection is refused: %s", error)
            came.close()

    def _accept(self, came: socket.socket, shared: SharedMemory = NOTHING_SHARED) -> "TcpPeer[Any]":
        handshake = Handshake(self._secret, self._fingerprint, dials=False)
        connection: TcpPeer[Any] = TcpPeer(
            handshake,
            self._hears,
            self._memory,
            self._cache,
            check=lambda transport: self._admit(connection),
            shared=shared,
        )
        connection.ready.add_done_callback(lambda _: self._settled(connection))
        SocketStream(came, connection)
        return connection

    def _admit(self, connection: "TcpPeer[Any]") -> None:
        # Only now: a connection whose TLS handshake fails is never heard of again.
        if len(self._unproven) >= MAX_UNPROVEN:
            raise HandshakeError(f"{MAX_UNPROVEN} connections have proved nothing yet")
        self._unproven.add(connection)

    def _settled(self, connection: TcpPeer[Any]) -> None:
        self._unproven.discard(connection)
        if connection.ready.exception() is None:
            self._accepted(connection)

    def close(self) -> None:
        """Stop listening, and cut those that have not proved themselves; accepted ones stay."""
        for task in (*self._greeting, *self._securing):
            task.cancel()
        for connection in tuple(self._unproven):
            connection.abort()


def _close_accepted(accepting: "asyncio.Future[tuple[socket.socket, Any]]") -> None:
    if accepting.exception() is None:
        accepting.result()[0].close()


async def dial(
    address: Address,
    secret: Secret,
    hears: Any,
    memory: ReceiveMemory,
    cache: EmbedsCache | None = None,
) -> "TcpPeer[Any]":
    """Open a connection to a listener and prove both ends.

    Args:
        address: of the listener, with the digest of its certificate; empty: no TLS.
        secret: the namespace's.
        hears: the type, or union of types, of the messages that will come.
        memory: for large messages.
        cache: of named buffers; those that are here are not sent again.

    Raises:
        OverloadedError: nobody answers there, or it is not who it should be.
    """
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            found = await _dial_neighbour(address, secret, hears, memory, cache)
            return found or await _dial_tcp(address, secret, hears, memory, cache)
    except (OSError, HandshakeError, ValueError) as error:
        raise OverloadedError(
            f"no connection to {address.host}:{address.port}: {error}", retry_after=1
        ) from error


async def _dial_tcp(
    address: Address,
    secret: Secret,
    hears: Any,
    memory: ReceiveMemory,
    cache: EmbedsCache | None,
) -> "TcpPeer[Any]":
    fingerprint = address.fingerprint

    def check(transport: asyncio.BaseTransport) -> None:
        if fingerprint:
            shown = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
            if hashlib.sha256(shown or b"").digest() != fingerprint:
                raise HandshakeError("another certificate than the worker's card names")

    handshake = Handshake(secret, fingerprint, dials=True)
    connection: TcpPeer[Any] = TcpPeer(handshake, hears, memory, cache, check=check)
    sock = await stream.connected(address.host, address.port)
    if fingerprint:
        sock = await stream.secured(sock, _pinned(), "inlay")
    return await _proved(connection, sock)


async def _dial_neighbour(
    address: Address,
    secret: Secret,
    hears: Any,
    memory: ReceiveMemory,
    cache: EmbedsCache | None,
) -> "TcpPeer[Any] | None":
    """Open a connection to a listener of this machine; None where none is found or it refuses."""
    try:
        found = same_host.dialled(address, memory) if address.fingerprint else None
        if found is None:
            return None
        near, shared = found
        handshake = Handshake(secret, address.fingerprint, dials=True)
        connection: TcpPeer[Any] = TcpPeer(handshake, hears, memory, cache, shared=shared)
        # Who keeps the error that follows must not keep the memory with it.
        del found, shared
        return await _proved(connection, near)
    except (OSError, HandshakeError, ValueError) as error:
        log.info("%s:%d is dialled over TCP: %s", address.host, address.port, error)
        return None


async def _proved(connection: "TcpPeer[Any]", sock: socket.socket) -> "TcpPeer[Any]":
    """Wait until both ends of a connected socket have proved themselves; else cut it."""
    SocketStream(sock, connection)
    try:
        await asyncio.shield(connection.ready)
    except BaseException:
        connection.abort()
        raise
    return connection


def _pinned() -> ssl.SSLContext:
    """Return a context that asks no authority: the certificate's digest comes with the card."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
