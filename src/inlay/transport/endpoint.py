"""The worker's end of direct connections: a listener, and a request handler behind each of them."""

import asyncio
import logging
from typing import Any

import msgspec

from inlay.base.errors import OverloadedError
from inlay.messages.card import Address
from inlay.messages.digest import Secret
from inlay.transport.api import RequestHandler
from inlay.transport.connection import TcpPeer
from inlay.transport.embeds_cache import EmbedsCache
from inlay.transport.listener import Listener, dial
from inlay.transport.memory import ReceiveMemory
from inlay.transport.messages import Hello, ToWorker
from inlay.transport.serve import serve
from inlay.transport.tls import Identity

log = logging.getLogger(__name__)

RECEIVE_BYTES = 1 << 30
"""Bytes of requests that are being received or used; what the cache keeps comes on top."""
MAX_DIALLING = 64
"""Frontends that are being dialled at a time."""
_CLOSE_SECONDS = 1.0
_TICK_SECONDS = 60.0


class Endpoint:
    """Serves every frontend that connects, and those that it connects to.

    Args:
        handler: runs their requests.
        secret: of the namespace.
        identity: of the TLS server.
        cache: of stored prompts; `cache.max_bytes` of memory is added for it.
        neighbours: whether those of this machine may use shared memory.
    """

    def __init__(
        self,
        handler: RequestHandler,
        secret: Secret,
        identity: Identity,
        cache: EmbedsCache,
        *,
        neighbours: bool = True,
    ) -> None:
        self._handler = handler
        self._secret = secret
        self._cache = cache
        self._memory = ReceiveMemory(RECEIVE_BYTES + cache.max_bytes)
        self._dialling: set[asyncio.Task[None]] = set()
        self._fingerprint = identity.fingerprint
        self._serving: dict[asyncio.Task[None], TcpPeer[ToWorker]] = {}
        self._ticking: asyncio.Task[None] | None = None
        self._listener = Listener(
            secret,
            ToWorker,
            self._memory,
            self._accepted,
            tls=identity.context,
            fingerprint=identity.fingerprint,
            cache=cache,
            neighbours=neighbours,
        )

    async def open(self, host: str, bind: str, port: int) -> Address:
        """Listen on TCP port `port` of `bind`, any free one for 0.

        Returns:
            The address to dial, with `host` for its name.

        Raises:
            OSError: it cannot listen there.
        """
        port = await self._listener.listen(bind, port)
        self._tick_on()
        return Address(host, port, self._fingerprint)

    def dial(self, address: Address, token: bytes) -> None:
        """Connect to a frontend that listens at `address`, and serve it; a failure is logged.

        The frontend that invited is told of nothing: it invites again.
        """
        self._tick_on()
        if len(self._dialling) >= MAX_DIALLING:
            log.warning("an invitation to %s:%d is dropped", address.host, address.port)
            return
        task = asyncio.create_task(self._dial(address, token))
        self._dialling.add(task)
        task.add_done_callback(self._dialling.discard)

    async def _dial(self, address: Address, token: bytes) -> None:
        try:
            connection = await dial(address, self._secret, ToWorker, self._memory, self._cache)
        except OverloadedError as error:
            log.warning("a frontend that invited this worker is not reached: %s", error.message)
            return
        connection.send(Hello(token))
        self._accepted(connection)

    def _accepted(self, connection: TcpPeer[Any]) -> None:
        task = asyncio.create_task(self._serve(connection))
        self._serving[task] = connection
        task.add_done_callback(self._serving.pop)

    async def _serve(self, connection: TcpPeer[ToWorker]) -> None:
        try:
            await serve(connection, self._handler)
        except (ValueError, msgspec.MsgspecError) as error:
            log.warning("a frontend is cut off, as it sent what is no message: %s", error)
        finally:
            connection.close()

    def _tick_on(self) -> None:
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self._cache.tick()

    async def close(self) -> None:
        """Listen no more, and close the connections after what was sent has left."""
        self._listener.close()
        if self._ticking is not None:
            self._ticking.cancel()
        for dialling in self._dialling:
            dialling.cancel()
        tasks = dict(self._serving)
        for connection in tasks.values():
            connection.close()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)
        for task, connection in tasks.items():
            connection.abort()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
