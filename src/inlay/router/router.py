"""Chooses a worker for each request and follows it to its end."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from random import Random
from typing import TypeAlias

from inlay.card import Adapter, ModelCard
from inlay.digest import Secret
from inlay.errors import OverloadedError
from inlay.request import Request, Task
from inlay.router.admission_queue import AdmissionQueue
from inlay.router.catalog import Catalog, ServedModel
from inlay.router.fleet import Fleet
from inlay.router.key_table import Keys
from inlay.router.kv_index import keys_of
from inlay.router.places import Places
from inlay.router.placing import Placed, Placing, RouterStats, cancel
from inlay.router.pool import Pool, PoolKey
from inlay.router.resume import ResumingStream, Sent
from inlay.router.settings import RouterSettings
from inlay.router.shares import Weights
from inlay.routing import WorkerLoad, routing_chain
from inlay.transport.api import Announces, Drains, Plane, Reaches, RecordsAdapters, Worker

ASLEEP_RETRY_AFTER = 5.0
"""Seconds after which to ask again for a model that is asleep: waking takes about that long."""

_LONG = 8192
"""Positions of a prompt from which on its chain is made off the event loop."""

_DEFAULTS = RouterSettings()

_Line: TypeAlias = tuple[str, PoolKey, str | None, bool]
"""Key of requests that wait for the same workers: model, pool, adapter, and need of rows."""


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
        announced = plane.announced if isinstance(plane, Announces) else None
        self._catalog = Catalog(self._fleet.workers, self._reasons, clock, announced)
        self._random = random or Random()
        self._waiting: AdmissionQueue[_Line, list[Placed]] = AdmissionQueue(settings, cancel, clock)
        self._watching: asyncio.Task[None] | None = None
        self._places = Places(settings.router_queue_size)
        self.stats = RouterStats()
        self._placing = Placing(self._fleet, self.stats, self._ended, clock)

    async def start(self) -> None:
        """Subscribe to cache events and loads, where the transport carries them."""
        self._fleet.start(self._waiting.mark)

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
        """The card of each model that is, or was lately, served: one a name, aliases apart."""
        return self._catalog.models()

    def paths(self) -> set[str]:
        """The directories of these models, and of every ready worker's."""
        cards = [*self.models(), *(worker.card for worker in self.ready())]
        return {card.path for card in cards}

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

    def choose(self, name: str, task: Task | None = None) -> ServedModel:
        """As `model`, but for one request: of several weights, by their shares.

        Raises also `OverloadedError` where none takes requests.
        """
        return self._catalog.model(name, task, self._random.random())

    def shares(self) -> dict[str, Mapping[Weights, float]]:
        """The share of each set of weights in the requests for each model with a ready worker."""
        found = {card.name: self._catalog.shares(card.name) for card in self.models()}
        return {name: shares for name, shares in found.items() if shares}

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

    def adapter_record(self) -> RecordsAdapters | None:
        """The plane, where workers that come later load what was loaded before."""
        return self._plane if isinstance(self._plane, RecordsAdapters) else None

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
        while self._is_asleep(name, task):
            await self._plane.changed()

    def check_awake(self, name: str, task: Task | None = None) -> None:
        """Raise `OverloadedError` if `wait_awake` would wait, or `NotFoundError`."""
        if self._is_asleep(name, task):
            raise _asleep(name)

    def _is_asleep(self, name: str, task: Task | None) -> bool:
        workers = self.workers(name, task)
        return bool(workers) and all(worker.card.asleep for worker in workers)

    def room(self, num_bytes: int) -> memoryview | None:
        """As `inlay.transport.api.Plane.room`."""
        return self._plane.room(num_bytes)

    # Requests.

    def admit(self, wanted: Mapping[str, int], client: str | None) -> AbstractContextManager[None]:
        """Take places at some stages, for so many requests each, until the block ends.

        These may then be sent there as `admitted`. Raises as `Places.take` and `card`.
        """
        bases = [(self._catalog.base(name, Task.STAGE), count) for name, count in wanted.items()]
        counts = {base.name: count for base, count in bases}
        room = {base.name: self._fleet.pool(base).num_places for base, _ in bases}
        return self._places.take(counts, room, client, self._waiting.retry_after)

    async def send(
        self,
        model: str | ModelCard,
        requests: Sequence[Request],
        *,
        session: str | None = None,
        admitted: bool = False,
        failed_on: set[str] | None = None,
    ) -> list[ResumingStream]:
        """Send requests to one worker of a model, once there is room at one.

        Clients take turns; one with less than its share at a worker need not wait for others'
        requests to end.

        When that worker is gone before the end, others of its pool go on, as `inlay.router.resume`
        says.

        Args:
            model: its name, or an alias; or a card, where the requests are for its weights.
            requests: equal but for id, seed and the like; at least one. Of a task other than
                generating it is one.
            session: that they belong to: those of one session go to one worker, if it has not much
                more to do than others.
            admitted: by `admit`: it may wait however many do.
            failed_on: ids of workers that have failed at it; others go before them. Those that do
                are added.

        Returns:
            Their streams, each of which must be iterated to its end or cancelled.

        Raises:
            NotFoundError: no such model, or none of its workers has the adapter.
            OverloadedError: no worker of it is ready, all are asleep, or too much waits for one.
            RateLimitedError: too much of the client's waits.
            DeadlineExceededError: the requests' time was over before there was room.
        """
        first = requests[0]
        if isinstance(model, str):
            name, base = model, self._catalog.draw(model, self._random.random(), first.task)
        else:
            name, base = model.name, self._catalog.same_weights(model, first.task)
        pool = self._fleet.pool(base)
        rows = pool.needs_rows(first)
        self._check(name, pool, first.adapter, rows)
        keys = await self._keys(pool, first)
        came = self._clock()
        failed: Collection[str] = () if failed_on is None else failed_on
        able = self._equivalent_workers(base, first)

        def place() -> list[Placed] | None:
            self._fleet.refresh()
            pool = self._fleet.pool(base)
            self._check(name, pool, first.adapter, rows)
            avoid = failed if failed and any(one.id not in failed for one in able()) else ()
            waited = self._clock() - came
            return self._placing.place(pool, requests, keys, session, waited, avoid=avoid)

        line = (base.name, PoolKey.of(base), first.adapter, rows)
        self._waiting.settle()
        placed = None if self._waiting.waits(line, first.client) else place()
        if placed is None:
            placed = await self._wait(line, place, requests, admitted=admitted)
        return [
            ResumingStream(
                request,
                sent,
                workers=self._equivalent_workers(sent.card, request),
                send=self._resend,
                handover=handover,
                failed_on=set() if failed_on is None else failed_on,
            )
            for request, sent, handover in placed
        ]

    async def _wait(
        self,
        line: _Line,
        place: Callable[[], list[Placed] | None],
        requests: Sequence[Request],
        *,
        admitted: bool,
    ) -> list[Placed]:
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
        def found() -> Sequence[Worker]:
            rows = self._fleet.pool(card).needs_rows(request)
            return self._catalog.equivalent_workers(card, request.adapter, rows=rows)

        return found

    def _resend(
        self, workers: Sequence[Worker], request: Request, holder: ModelCard | None
    ) -> Sent:
        """Send a further attempt to one of some workers, without waiting: it has had its turn.

        `holder` is of the worker that has the pages of the attempt before.

        Raises:
            OverloadedError: they are gone.
        """
        pool = self._fleet.pool(workers[0].card)
        chain = self._chain(pool, request)
        keys = None if chain is None else chain()
        only = [worker.id for worker in workers]
        placed = self._placing.place(pool, [request], keys, None, 0, only=only, holder=holder)
        if placed is None:
            raise self._no_worker(workers[0].card.name)
        return placed[0].sent

    def _check(self, name: str, pool: Pool, adapter: str | None, rows: bool) -> None:
        """Raise unless some worker could take a request now, had it room."""
        if pool.can_serve(adapter, rows=rows):
            return
        if pool.asleep:
            raise _asleep(name)
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

    def _ended(self, client: str | None) -> None:
        self._waiting.ended()
        self._waiting.mark(client)

    def _stop_watching(self) -> None:
        if self._watching is not None and not self._waiting.num_requests:
            self._watching.cancel()
            self._watching = None

    async def _watch(self) -> None:
        """While requests wait, watch for workers that come, wake up or leave."""
        while True:
            await self._plane.changed()
            self._fleet.refresh()
            self._waiting.mark()


def _asleep(name: str) -> OverloadedError:
    return OverloadedError(f"The model `{name}` is asleep.", retry_after=ASLEEP_RETRY_AFTER)
