"""One fetch: the pages that a request lacks, from one peer."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from inlay.address import Address
from inlay.engine.api import Peers
from inlay.engine.torch.pages.cached import CachedPages, Lack, Piece
from inlay.engine.torch.pages.copying import Sealer
from inlay.errors import EngineError
from inlay.request import PORTS, PageQuery, Payload, Request, Task

AHEAD = 2
"""Pieces of a fetch that are asked for at a time."""

T = TypeVar("T")


class Ask(Protocol):
    """Calls a function with the pages of the cache between two steps, one piece in each."""

    def __call__(self, question: Callable[[CachedPages], T], /) -> Awaitable[T]:
        """Return its result. Raises its error, or `EngineError` if the engine does not run."""
        ...


class Fetch:
    """Fills the cache with what a peer gives, piece by piece, each as soon as it is there.

    Args:
        request: that lacks the pages.
        lack: what it lacks.
        address: of the peer.
        peers: reaches it.
        ask: reaches the cache.
        sealer: checks what comes.

    Attributes:
        num_pages: pages that came and were good.
        num_bytes: bytes of these.
    """

    def __init__(
        self,
        request: Request,
        lack: Lack,
        address: Address,
        peers: Peers,
        ask: Ask,
        sealer: Sealer,
    ) -> None:
        self.num_pages = 0
        self.num_bytes = 0
        self._request = request
        self._lack = lack
        self._address = address
        self._peers = peers
        self._ask = ask
        self._sealer = sealer
        self._asked = 0

    async def run(self) -> None:
        """Fetch until the peer has no more.

        The pages of windows come last, for the end that those of full attention have reached.

        Raises:
            EngineError: what came is not what was asked for.
            InlayError: the peer's answer, or it is not reached.
        """
        reached = await self._take(self._lack.full())
        if reached > self._lack.cached:
            await self._take(self._lack.windows(reached))

    async def _take(self, pieces: Iterator[Piece]) -> int:
        """Take pieces until one is not whole; return the page index that all groups reached."""
        reached = self._lack.stop
        ahead: deque[tuple[Piece, asyncio.Task[Tensor]]] = deque()
        try:
            while True:
                while len(ahead) < AHEAD and (piece := next(pieces, None)) is not None:
                    ahead.append((piece, asyncio.create_task(self._given(piece))))
                if not ahead:
                    return reached
                piece, giving = ahead[0]
                records = await giving
                ahead.popleft()
                whole = await self._put(piece, records)
                if not whole:
                    return min(reached, piece.first + len(records))
        finally:
            for _, giving in ahead:
                giving.cancel()
            await asyncio.gather(*(giving for _, giving in ahead), return_exceptions=True)

    async def _put(self, piece: Piece, records: Tensor) -> bool:
        """Put records into the cache; True if they are all of the piece's, and had room."""
        shape = self._sealer.shape
        good = await asyncio.to_thread(self._sealer.good, piece.group, piece.digests, records)
        self.num_pages += good
        self.num_bytes += good * records.shape[1]
        data = shape.data(records[:good])
        fits = not good or await self._ask(lambda pages: pages.fill(self._lack, piece, data))
        if good < len(records):
            raise EngineError(f"page {piece.first + good} is damaged")
        return fits and good == len(piece.digests)

    async def _given(self, piece: Piece) -> Tensor:
        """Ask the peer for a piece; return its records, uint8 [n, record_bytes]."""
        self._asked += 1
        shape = self._sealer.shape
        asked = Request(
            id=f"{self._request.id}/pages/{piece.group}/{piece.first}",
            task=Task.PAGES,
            prompts=(),
            params=PageQuery(shape.layout, piece.group, b"".join(piece.digests)),
            trace=self._request.trace,
            client=self._request.client,
        )
        payloads = await self._peers.payloads(self._address, asked)
        width = shape.record_bytes(piece.group)
        match payloads:
            case [Payload(port, "uint8", (count, size), data)] if (
                port == PORTS[Task.PAGES]
                and size == width
                and count <= len(piece.digests)
                and len(data) == count * width
            ):
                return _tensor(data.view, count, width)
        raise EngineError(
            f"it answered with {[(one.port, one.dtype, one.shape) for one in payloads]}, asked for "
            f"at most {len(piece.digests)} records of {width} bytes"
        )


def _tensor(view: memoryview, count: int, width: int) -> Tensor:
    # Copied: the memory of what was received is read-only, and is wanted back soon.
    return torch.from_numpy(np.frombuffer(view, np.uint8).copy()).view(count, width)


__all__ = ["Ask", "Fetch"]
