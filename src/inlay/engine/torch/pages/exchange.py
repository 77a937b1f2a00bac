"""`PageExchange`: pages brought here for requests, and given to peers."""

import asyncio
import logging
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from collections.abc import Sequence as Run
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from msgspec.structs import replace

from inlay.base import liveness
from inlay.base.blocks import BlockPool
from inlay.base.errors import (
    DeadlineExceededError,
    EngineError,
    InlayError,
    InvalidRequestError,
    OverloadedError,
)
from inlay.base.single_flight import SingleFlight
from inlay.engine.api import PeerWorkers
from inlay.engine.shell import send
from inlay.engine.torch.needs import PAGES, PAGES_AGAIN, Need, Result
from inlay.engine.torch.pages.answer import PageAnswer
from inlay.engine.torch.pages.cached import CachedPages, MissingPages
from inlay.engine.torch.pages.copying import PageSealer
from inlay.engine.torch.pages.fetching import (
    WAIT_SECONDS,
    PageFetch,
    PageSource,
    PeerSource,
    TierSource,
)
from inlay.engine.torch.pages.price import LEAST_SECONDS, WorkerPrice
from inlay.engine.torch.pages.tiers import PageTiers
from inlay.engine.torch.step import Core
from inlay.messages.card import Stats
from inlay.messages.digest import BLOCK_DIGEST_SIZE
from inlay.messages.request import PAGES as PORT
from inlay.messages.request import PORTS, Emit, Output, PageQuery, Payload, Request, Task

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_ASKED = 64
"""Questions of peers at a time, with the answers that they have not yet read."""
MAX_ASKED_BYTES = 512 << 20
"""Bytes of these answers; one is given however large it is."""
MAX_FETCHES = 4
"""Fetches at a time; each holds the memory of a few pieces."""
MAX_PREFETCHES = 16
"""Prefetches at a time, which wait for a peer most of the time."""
PREFETCH_SECONDS = 600.0
"""Seconds after which a prefetch ends that has no deadline, and that nobody has stopped."""
_SILENCE_SECONDS = 10.0
"""Seconds after which a peer that computes pages, and says nothing, is given up."""


CallSoon: TypeAlias = Callable[[Callable[[], object]], object]
"""Calls a function on the event loop, soon. In any thread."""


FindMissing: TypeAlias = Callable[[], Awaitable[MissingPages]]
"""Returns the pages that a request lacks now. Raises `InlayError`."""


class _Giving(NamedTuple):
    """A peer's question that is being answered, and what ends it."""

    task: "asyncio.Task[None]"
    answer: PageAnswer
    end: Callable[[], None]


class AskCore(Protocol):
    """Calls a function with the core between two steps."""

    def __call__(self, question: Callable[[Core], T], /) -> Awaitable[T]:
        """Return its result. Raises its error, or `EngineError` if the engine does not run."""


class PageExchange:
    """Pages of one engine that come from its tiers and from other workers, and go to these.

    For one event loop.

    While sequences run, at most one piece is copied between two steps, whoever asks.

    Args:
        ask: reaches the core.
        sealer: of the model's records.
        tiers: where pages are kept that the cache evicts, or None.
        price: decides whether to fetch.
        gives: whether peers are given pages.

    Attributes:
        price: as above.
        tiers: as above.
        peers: reaches other workers, or None.
        num_fetched: pages that came from peers.
        num_loaded: pages that came from each tier, by its name.
        num_given: pages that went to them.
    """

    def __init__(
        self,
        ask: AskCore,
        sealer: PageSealer,
        tiers: PageTiers | None = None,
        price: WorkerPrice | None = None,
        *,
        gives: bool = True,
    ) -> None:
        self.price = price or WorkerPrice()
        self.tiers = tiers
        self.peers: PeerWorkers | None = None
        self.num_fetched = 0
        self.num_loaded: Counter[str] = Counter()
        self._gives = gives
        self.num_given = 0
        self._core = ask
        self._sealer = sealer
        self._turn = asyncio.Lock()
        self._places = asyncio.Semaphore(MAX_FETCHES)
        self._prefetches = asyncio.Semaphore(MAX_PREFETCHES)
        self._flights: SingleFlight[bytes, None] = SingleFlight()
        # All that run, those too that are stopped and have not ended yet.
        self._tasks: set[asyncio.Task[None]] = set()
        self._giving: dict[str, _Giving] = {}
        # Memory of answers that are made, or that the transport still holds: a slow reader takes
        # places, too.
        self._answers: set[PageAnswer] = set()
        self._blocks: BlockPool | None = None
        self._step = asyncio.Event()
        self._num_waiting = 0

    def counted(self, stats: Stats) -> Stats:
        """Return `stats` with what came and went."""
        stats = stats if self.tiers is None else self.tiers.counted(stats)
        return replace(
            stats,
            kv_pages_fetched=self.num_fetched,
            kv_pages_given=self.num_given,
            kv_pages_loaded=self.num_loaded.total(),
            kv_pages_from_disk=self.num_loaded["disk"],
        )

    def may_bring(self, request: Request) -> bool:
        """True if anybody may have pages for a request that has not started."""
        return bool(self._sources(request, PAGES))

    def start(
        self, request: Request, need: Need, done: Callable[[Result], object]
    ) -> Callable[[], object]:
        """As `Provider`; what does not come is computed."""
        return self._spawn(self._provide(request, self._sources(request, need), done)).cancel

    def _sources(self, request: Request, need: Need) -> list[PageSource]:
        # What the tiers have is brought for the request itself; peers were asked at its start.
        tiers = None if request.prefetch else self.tiers
        sources: list[PageSource] = []
        if tiers is not None:
            sources += [TierSource(tiers, tier) for tier in tiers.stores if len(tier)]
        if self.peers is not None and need != PAGES_AGAIN:
            sources += [
                PeerSource(request, address, self.peers, self._sealer.shape)
                for address in request.peers_of(PORT)
            ]
        return sources

    async def _provide(
        self, request: Request, sources: Run[PageSource], done: Callable[[Result], object]
    ) -> None:
        await self._bring(request, sources)
        # Not in a `finally`: nobody waits for what was stopped.
        done(None)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def forget(self) -> None:
        """Forget what the tiers have."""
        if self.tiers is not None:
            await asyncio.to_thread(self.tiers.clear)

    async def rest(self) -> None:
        """Give the tiers' host memory back."""
        if self.tiers is not None:
            await asyncio.to_thread(self.tiers.rest)

    async def close(self) -> None:
        """Return once nothing runs any more, and the tiers are closed; the core has ended."""
        self.stop_all_giving()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.tiers is not None:
            await asyncio.to_thread(self.tiers.close)

    async def _bring(self, request: Request, sources: Run[PageSource]) -> None:
        """Fill the cache with what a request lacks. Raises nothing."""
        find: FindMissing = partial(self._core, lambda core: core.find_missing_pages(request))
        try:
            lack = await find()
            if lack.positions and request.prefetch:
                async with liveness.timeout(request.deadline or PREFETCH_SECONDS):
                    await self._flights.run(lack.name, lambda: self._follow(lack, find, sources[0]))
            elif lack.positions:
                patience = self.price.timeout_for(lack.positions, request.deadline)
                async with liveness.timeout(patience):
                    # Requests with one prompt come together: one of them fetches for all.
                    await self._flights.run(
                        lack.name, lambda: self._fetch(lack, find, sources, patience)
                    )
        except TimeoutError:
            log.info("request %s computes the pages that did not come in time", request.id)
        except InlayError as error:
            log.info("request %s computes all pages: %s", request.id, error.message)
        except Exception:
            log.exception("fetching pages for request %s failed", request.id)

    async def _fetch(
        self,
        lack: MissingPages,
        find: "FindMissing",
        sources: Run[PageSource],
        patience: float,
    ) -> None:
        """Fill the cache from one source after the other, until nothing is lacking.

        Each is asked for what is lacking then, if that is worth it, and given up where it says
        nothing for its part of the time that is left.
        """
        async with self._places:
            until = liveness.now() + patience
            for place, source in enumerate(sources):
                if not self.price.is_worth(source.name, lack.positions, lack.num_bytes):
                    continue
                left = max(until - liveness.now(), LEAST_SECONDS)
                num_pages = await self._fetch_from(source, lack, left / (len(sources) - place))
                if num_pages == lack.num_pages:
                    return
                if num_pages:
                    lack = await find()
                if not lack.positions:
                    return

    async def _follow(self, lack: MissingPages, find: "FindMissing", source: PageSource) -> None:
        """Fill the cache with pages that a peer is computing, until all are here, or it fails."""
        async with self._prefetches:
            while lack.positions:
                if not self.price.is_worth(source.name, lack.positions, lack.num_bytes):
                    return
                fetch = PageFetch(lack, source, self._between_steps, self._sealer, _SILENCE_SECONDS)
                try:
                    await fetch.run()
                finally:
                    self.num_fetched += fetch.num_pages
                if fetch.num_pages == lack.num_pages:
                    return
                lack = await find()

    async def _fetch_from(self, source: PageSource, lack: MissingPages, silence: float) -> int:
        """Return the number of pages that a source gave."""
        fetch = PageFetch(lack, source, self._between_steps, self._sealer, silence)
        began = liveness.now()
        slow = False
        try:
            await fetch.run()
        except (asyncio.CancelledError, DeadlineExceededError) as error:
            slow = True
            if isinstance(error, asyncio.CancelledError):
                raise
            log.warning("%s gave %d pages: %s", source.name, fetch.num_pages, error.message)
        except InlayError as error:
            log.warning("%s gave %d pages: %s", source.name, fetch.num_pages, error.message)
        finally:
            if isinstance(source, PeerSource):
                self.num_fetched += fetch.num_pages
            else:
                self.num_loaded[str(source.name)] += fetch.num_pages
            if fetch.num_pages or slow:
                self.price.fetched(source.name, fetch.num_bytes, liveness.now() - began)
                price = self.price.of(source.name, lack.positions, lack.num_bytes)
                if price is not None and self.tiers is not None and isinstance(source, TierSource):
                    self.tiers.cost_updated(source.name, price)
        return fetch.num_pages

    def give(self, request: Request, emit: Emit) -> None:
        query = request.params
        if not self._gives:
            raise InvalidRequestError("this worker gives no pages: see --enable-kv-fetch")
        if not isinstance(query, PageQuery):
            raise InvalidRequestError(f"a request to {request.task} has no pages to ask for")
        shape = self._sealer.shape
        if query.layout != shape.layout:
            raise InvalidRequestError("the pages here have another layout than those asked for")
        if not 0 <= query.group < len(shape.sizes):
            raise InvalidRequestError(
                f"page group {query.group} is asked for, groups are 0 to {len(shape.sizes) - 1}"
            )
        count, rest = divmod(len(query.digests), BLOCK_DIGEST_SIZE)
        most = shape.question(query.group)
        if rest or not 0 < count <= most:
            raise InvalidRequestError(
                f"digests of {len(query.digests)} bytes; allowed are 1 to {most} of "
                f"{BLOCK_DIGEST_SIZE} bytes each"
            )
        if request.id in self._giving:
            raise InvalidRequestError(f"a request with id {request.id!r} is under way")
        asked, held = len(self._answers), sum(answer.num_bytes for answer in self._answers)
        self._blocks = self._blocks or BlockPool()
        answer = PageAnswer(count, shape.record_bytes(query.group), query.into, self._blocks)
        if asked >= MAX_ASKED or (asked and held + answer.num_bytes > MAX_ASKED_BYTES):
            raise OverloadedError(
                f"{asked} others ask for pages, {held} bytes of them", retry_after=1
            )
        self._answers.add(answer)
        task = self._spawn(self._give(request, query, answer, emit))
        task.add_done_callback(lambda _: self._made(answer))
        self._giving[request.id] = _Giving(task, answer, lambda: emit(request.end("abort")))

    def _made(self, answer: PageAnswer) -> None:
        if not answer.is_held:
            self._answers.discard(answer)

    def stop_giving(self, request_id: str) -> None:
        """End a peer's question; unknown ids are ignored."""
        giving = self._giving.pop(request_id, None)
        if giving is not None:
            giving.task.cancel()
            giving.answer.close()
            giving.end()

    def stop_all_giving(self) -> None:
        """End all questions of peers."""
        for request_id in tuple(self._giving):
            self.stop_giving(request_id)

    async def _give(
        self, request: Request, query: PageQuery, answer: PageAnswer, emit: Emit
    ) -> None:
        digests = [
            query.digests[start : start + BLOCK_DIGEST_SIZE]
            for start in range(0, len(query.digests), BLOCK_DIGEST_SIZE)
        ]
        try:
            await self._computed(query, digests[0])
            count = await self._read(query.group, digests, answer)
            data = answer.data(count)
            if answer.num_bytes and len(data):
                answer.is_held = True
                weakref.finalize(data.view.obj, self._answers.discard, answer).atexit = False
            self.num_given += count
            shape = count, self._sealer.shape.record_bytes(query.group)
            payload = Payload(PORTS[Task.PAGES], "uint8", shape, data)
            output = Output(
                request.id, request.attempt, 0, finish_reason="stop", payloads=(payload,)
            )
        except InlayError as error:
            output = request.end("error", error)
        except Exception as error:
            log.exception("pages for a peer were not read")
            failed = EngineError(f"the pages were not read: {type(error).__name__}")
            output = request.end("error", failed)
        del self._giving[request.id]
        send(request, emit, output)

    async def _read(self, group: int, digests: Run[bytes], answer: PageAnswer) -> int:
        """Write records of the first `digests`; return their number."""
        done = 0
        while done < len(digests):
            start, rest = done, digests[done:]

            def read(cached: CachedPages, start: int = start, rest: Run[bytes] = rest) -> int:
                reading = partial(cached.read, self._sealer, group, rest)
                return answer.write(start, len(digests), reading) or 0

            count = await self._between_steps(read)
            if not count:
                break
            done += count
        return done

    async def _computed(self, query: PageQuery, digest: bytes) -> None:
        """Wait until a page is cached, no longer than the question allows."""
        if not 0 < query.within <= WAIT_SECONDS:
            return
        self._num_waiting += 1
        try:
            async with liveness.timeout(query.within):
                while True:
                    # Before the look: a step that ends after it must not be missed.
                    step = self._step
                    if await self._core(lambda core: core.cached.has(query.group, digest)):
                        return
                    await step.wait()
        except TimeoutError:
            log.debug("a page that a peer waits for was not computed in %g s", query.within)
        finally:
            self._num_waiting -= 1

    def stepped(self, positions: int, seconds: float, call: CallSoon) -> None:
        """Note a step. In the engine's thread.

        Args:
            positions: computed in it.
            seconds: that it took.
            call: calls a function on the event loop, soon.
        """
        self.price.computed(positions, seconds)
        if self._num_waiting:
            call(self._look_again)

    def _look_again(self) -> None:
        self._step.set()
        self._step = asyncio.Event()

    async def _between_steps(self, question: Callable[[CachedPages], T]) -> T:
        """Call `question` with the pages after others' questions, one between two steps."""
        async with self._turn:
            return await self._core(lambda core: question(core.cached))
