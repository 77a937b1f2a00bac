"""Chooses a worker for each request and follows it to its end."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from random import Random

from inlay.base import liveness
from inlay.base.errors import InlayError, OverloadedError
from inlay.messages.card import Adapter, ModelCard
from inlay.messages.digest import Secret
from inlay.messages.request import Request, Task
from inlay.messages.routing import WorkerLoad
from inlay.router.decide import Refuse
from inlay.router.dispatcher import Dispatcher
from inlay.router.fleet import RETIRED_SECONDS, Catalog, Fleet, ServedModel
from inlay.router.resume import ResumingStream
from inlay.router.settings import RouterSettings
from inlay.router.shares import Weights
from inlay.router.stage_slots import StageSlots
from inlay.transport.api import (
    Announces,
    CountsLosses,
    Drains,
    Loss,
    Plane,
    Reaches,
    RecordsAdapters,
    Worker,
)

ASLEEP_RETRY_AFTER = 5.0
"""Seconds after which to ask again for a model that is asleep: waking takes about that long."""

_DEFAULTS = RouterSettings()


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
        self._random = random or Random()
        self._fleet = Fleet(plane, settings, self._random, clock)
        announced = plane.announced if isinstance(plane, Announces) else None
        self._absent_wait = settings.router_absent_wait
        self._absent: Counter[str] = Counter()
        self._catalog = Catalog(
            self._fleet.workers,
            self._reasons,
            clock,
            announced,
            self._fleet.missing,
            math.inf if self._absent_wait else RETIRED_SECONDS,
        )
        self._places = StageSlots(settings.router_queue_size)
        self._dispatcher = Dispatcher(
            self._fleet, self._equivalent_workers, self._refusal, settings, secret, clock
        )
        self.stats = self._dispatcher.stats

    async def start(self) -> None:
        """Subscribe to cache events and loads, where the transport carries them."""
        self._fleet.start(self._changed)

    def _changed(self) -> None:
        self._catalog.models()  # which forgets none that came and went while nobody asked
        self._dispatcher.mark()

    async def close(self) -> None:
        """Publish that this frontend has no load any more, and unsubscribe."""
        self._dispatcher.close()
        await self._fleet.close()

    @property
    def num_waiting(self) -> int:
        """Requests that wait because all workers are full."""
        return self._dispatcher.waiting.num_requests

    def waiting(self) -> dict[str, int]:
        """The same by the model that they were sent to."""
        found = +self._absent
        for line, requests in self._dispatcher.waiting.requests_in.items():
            found[line.pool.name] += requests
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

    def losses(self) -> Mapping[tuple[str, Loss], int]:
        """As `inlay.transport.api.CountsLosses`; none where the plane counts none."""
        return self._plane.losses() if isinstance(self._plane, CountsLosses) else {}

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

    @property
    def awaits_workers(self) -> bool:
        """True if requests for some model wait for its first worker."""
        return bool(self._absent_wait and self._catalog.models())

    async def wait_worker(self, name: str, task: Task | None = None) -> None:
        """Return when a model that was served has a worker, or the settings' wait is over.

        Requests that wait count in `waiting`, so that whoever starts workers sees them. Raises
        `NotFoundError`.
        """
        if not self._absent_wait or self.workers(name, task):
            return
        model = self._catalog.base(name, task).name
        self._absent[model] += 1
        try:
            async with liveness.timeout(self._absent_wait):
                while not self.workers(name, task):
                    await self._plane.changed()
        except TimeoutError:
            return  # the request is refused as any is without a worker
        finally:
            self._absent[model] -= 1

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
        return self._plane.room(num_bytes)

    # Requests.

    def admit(self, wanted: Mapping[str, int], client: str | None) -> AbstractContextManager[None]:
        """Take places at some stages, for so many requests each, until the block ends.

        These may then be sent there as `admitted`. Raises as `StageSlots.take` and `card`.
        """
        bases = [(self._catalog.base(name, Task.STAGE), count) for name, count in wanted.items()]
        counts = {base.name: count for base, count in bases}
        room = {base.name: self._fleet.pool(base).num_places for base, _ in bases}
        return self._places.take(counts, room, client, self._dispatcher.retry_after)

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
        task = requests[0].task
        if isinstance(model, str):
            name, base = model, self._catalog.draw(model, self._random.random(), task)
            key = self._fleet.key_of(base)
        else:
            name, key = model.name, self._fleet.key_of(model)
            if task is not key.role:
                key = self._fleet.key_of(self._catalog.same_weights(model, task))
        return await self._dispatcher.submit(
            name, key, requests, session=session, failed_on=failed_on, admitted=admitted
        )

    def _equivalent_workers(self, card: ModelCard, request: Request) -> Sequence[Worker]:
        rows = self._fleet.pool(card).differ_in_rows and request.has_embeds
        return self._catalog.equivalent_workers(card, request.adapter, rows=rows)

    def _refusal(self, name: str, adapter: str | None, refused: Refuse) -> InlayError:
        """The error of a request for a model that no worker could have."""
        if refused.why == "asleep":
            return _asleep(name)
        if refused.why == "adapter" and adapter is not None:
            return self._catalog.unknown(adapter)
        return self._no_worker(name)


def _asleep(name: str) -> OverloadedError:
    return OverloadedError(f"The model `{name}` is asleep.", retry_after=ASLEEP_RETRY_AFTER)
