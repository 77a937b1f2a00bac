"""Connections of one worker to others, which it asks for payloads: no frontend is between them."""

import asyncio
import secrets
from collections.abc import Sequence

from inlay.base import liveness
from inlay.base.address import Address
from inlay.base.errors import OverloadedError
from inlay.base.single_flight import SingleFlight
from inlay.messages.digest import Secret
from inlay.messages.outputs import payloads_of
from inlay.messages.request import PageQuery, Payload, Request
from inlay.transport.link import PeerLink
from inlay.transport.listener import dial
from inlay.transport.memory import ReceiveMemory
from inlay.transport.messages import FromWorker

RECEIVE_BYTES = 1 << 30
"""Bytes of payloads that may be received or used at a time."""
MAX_PEERS = 64
"""Connections at a time."""
IDLE_SECONDS = 60.0
"""Seconds after which a connection that nobody uses is closed."""
AVOIDED_SECONDS = 1.0
"""Seconds for which a worker that could not be reached is not dialled again."""


class _Peer:
    """A connection, and the requests that use it."""

    __slots__ = ("idle", "link", "running", "uses")

    def __init__(self, link: PeerLink) -> None:
        self.link = link
        self.running: asyncio.Task[None] = asyncio.create_task(link.run())
        self.uses = 0
        self.idle: asyncio.TimerHandle | None = None


class PeerConnections:
    """Asks workers by their addresses. For one event loop.

    A peer is dialled at its first request as a frontend dials it: both ends prove the namespace's
    secret, and its certificate is the one that its address names. All requests to a peer share one
    connection. What is asked is a `Request` as frontends send it; a peer grants nothing that a
    frontend could not ask.

    Args:
        secret: of the namespace.
        receive_bytes: of payloads that may be received or used at a time; further ones wait.
    """

    def __init__(self, secret: Secret, *, receive_bytes: int = RECEIVE_BYTES) -> None:
        self._secret = secret
        self._memory = ReceiveMemory(receive_bytes)
        self._peers: dict[Address, _Peer] = {}
        self._dialling: SingleFlight[Address, _Peer] = SingleFlight()
        self._avoided: dict[Address, float] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Number of connections."""
        return len(self._peers)

    async def payloads(
        self, address: Address, request: Request, within: float | None = None
    ) -> Sequence[Payload]:
        """Return the payloads of `request`, done by the worker at `address`.

        A caller that is cancelled, or that waited too long, stops the request there.

        Args:
            address: from the worker's card.
            request: of any task that gives payloads.
            within: seconds, as `inlay.base.liveness` counts them; None for no bound.

        Raises:
            OverloadedError: it is not reached, is gone, or has not answered in time.
            InlayError: its own answer.
        """
        if within is None:
            return await self._payloads(address, request)
        try:
            async with liveness.timeout(within):
                return await self._payloads(address, request)
        except TimeoutError as error:
            raise OverloadedError(
                f"{address.host}:{address.port} has not answered for {within:g} s", retry_after=1
            ) from error

    async def _payloads(self, address: Address, request: Request) -> Sequence[Payload]:
        peer = self._peers.get(address)
        if peer is None:
            peer = await self._dialling.run(address, lambda: self._dialled(address))
        peer.uses += 1
        if peer.idle is not None:
            peer.idle.cancel()
        try:
            params = request.params
            answer_bytes = params.answer_bytes if isinstance(params, PageQuery) else 0
            stream = peer.link.send(request, answer_bytes)
            try:
                return await payloads_of(stream)
            finally:
                stream.cancel()
        finally:
            peer.uses -= 1
            if not peer.uses:
                peer.idle = asyncio.get_running_loop().call_later(
                    IDLE_SECONDS, self._drop, address, peer
                )

    async def _dialled(self, address: Address) -> _Peer:
        """Connect, and wait for the other's card."""
        now = liveness.now()
        self._avoided = {key: until for key, until in self._avoided.items() if until > now}
        if address in self._avoided:
            raise OverloadedError(f"{address.host}:{address.port} is not reached", retry_after=1)
        self._make_room()
        try:
            carrier = await dial(address, self._secret, FromWorker, self._memory)
        except OverloadedError:
            self._avoided[address] = liveness.now() + AVOIDED_SECONDS
            raise
        link = PeerLink(
            f"{address.host}:{address.port}",
            carrier,
            lambda: None,
            scope=f"@{secrets.token_hex(4)}",
        )
        peer = _Peer(link)
        peer.running.add_done_callback(lambda _: self._forget(address, peer))
        try:
            await link.wait_ready()
        except BaseException:
            self._end(peer)
            raise
        self._peers[address] = peer
        return peer

    def _make_room(self) -> None:
        """Close an unused connection where there are too many.

        Raises `OverloadedError` if all are used.
        """
        if len(self._peers) < MAX_PEERS:
            return
        unused = next((pair for pair in self._peers.items() if not pair[1].uses), None)
        if unused is None:
            raise OverloadedError(f"{MAX_PEERS} other workers are being asked", retry_after=1)
        self._drop(*unused)

    def _drop(self, address: Address, peer: _Peer) -> None:
        if not peer.uses:
            self._forget(address, peer)
            self._end(peer)

    def _forget(self, address: Address, peer: _Peer) -> None:
        if self._peers.get(address) is peer:
            del self._peers[address]
        if peer.idle is not None:
            peer.idle.cancel()

    def _end(self, peer: _Peer) -> None:
        """Close a connection; its task ends with it."""
        peer.link.close()
        self._ending.add(peer.running)
        peer.running.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Close all connections; what is being asked ends with `OverloadedError`."""
        dialling = self._dialling.cancel()
        for peer in tuple(self._peers.values()):
            self._end(peer)
        await asyncio.gather(*dialling, *self._ending, return_exceptions=True)
