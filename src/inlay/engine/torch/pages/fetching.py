"""One fetch: the pages that a request lacks, from one source."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from inlay.base import liveness
from inlay.base.address import Address
from inlay.base.errors import DeadlineExceededError, EngineError
from inlay.engine.api import PeerWorkers
from inlay.engine.torch.pages.cached import CachedPages, MissingPages, PageBatch
from inlay.engine.torch.pages.copying import PageSealer, RecordShape
from inlay.engine.torch.pages.tiers import PageTiers, Tier
from inlay.messages.request import PORTS, PageQuery, Payload, Request, Task

AHEAD = 2
"""Questions of a fetch at a time: its memory is that of so many answers."""
WAIT_SECONDS = 2.0
"""Seconds for which a peer may wait until it has computed the first page of a piece."""

_ALIGNMENT = 8
"""Bytes that elements are aligned to, at least."""

T = TypeVar("T")


class BetweenSteps(Protocol):
    """Calls a function with the pages of the cache between two steps, one piece in each turn."""

    def __call__(self, question: Callable[[CachedPages], T], /) -> Awaitable[T]:
        """Return its result. Raises its error, or `EngineError` if the engine does not run."""


class PageSource(Protocol):
    """A peer, or a tier of this worker."""

    @property
    def name(self) -> Address | str:
        """Name of it, by which its price is known."""

    @property
    def waits(self) -> bool:
        """True if it computes the pages now, so that more may come later."""

    async def given(self, piece: PageBatch) -> Tensor:
        """Return records of the first pages of `piece`: uint8 [n, record_bytes].

        Raises `InlayError` if it gives none.
        """

    def damaged(self, group: int, digest: bytes) -> None:
        """Take note that the record it gave of a page is none of it."""
        ...


class _Received:
    """Bytes that were received, as numpy takes memory: writable to torch, which knows no other.

    Nothing writes to it. It is not copied, and given back with the last array that shows it.
    """

    def __init__(self, view: memoryview) -> None:
        self._view = view
        shown = np.frombuffer(view, np.uint8).__array_interface__
        self.__array_interface__ = {**shown, "data": (shown["data"][0], False)}


class PeerSource:
    """`PageSource`: another worker.

    Args:
        request: that lacks the pages.
        address: of the peer.
        peers: reaches it.
        shape: of the records.
    """

    def __init__(
        self, request: Request, address: Address, peers: PeerWorkers, shape: RecordShape
    ) -> None:
        self.name = address
        self.waits = request.prefetch
        self._request = request
        self._peers = peers
        self._shape = shape

    async def given(self, piece: PageBatch) -> Tensor:
        """Ask the peer. Raises `EngineError` if its answer is none to what was asked."""
        width = self._shape.record_bytes(piece.group)
        asked = Request(
            id=f"{self._request.id}/pages/{piece.group}/{piece.first}",
            task=Task.PAGES,
            prompts=(),
            params=PageQuery(
                self._shape.layout,
                piece.group,
                b"".join(piece.digests),
                WAIT_SECONDS if self.waits else 0.0,
                len(piece.digests) * width,
            ),
            trace=self._request.trace,
            client=self._request.client,
        )
        payloads = await self._peers.payloads(self.name, asked)
        match payloads:
            case [Payload(port, "uint8", (count, size), data)] if (
                port == PORTS[Task.PAGES]
                and size == width
                and count <= len(piece.digests)
                and len(data) == count * width
            ):
                received = np.asarray(_Received(data.view))
                if received.ctypes.data % _ALIGNMENT:
                    # A small answer lies where its message does.
                    received = received.copy()
                return torch.from_numpy(received).view(count, width)
        raise EngineError(
            f"it answered with {[(one.port, one.dtype, one.shape) for one in payloads]}, asked for "
            f"at most {len(piece.digests)} records of {width} bytes"
        )

    def damaged(self, group: int, digest: bytes) -> None:
        """Do nothing: it is not asked any more."""


class TierSource:
    """`PageSource`: a tier of this worker."""

    waits = False

    def __init__(self, tiers: PageTiers, tier: Tier) -> None:
        self.name = tier.name
        self._tiers = tiers
        self._tier = tier

    async def given(self, piece: PageBatch) -> Tensor:
        """Read the tier."""
        return await self._tiers.reading(self._tier, piece.group, piece.digests)

    def damaged(self, group: int, digest: bytes) -> None:
        """Drop the record."""
        self._tiers.drop(self._tier, group, digest)


class PageFetch:
    """Fills the cache with what a source gives, piece by piece, each as soon as it is there.

    Args:
        lack: pages that a request lacks.
        source: gives them.
        ask: reaches the cache.
        sealer: of the records.
        silence: seconds that the source may take for its next piece.

    Attributes:
        num_pages: pages that came and were good.
        num_bytes: bytes of these.
    """

    def __init__(
        self,
        lack: MissingPages,
        source: PageSource,
        ask: BetweenSteps,
        sealer: PageSealer,
        silence: float,
    ) -> None:
        self.num_pages = 0
        self.num_bytes = 0
        self._lack = lack
        self._source = source
        self._ask = ask
        self._sealer = sealer
        self._silence = silence

    async def run(self) -> None:
        """Fetch until the source has no more for now.

        The pages of windows come last, for the end that those of full attention have reached. Of a
        source that still computes, that end moves on: they are asked for at the last one alone.
        From another, where it has them at none such, for ends before it, ever further ones.

        Raises:
            DeadlineExceededError: the source says nothing.
            EngineError: what came is not what was asked for.
            InlayError: the source's answer, or it is not reached.
        """
        reached = self._lack.last_end(await self._take(self._lack.full()))
        first = self._lack.stop - 1 if self._source.waits else self._lack.cached
        back = 1
        while reached > first and await self._take(self._lack.windows(reached)) < self._lack.stop:
            reached, back = self._lack.last_end(reached - back), 2 * back

    async def _take(self, pieces: Iterator[PageBatch]) -> int:
        """Take pieces until one is not whole; return the page index that all groups reached."""
        reached = self._lack.stop
        ahead: deque[tuple[PageBatch, asyncio.Task[Tensor]]] = deque()
        try:
            while True:
                while len(ahead) < AHEAD and (piece := next(pieces, None)) is not None:
                    ahead.append((piece, asyncio.create_task(self._given(piece))))
                if not ahead:
                    return reached
                piece, giving = ahead[0]
                records = await self._in_time(giving)
                ahead.popleft()
                whole = await self._put(piece, records)
                if not whole:
                    return min(reached, piece.first + len(records))
        finally:
            for _, giving in ahead:
                giving.cancel()
            await asyncio.gather(*(giving for _, giving in ahead), return_exceptions=True)

    async def _in_time(self, giving: "asyncio.Task[Tensor]") -> Tensor:
        try:
            async with liveness.timeout(self._silence):
                return await giving
        except TimeoutError as error:
            raise DeadlineExceededError(f"no page came for {self._silence:.3g} s") from error

    async def _given(self, piece: PageBatch) -> Tensor:
        return await self._source.given(piece)

    async def _put(self, piece: PageBatch, records: Tensor) -> bool:
        """Put records into the cache; True if they are all of the piece's, and had room."""
        done = 0
        while done < len(records):
            rest = PageBatch(piece.group, piece.first + done, piece.digests[done:])
            fill = partial(
                CachedPages.fill,
                sealer=self._sealer,
                lack=self._lack,
                piece=rest,
                records=records[done:],
            )
            filled = await self._ask(fill)
            if filled is None:
                return False
            done += filled.pages
            self.num_pages += filled.pages
            self.num_bytes += filled.pages * records.shape[1]
            if filled.damaged:
                self._source.damaged(piece.group, piece.digests[done])
                raise EngineError(f"page {piece.first + done} is damaged")
        return done == len(piece.digests)
