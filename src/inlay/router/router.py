"""Chooses a worker for each request and follows it to its end."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from random import Random
from typing import NamedTuple, TypeAlias

import msgspec

from inlay.card import Adapter, ModelCard
from inlay.digest import BLOCK_SIZE, Secret
from inlay.errors import DeadlineExceededError, OverloadedError
from inlay.request import PAGES, Diffusion, Request, Source, Task
from inlay.router.admission_queue import AdmissionQueue
from inlay.router.catalog import Catalog, ServedModel
from inlay.router.fleet import Fleet
from inlay.router.key_table import Keys
from inlay.router.kv_index import keys_of
from inlay.router.load_reservation import LoadReservation
from inlay.router.places import Places
from inlay.router.pool import Chosen, Pool, PoolKey
from inlay.router.resume import ResumingStream, Sent
from inlay.router.settings import RouterSettings
from inlay.routing import WorkerLoad, routing_chain
from inlay.transport.api import Drains, Plane, Reaches, Worker

ASLEEP_RETRY_AFTER = 5.0
"""Seconds after which to ask again for a model that is asleep: waking takes about that long."""

_LONG = 8192
"""Positions of a prompt from which on its chain is made off the event loop."""

_DEFAULTS = RouterSettings()

_Line: TypeAlias = tuple[str, PoolKey, str | None, bool]
"""Key of requests that wait for the same workers: model, pool, adapter, and need of rows."""


class _Placed(NamedTuple):
    """A request, as it was sent, and what it answers."""

    request: Request
    sent: Sent


class RouterStats:
    """Counters of one router, by the name of the model.

    Attributes:
        decisions: requests sent, by (model, True for a further attempt).
        looked_up: blocks of prompts that were looked up in the index of workers' caches.
        hits: blocks of these that the chosen worker had, as far as was known.
    """

    def __init__(self) -> None:
        self.decisions: Counter[tuple[str, bool]] = Counter()
        self.looked_up: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()

    def add_decision(self, model: str, requests: int, *, further: bool) -> None:
        """Count requests of one prompt that were sent."""
        self.decisions[model, further] += requests

    def add_lookup(self, model: str, blocks: int, hits: int) -> None:
        """Count the blocks of one lookup."""
        self.looked_up[model] += blocks
        self.hits[model] += hits


class Router:
    """Sends requests to the workers of a plane.

    Args:
        plane: knows the workers.
        settings: policy, and bounds of waiting requests.
        secret: of the namespace. Without it caches are not considered.
        random: breaks ties.
        clock: monotonic seconds.

    Attributes:
        stats: counters of its decisions.
    """

    def __init__(
        self,
        plane: Plane,
        settings: RouterSettings = _DEFAULTS,
        *,
        secret: Secret | None = None,
        random: Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plane = plane
        self._secret = secret
        self._clock = clock
        self._fleet = Fleet(plane, settings, random or Random(), clock)
        self._catalog = Catalog(self._fleet.workers, self._reasons)
        self._waiting: AdmissionQueue[_Line, list[_Placed]] = AdmissionQueue(
            settings, _cancel, clock
        )
        self._watching: asyncio.Task[None] | None = None
        self._places = Places(settings.router_queue_size)
        self.stats = RouterStats()

    async def start(self) -> None:
        """Subscribe to cache events and loads, where the transport carries them."""
        self._fleet.start(self._waiting.wake)

    async def close(self) -> None:
        """Publish that this frontend has no load any more, and unsubscribe."""
        self._stop_watching()
        await self._fleet.close()

    @property
    def num_waiting(self) -> int:
        """Requests that wait because all workers are full."""
        return self._waiting.num_requests

    def waiting(self) -> dict[str, int]:
        """The same by the model that they were sent to."""
        found: Counter[str] = Counter()
        for (name, *_), requests in self._waiting.queues.items():
            found[name] += requests
        return found

    def loads(self) -> dict[str, WorkerLoad]:
        """Load of each worker by its id: of all frontends, as far as is known here."""
        return self._fleet.loads()

    # Which models there are.

    def models(self) -> list[ModelCard]:
        """The card of each model that is, or was, served: one a name, aliases apart."""
        return self._catalog.models()

    def card(self, name: str) -> ModelCard:
        """The card of the model clients call `name`, or of the one whose adapter is called so.

        Raises:
            NotFoundError: no such model.
            OverloadedError: no worker has been ready yet.
        """
        return self._catalog.model(name).card

    def model(self, name: str, task: Task | None = None) -> ServedModel:
        """The model, or the adapter, that clients call `name`. Raises as `card`.

        With a `task`, as the workers show it that do this.
        """
        return self._catalog.model(name, task)

    def adapters(self, card: ModelCard) -> list[Adapter]:
        """The adapters that some worker of a model can use now.

        While none is ready, those there were.
        """
        return self._catalog.adapters(card)

    def unavailable(self) -> Mapping[str, str]:
        """As `inlay.transport.api.Plane.unavailable`, with those that are asked nothing."""
        return {**self._plane.unavailable(), **self._fleet.refused()}

    def unreachable(self) -> str | None:
        """As `inlay.transport.api.Reaches`; None where the plane is never cut off."""
        return self._plane.unreachable() if isinstance(self._plane, Reaches) else None

    def drains(self) -> Drains | None:
        """The plane, where its workers can be told to drain."""
        return self._plane if isinstance(self._plane, Drains) else None

    def _reasons(self) -> Mapping[str, str]:
        """Reasons why workers are not ready, by worker; those of the plane go first."""
        cut_off = self.unreachable()
        return self.unavailable() if cut_off is None else {"NATS": cut_off}

    def _no_worker(self, name: str) -> OverloadedError:
        """The error of a request for a model none of whose workers is ready."""
        cut_off = self.unreachable()
        reason = "" if cut_off is None else f": {cut_off}"
        return OverloadedError(f"No worker of the model `{name}` is ready{reason}.", retry_after=1)

    def unready(self) -> OverloadedError:
        """The error where no worker is ready; it says what is known of why."""
        return self._catalog.unready()

    def ready(self) -> Sequence[Worker]:
        """Every ready worker, of whatever model."""
        return self._plane.workers()

    def asked(self) -> Sequence[Worker]:
        """The ready workers that requests may go to."""
        return self._fleet.workers()

    def workers(self, name: str, task: Task | None = None) -> list[Worker]:
        """The ready workers of the model with this name of its own or alias; those for a `task`.

        Raises `NotFoundError`.
        """
        return self._catalog.workers(self._catalog.base(name, task))

    async def wait_awake(self, name: str, task: Task | None = None) -> None:
        """Return when none of the workers of a model is asleep alone.

        One is awake, or none is ready. Raises `NotFoundError`.
        """
        while (workers := self.workers(name, task)) and all(
            worker.card.asleep for worker in workers
        ):
            await self._plane.changed()

    def room(self, num_bytes: int) -> memoryview | None:
        """As `inlay.transport.api.Plane.room`."""
        return self._plane.room(num_bytes)

    # Requests.

    def admit(self, names: Iterable[str], client: str | None) -> AbstractContextManager[None]:
        """Take a place for a request at each of some stages until the block ends.

        It may then be sent to any of them as `admitted`. Raises as `Places.take` and `card`.
        """
        bases = [self._catalog.base(name, Task.STAGE) for name in names]
        room = {base.name: self._fleet.pool(base).num_places for base in bases}
        return self._places.take(room, client, self._waiting.retry_after)

    async def send(
        self,
        name: str,
        requests: Sequence[Request],
        *,
        session: str | None = None,
        admitted: bool = False,
    ) -> list[ResumingStream]:
        """Send requests to one worker of the model `name`, once there is room at one.

        Clients take turns; one with less than its share at a worker need not wait for others'
        requests to end.

        When that worker is gone before the end, others of its pool go on, as `inlay.router.resume`
        says.

        Args:
            name: of the model, or an alias.
            requests: equal but for id, seed and the like; at least one. Of a task other than
                generating it is one.
            session: that they belong to: those of one session go to one worker, if it has not much
                more to do than others.
            admitted: by `admit`: it may wait however many do.

        Returns:
            Their streams, each of which must be iterated to its end or cancelled.

        Raises:
            NotFoundError: no such model, or none of its workers has the adapter.
            OverloadedError: no worker of it is ready, all are asleep, or too much waits for one.
            RateLimitedError: too much of the client's waits.
            DeadlineExceededError: the requests' time was over before there was room.
        """
        first = requests[0]
        base = self._catalog.base(name, first.task)
        pool = self._fleet.pool(base)
        rows = pool.needs_rows(first)
        self._check(name, pool, first.adapter, rows)
        keys = await self._keys(pool, first)
        came = self._clock()

        def place() -> list[_Placed] | None:
            self._check(name, pool, first.adapter, rows)
            return self._place(pool, requests, keys, session, self._clock() - came)

        line = (base.name, PoolKey.of(base), first.adapter, rows)
        placed = None if self._waiting.waits(line, first.client) else place()
        if placed is None:
            placed = await self._wait(line, place, requests, admitted=admitted)
        return [
            ResumingStream(
                request,
                sent,
                workers=self._equivalent_workers(sent.card, request),
                send=self._resend,
            )
            for request, sent in placed
        ]

    async def _wait(
        self,
        line: _Line,
        place: Callable[[], list[_Placed] | None],
        requests: Sequence[Request],
        *,
        admitted: bool,
    ) -> list[_Placed]:
        if self._watching is None and not self._fleet.watching:
            self._watching = asyncio.create_task(self._watch())
        try:
            return await self._waiting.wait(
                line,
                place,
                num_requests=len(requests),
                client=requests[0].client,
                priority=requests[0].priority,
                admitted=admitted,
            )
        finally:
            self._stop_watching()

    def _equivalent_workers(
        self, card: ModelCard, request: Request
    ) -> Callable[[], Sequence[Worker]]:
        adapter, rows = request.adapter, request.has_embeds
        return lambda: self._catalog.equivalent_workers(card, adapter, rows=rows)

    def _resend(self, workers: Sequence[Worker], request: Request) -> Sent:
        """Send a further attempt to one of some workers, without waiting: it has had its turn.

        Raises:
            OverloadedError: they are gone.
        """
        pool = self._fleet.pool(workers[0].card)
        chain = self._chain(pool, request)
        keys = None if chain is None else chain()
        placed = self._place(pool, [request], keys, None, 0, only=[worker.id for worker in workers])
        if placed is None:
            raise self._no_worker(workers[0].card.name)
        return placed[0].sent

    def _check(self, name: str, pool: Pool, adapter: str | None, rows: bool) -> None:
        """Raise unless some worker could take a request now, had it room."""
        if pool.can_serve(adapter, rows=rows):
            return
        if pool.asleep:
            raise OverloadedError(f"The model `{name}` is asleep.", retry_after=ASLEEP_RETRY_AFTER)
        if adapter is not None and len(pool) and not pool.has_adapter(adapter):
            raise self._catalog.unknown(adapter)
        raise self._no_worker(name)

    async def _keys(self, pool: Pool, request: Request) -> Keys | None:
        """Block keys of a prompt, if the choice needs them."""
        chain = self._chain(pool, request)
        if chain is None:
            return None
        return chain() if request.num_positions < _LONG else await asyncio.to_thread(chain)

    def _chain(self, pool: Pool, request: Request) -> Callable[[], Keys] | None:
        """Function that computes the block keys of a request, if the choice needs them."""
        secret, card = self._secret, pool.card
        if (
            secret is None
            or card is None
            or request.task is not Task.GENERATE
            or not pool.asks_for_chain(request.adapter, rows=pool.needs_rows(request))
        ):
            return None
        adapter = None if request.adapter is None else pool.content_id(request.adapter)
        return lambda: keys_of(
            routing_chain(
                request.prompt,
                card,
                secret,
                adapter=adapter,
                salt=request.salt,
                output=request.prior_output,
            )
        )

    def _place(
        self,
        pool: Pool,
        requests: Sequence[Request],
        keys: Keys | None,
        session: str | None,
        waited: float,
        *,
        only: Collection[str] | None = None,
    ) -> list[_Placed] | None:
        """Send the requests now; None where no worker has room.

        Workers that turn out to be gone are skipped. With `only`, they go to one of these, even if
        it is full.
        """
        first = requests[0]
        length = _length(first)
        gone: set[str] = set()
        while True:
            chosen = pool.choose(
                length,
                keys,
                adapter=first.adapter,
                rows=pool.needs_rows(first),
                session=session,
                only=only,
                avoid=gone,
                full_too=only is not None,
                client=first.client,
            )
            if chosen is None:
                return None
            member = chosen.member
            try:
                placed = self._send_to(pool, chosen, requests, length, waited)
            except OverloadedError:
                gone.add(member.id)
                continue
            model = member.card.name
            self.stats.add_decision(model, len(placed), further=only is not None)
            if keys is not None:
                self.stats.add_lookup(model, len(keys), chosen.cached // BLOCK_SIZE)
                self._fleet.sent(pool, member, keys)
            return placed

    def _send_to(
        self,
        pool: Pool,
        chosen: Chosen,
        requests: Sequence[Request],
        length: int,
        waited: float,
    ) -> list[_Placed]:
        """Send the requests to a worker.

        Raises `OverloadedError` when it is gone; it has none of them then.
        """
        placed: list[_Placed] = []
        member, prefill = chosen.member, length - chosen.cached
        pages = (Source(PAGES, chosen.holders),) if chosen.holders else ()
        try:
            for request in requests:
                request = _with_waited_deadline(request, waited)
                request, encoding = self._fleet.encoders.assign(request, member.card)
                if pages:
                    sources = (*request.sources, *pages)
                    request = msgspec.structs.replace(request, sources=sources)
                stream = member.worker.send(request)
                # The prompt is computed once for all of them.
                charge = LoadReservation(
                    pool,
                    member,
                    prefill=0 if placed else prefill,
                    length=length,
                    ended=self._ended,
                    client=request.client,
                    # So are its images.
                    computed=_nothing if placed else encoding.begin(),
                )
                placed.append(_Placed(request, Sent(member.worker, stream, charge)))
        except BaseException:
            _cancel(placed)
            raise
        return placed

    def _ended(self, client: str | None) -> None:
        self._waiting.ended()
        if self._waiting.num_requests:
            self._waiting.wake()
            self._waiting.call_client(client)

    def _stop_watching(self) -> None:
        if self._watching is not None and not self._waiting.num_requests:
            self._watching.cancel()
            self._watching = None

    async def _watch(self) -> None:
        """While requests wait, watch for workers that come, wake up or leave."""
        while True:
            await self._plane.changed()
            self._fleet.refresh()
            self._waiting.wake()


def _with_waited_deadline(request: Request, waited: float) -> Request:
    """A request that has waited so many seconds.

    Raises `DeadlineExceededError` when its time is over.
    """
    if request.deadline is None or not waited:
        return request
    if request.deadline <= waited:
        raise DeadlineExceededError(
            f"all workers were full for the {request.deadline:g} s that were left"
        )
    return msgspec.structs.replace(request, deadline=request.deadline - waited)


def _length(request: Request) -> int:
    """Return the positions of a request, or the steps of its images, as its part of a load."""
    if isinstance(request.params, Diffusion):
        return request.params.steps * request.params.count
    return request.num_positions + len(request.prior_output)


def _nothing() -> None:
    """Do nothing."""


def _cancel(placed: Sequence[_Placed]) -> None:
    for _, sent in placed:
        sent.cancel()
