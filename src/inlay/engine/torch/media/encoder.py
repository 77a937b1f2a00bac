"""`TowerEncoder`: media of prompts to rows, with a cache, in batches, within a byte budget."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from msgspec.structs import replace
from torch import Tensor

from inlay.base.errors import EngineError, InlayError, OverloadedError
from inlay.base.slots import Slots
from inlay.embedding.cache import Bundle, ResultCache
from inlay.engine.decoding import (
    DECODING_THREADS,
    MEMORY_BYTES,
    PLACES,
    Decoders,
    Room,
    image_key,
    in_thread,
)
from inlay.engine.torch.media.readers import Readers
from inlay.engine.torch.media.tower import Arrays, Tower, as_rows
from inlay.media.spec import NAMED, MediaSpec
from inlay.messages.card import SelfCheck, Stats
from inlay.messages.prompt import Media, Rows

_logger = logging.getLogger(__name__)

_BATCH_PIXELS = 4 << 20
"""Pixels of the items that a tower sees together, beyond the first."""


@dataclass(eq=False, slots=True)
class _ReadyItem:
    """An item whose tower inputs are ready."""

    kind: str
    inputs: dict[str, Tensor]
    count: int
    pixels: int
    done: "asyncio.Future[Arrays]" = field(default_factory=lambda: asyncio.Future())


class TowerEncoder:
    """Encodes images, audio and videos for the requests of one event loop.

    Files are decoded and made into inputs in threads, a few at a time, within a budget of bytes.
    One more thread runs the towers, each time for all items of a kind that are ready. Clients take
    turns.

    Attributes:
        cache: rows by (digest of the item, salt).
        encoded: items that went through a tower.
        steps: runs of a tower, each for one item or more.
        dtype: of the rows, by torch's name.
        hidden_size: elements of a row.
        spec: how media are laid out.
        self_check: result of the check of the tower, and of the language model behind it.
    """

    def __init__(
        self,
        tower: Tower | None,
        readers: Readers,
        spec: MediaSpec,
        *,
        cache_bytes: int,
        dtype: str,
        hidden_size: int,
        self_check: SelfCheck | None = None,
        memory: int = MEMORY_BYTES,
        places: int = PLACES,
    ) -> None:
        """Start the threads.

        Args:
            tower: computes rows; None if other workers alone do.
            readers: make the tower's inputs, by kind of media; none without a tower.
            spec: how media are laid out.
            cache_bytes: maximum size of the cached rows; 0 caches nothing.
            dtype: of the rows, by torch's name.
            hidden_size: elements of a row.
            self_check: result of the check at start.
            memory: bytes of decoded files and tower inputs at the same time.
            places: items in hand at the same time.
        """
        self.cache = ResultCache(cache_bytes)
        self.encoded = self.steps = 0
        self.dtype = dtype
        self.hidden_size = hidden_size
        self.self_check = self_check
        self._tower = tower
        self._readers = readers
        self.spec = spec
        self._room = Room(places, memory)
        self._headers = ThreadPoolExecutor(1, "inlay-media-headers")
        self._decoders = Decoders("inlay-media")
        # Videos and sounds, for a minute even: nothing else waits behind them, and of the places of
        # these a client alone has half.
        self._long = ThreadPoolExecutor(DECODING_THREADS, "inlay-long-media")
        self._long_turns = Slots(DECODING_THREADS)
        self._encoder = ThreadPoolExecutor(1, "inlay-tower")
        self._queue: deque[_ReadyItem] = deque()
        self._running: asyncio.Task[None] | None = None

    async def rows(
        self,
        run: Media,
        *,
        salt: str | None = None,
        client: Hashable = None,
        priority: int = 0,
        elsewhere: Callable[[], Awaitable[Arrays]] | None = None,
    ) -> Rows:
        """Return the rows of the whole item that `run` is of.

        Equal items are encoded once at a time, and not again while the cache has them; only
        requests with the same salt share.

        Args:
            run: any run of the item that has its data.
            salt: of the request.
            client: whose it is.
            priority: lower is sooner.
            elsewhere: asks other workers for the rows; where none gives them, they are made here.

        Raises:
            InvalidRequestError: the file is damaged, is too large, or is not of the size that the
                prompt was laid out for.
            EngineError: the tower failed.
            OverloadedError: nobody encodes the image now.
        """
        key = image_key(run.digest, salt)

        async def compute(_: Sequence[int]) -> list[Bundle]:
            if elsewhere is not None:
                try:
                    return [await elsewhere()]
                except OverloadedError as error:
                    if not self.is_local:
                        raise
                    _logger.warning("an image is encoded here: %s", error.message)
            return [await self.encode(run, client, priority)]

        (arrays,) = await self.cache.fetch([key], compute)
        return as_rows(arrays, atomic=self.spec.atomic)

    def counted(self, stats: Stats) -> Stats:
        """Return `stats` with the counters of media."""
        return replace(
            stats,
            image_cache_bytes=self.cache.kept.used,
            image_cache_hits=self.cache.hits + self.cache.joined,
            image_cache_misses=self.cache.misses,
            image_cache_evictions=self.cache.evictions,
        )

    @property
    def is_local(self) -> bool:
        """True if this process can encode; else it only keeps what others have encoded."""
        return self._tower is not None

    async def close(self) -> None:
        """Stop the threads; items that wait are cancelled."""
        if self._running is not None:
            self._running.cancel()
        for waiting in self._queue:
            waiting.done.cancel()
        self._queue.clear()
        await asyncio.to_thread(self._shut_down)

    def _shut_down(self) -> None:
        self._headers.shutdown(cancel_futures=True)
        self._decoders.close()
        self._long.shutdown(cancel_futures=True)
        self._encoder.shutdown(cancel_futures=True)

    async def encode(self, run: Media, client: Hashable, priority: int) -> Arrays:
        """Compute the rows of an item, past the cache. Arguments and errors as for `rows`."""
        tower = self._tower
        if tower is None:
            raise OverloadedError(
                f"this worker encodes no {run.kind} itself (--language-model-only), and no worker "
                f"with --task encode of the same model, dtype and encoder ({self.spec.encoder_id}) "
                "is ready",
                retry_after=1,
            )
        plan = await in_thread(self._headers, self._readers[run.kind].plan, run)
        async with AsyncExitStack() as held:
            if plan.long:
                await held.enter_async_context(self._long_turns.taken(client))
            await held.enter_async_context(self._room.taken(plan.bytes, client, priority))
            if plan.long:
                inputs = await in_thread(self._long, plan.read)
            else:
                inputs = await self._decoders.run(client, priority, plan.read)
            waiting = _ReadyItem(run.kind, inputs, run.total, plan.pixels)
            self._queue.append(waiting)
            if self._running is None or self._running.done():
                self._running = asyncio.create_task(self._run(tower))
            try:
                return await waiting.done
            finally:
                if waiting in self._queue:
                    self._queue.remove(waiting)

    async def _run(self, tower: Tower) -> None:
        """Encode what waits, together, until nothing does."""
        while self._queue:
            # Requests that were decoded at the same time share a batch.
            await asyncio.sleep(0)
            batch = self._batch()
            if not batch:
                continue
            found: Sequence[Arrays | InlayError]
            try:
                found = await in_thread(
                    self._encoder,
                    tower.encode,
                    [waiting.inputs for waiting in batch],
                    [waiting.count for waiting in batch],
                )
            except Exception as error:
                _logger.exception("%d items could not be encoded", len(batch))
                failed = EngineError(
                    f"{NAMED[batch[0].kind]} could not be encoded: {type(error).__name__}"
                )
                found = [failed] * len(batch)
            self.encoded += len(batch)
            self.steps += 1
            for waiting, result in zip(batch, found, strict=True):
                if waiting.done.done():
                    continue
                if isinstance(result, InlayError):
                    waiting.done.set_exception(result)
                else:
                    waiting.done.set_result(result)

    def _batch(self) -> list[_ReadyItem]:
        batch: list[_ReadyItem] = []
        pixels = 0
        while self._queue:
            first = self._queue[0]
            if batch and (first.kind != batch[0].kind or pixels + first.pixels > _BATCH_PIXELS):
                break
            waiting = self._queue.popleft()
            pixels += waiting.pixels
            batch.append(waiting)
        return batch
