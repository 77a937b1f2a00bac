"""Listening for connections and dialling them: TCP with TLS."""

import asyncio
import hashlib
import ssl
from collections.abc import Callable
from typing import Any, TypeVar

from inlay.card import Address
from inlay.digest import Secret
from inlay.errors import OverloadedError
from inlay.transport.connection import HANDSHAKE_SECONDS, Connection
from inlay.transport.embeds_cache import EmbedsCache
from inlay.transport.handshake import Handshake, HandshakeError
from inlay.transport.memory import ReceiveMemory

T = TypeVar("T")

_BACKLOG = 1024
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
        return int(self._server.sockets[0].getsockname()[1])

    def _accept(self) -> Connection[Any]:
        handshake = Handshake(self._secret, self._fingerprint, dials=False)
        connection: Connection[Any] = Connection(
            handshake,
            self._hears,
            self._memory,
            self._cache,
            check=lambda transport: self._admit(connection),
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
        for connection in tuple(self._unproven):
            connection.abort()


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
    fingerprint = address.fingerprint

    def check(transport: asyncio.BaseTransport) -> None:
        if fingerprint:
            shown = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
            if hashlib.sha256(shown or b"").digest() != fingerprint:
                raise HandshakeError("another certificate than the worker's card names")

    handshake = Handshake(secret, fingerprint, dials=True)
    connection: Connection[Any] = Connection(handshake, hears, memory, cache, check=check)
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            await asyncio.get_running_loop().create_connection(
                lambda: connection,
                address.host,
                address.port,
                ssl=_pinned() if fingerprint else None,
                server_hostname="inlay" if fingerprint else None,
            )
            await asyncio.shield(connection.ready)
    except (OSError, HandshakeError, ValueError) as error:
        connection.abort()
        raise OverloadedError(
            f"no connection to {address.host}:{address.port}: {error}", retry_after=1
        ) from error
    return connection


def _pinned() -> ssl.SSLContext:
    """Return a context that asks no authority: the certificate's digest comes with the card."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
