"""Listening for connections and dialling them: TCP with TLS, and beside it for neighbours.

Neighbours, processes of one user on one machine, find each other by
`inlay.transport.local.neighbours`; all others, and those whom anything hinders, use TCP.
"""

import asyncio
import hashlib
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from inlay.card import Address
from inlay.digest import Secret
from inlay.errors import OverloadedError
from inlay.transport.connection import HANDSHAKE_SECONDS, Connection
from inlay.transport.embeds_cache import EmbedsCache
from inlay.transport.handshake import Handshake, HandshakeError
from inlay.transport.local import neighbours
from inlay.transport.local.neighbours import NOTHING_SHARED, SharedMemory
from inlay.transport.memory import ReceiveMemory

log = logging.getLogger(__name__)

T = TypeVar("T")

_BACKLOG = 1024
_ACCEPT_AGAIN_SECONDS = 1.0
MAX_UNPROVEN = 64
"""Connections at a time whose other end has not proved itself; more are closed at once."""


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
        accepted: "Callable[[Connection[Any]], None]",
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
        self._unproven: set[Connection[Any]] = set()
        self._server: asyncio.Server | None = None
        self._neighbours = neighbours and bool(fingerprint)
        self._greeting: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int) -> int:
        """Listen on a TCP port, any free one for 0; the port. Raises `OSError`."""
        self._server = await asyncio.get_running_loop().create_server(
            self._accept,
            host,
            port,
            ssl=self._tls,
            backlog=_BACKLOG,
            ssl_handshake_timeout=HANDSHAKE_SECONDS if self._tls else None,
        )
        port = int(self._server.sockets[0].getsockname()[1])
        try:
            near = neighbours.listening(port, self._fingerprint) if self._neighbours else None
        except OSError as error:
            log.warning("neighbours will use TCP: %s", error)
        else:
            if near is not None:
                self._greet(self._accept_neighbours(near), near)
        return port

    def _greet(self, doing: Coroutine[Any, Any, None], sock: socket.socket) -> None:
        """Start a task, after whose cancellation `sock` is closed, even if it never ran."""

        def ended(task: asyncio.Task[None]) -> None:
            self._greeting.discard(task)
            if task.cancelled():
                sock.close()

        task = asyncio.create_task(doing)
        self._greeting.add(task)
        task.add_done_callback(ended)

    async def _accept_neighbours(self, listening: socket.socket) -> None:
        with listening:
            while True:
                accepting = asyncio.ensure_future(asyncio.get_running_loop().sock_accept(listening))
                try:
                    near, _ = await asyncio.shield(accepting)
                except asyncio.CancelledError:
                    # One that was accepted in the same turn is nobody's.
                    if not accepting.cancel():
                        _close_accepted(accepting)
                    raise
                except OSError as error:
                    log.warning("no neighbour is accepted: %s", error)
                    await asyncio.sleep(_ACCEPT_AGAIN_SECONDS)
                    continue
                if len(self._greeting) + len(self._unproven) > MAX_UNPROVEN:
                    near.close()
                else:
                    self._greet(self._accept_neighbour(near), near)

    async def _accept_neighbour(self, near: socket.socket) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                shared = await neighbours.greeted(near, self._memory)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._accept(shared), near
            )
        except (OSError, ValueError) as error:
            log.warning("a neighbour is refused: %s", error)
            near.close()

    def _accept(self, shared: SharedMemory = NOTHING_SHARED) -> Connection[Any]:
        handshake = Handshake(self._secret, self._fingerprint, dials=False)
        connection: Connection[Any] = Connection(
            handshake,
            self._hears,
            self._memory,
            self._cache,
            check=lambda transport: self._admit(connection),
            shared=shared,
        )
        connection.ready.add_done_callback(lambda _: self._settled(connection))
        return connection

    def _admit(self, connection: "Connection[Any]") -> None:
        # Only now: a connection whose TLS handshake fails is never heard of again.
        if len(self._unproven) >= MAX_UNPROVEN:
            raise HandshakeError(f"{MAX_UNPROVEN} connections have proved nothing yet")
        self._unproven.add(connection)

    def _settled(self, connection: Connection[Any]) -> None:
        self._unproven.discard(connection)
        if connection.ready.exception() is None:
            self._accepted(connection)

    def close(self) -> None:
        """Stop listening, and cut those that have not proved themselves; accepted ones stay."""
        if self._server is not None:
            self._server.close()
        for task in self._greeting:
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
) -> "Connection[Any]":
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
) -> "Connection[Any]":
    fingerprint = address.fingerprint

    def check(transport: asyncio.BaseTransport) -> None:
        if fingerprint:
            shown = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
            if hashlib.sha256(shown or b"").digest() != fingerprint:
                raise HandshakeError("another certificate than the worker's card names")

    handshake = Handshake(secret, fingerprint, dials=True)
    connection: Connection[Any] = Connection(handshake, hears, memory, cache, check=check)
    opening = asyncio.get_running_loop().create_connection(
        lambda: connection,
        address.host,
        address.port,
        ssl=_pinned() if fingerprint else None,
        server_hostname="inlay" if fingerprint else None,
    )
    return await _proved(connection, opening)


async def _dial_neighbour(
    address: Address,
    secret: Secret,
    hears: Any,
    memory: ReceiveMemory,
    cache: EmbedsCache | None,
) -> "Connection[Any] | None":
    """Open a connection to a listener of this machine; None where none is found or it refuses."""
    try:
        found = neighbours.dialled(address, memory) if address.fingerprint else None
        if found is None:
            return None
        near, shared = found
        handshake = Handshake(secret, address.fingerprint, dials=True)
        connection: Connection[Any] = Connection(handshake, hears, memory, cache, shared=shared)
        opening = asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=near)
        return await _proved(connection, opening)
    except (OSError, HandshakeError, ValueError) as error:
        log.info("%s:%d is dialled over TCP: %s", address.host, address.port, error)
        return None


async def _proved(
    connection: "Connection[Any]", opening: Coroutine[Any, Any, object]
) -> "Connection[Any]":
    """Wait until a connection is open, and both ends have proved themselves; else cut it."""
    try:
        await opening
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
