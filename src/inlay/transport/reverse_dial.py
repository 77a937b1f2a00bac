"""The frontend's end where workers dial: a listener, and invitations to connect to it."""

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from inlay.base.errors import OverloadedError
from inlay.messages.card import Address
from inlay.messages.digest import Secret
from inlay.transport.connection import HANDSHAKE_SECONDS, TcpPeer
from inlay.transport.listener import Listener
from inlay.transport.memory import ReceiveMemory
from inlay.transport.messages import FromWorker, Hello
from inlay.transport.tls import Identity

_TOKEN_BYTES = 16


class ReverseDial:
    """Takes the connections of workers that were invited."""

    def __init__(self, secret: Secret, memory: ReceiveMemory, identity: Identity) -> None:
        self._fingerprint = identity.fingerprint
        self._address: Address | None = None
        self._invited: dict[bytes, asyncio.Future[TcpPeer[FromWorker]]] = {}
        self._greeting: set[asyncio.Task[None]] = set()
        self._listener = Listener(
            secret,
            FromWorker,
            memory,
            self._accepted,
            tls=identity.context,
            fingerprint=identity.fingerprint,
        )

    async def open(self, host: str, bind: str, port: int) -> None:
        """Listen on TCP port `port` of `bind`, any free one for 0; workers dial `host`.

        Raises:
            OSError: it cannot listen there.
        """
        port = await self._listener.listen(bind, port)
        self._address = Address(host, port, self._fingerprint)

    async def call(self, invite: Callable[[Address, bytes], None]) -> TcpPeer[FromWorker]:
        """Return the connection of a worker that `invite` sends the address and a token.

        Raises:
            OverloadedError: it did not connect in time.
        """
        if self._address is None:
            raise OverloadedError("this frontend does not listen yet", retry_after=1)
        token = secrets.token_bytes(_TOKEN_BYTES)
        arrived = self._invited[token] = asyncio.get_running_loop().create_future()
        try:
            invite(self._address, token)
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                connection: TcpPeer[FromWorker] = await arrived
                return connection
        except TimeoutError as error:
            raise OverloadedError(
                f"the worker did not connect to {self._address.host}:{self._address.port} within "
                f"{HANDSHAKE_SECONDS:g} s",
                retry_after=1,
            ) from error
        finally:
            del self._invited[token]

    def _accepted(self, connection: TcpPeer[Any]) -> None:
        task = asyncio.create_task(self._greet(connection))
        self._greeting.add(task)
        task.add_done_callback(self._greeting.discard)

    async def _greet(self, connection: TcpPeer[FromWorker]) -> None:
        with suppress(EOFError, TimeoutError, ValueError, msgspec.MsgspecError):
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                first = await connection.receive()
            arrived = self._invited.get(first.token) if isinstance(first, Hello) else None
            if arrived is not None and not arrived.done():
                arrived.set_result(connection)
                return
        connection.close()

    async def close(self) -> None:
        """Listen no more; connections that were returned stay."""
        self._listener.close()
        for task in self._greeting:
            task.cancel()
        await asyncio.gather(*self._greeting, return_exceptions=True)
