"""All pools of a plane, what workers and other frontends tell of them, and the names of models."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import is_
from random import Random

from inlay.base import liveness
from inlay.base.errors import NotFoundError, OverloadedError
from inlay.extension import parts
from inlay.messages.card import Adapter, ModelCard
from inlay.messages.request import Task
from inlay.messages.routing import RoutingFeed, WorkerLoad
from inlay.router.fleet_part import FleetPart
from inlay.router.index import Keys
from inlay.router.member import PoolMember
from inlay.router.peers import CacheTracker, PeerLoads
from inlay.router.settings import RouterSettings
from inlay.router.shares import Called, Weights, drawn, leader
from inlay.router.snapshot import EncodeWorker, Pool, PoolKey, content_of
from inlay.transport.api import Announces, Plane, Worker

log = logging.getLogger(__name__)

_NAMED = 5
"""Names of served models at most in the error of one that is not."""

RETIRED_SECONDS = 3600.0
"""Seconds without a worker after which a model is no longer served, where others are.

Until then, and for ever where no other is, its workers are thought to come back.
"""
MAX_GONE = 256
"""Models without a worker at most that are remembered; those that went first are forgotten."""


class Fleet:
    """Keeps the pools as the plane's workers are now.

    Args:
        plane: knows the workers.
        settings: of the router.
        random: chooses among equals.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        plane: Plane,
        settings: RouterSettings,
        random: Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plane = plane
        self._settings = settings
        self._random = random
        self._clock = clock
        self._pools: dict[PoolKey, Pool] = {}
        self._pool_of: dict[str, Pool] = {}
        self._workers: list[Worker] = []
        self._cards: list[ModelCard] = []
        self._keys: dict[int, PoolKey] = {}
        self._announced: Sequence[ModelCard] = ()
        feed = plane if isinstance(plane, RoutingFeed) else None
        self._feed = feed
        self._peers = (
            None
            if feed is None
            else PeerLoads(feed.publish, self._set_others, self._routed, clock=liveness.now)
        )
        self._caches = None if feed is None else CacheTracker(feed.kv_snapshot)
        self._changed: Callable[[], None] = lambda: None
        self._watching: asyncio.Task[None] | None = None
        self._stale = True
        self._parts: list[FleetPart] = [make() for _, make in parts("fleet")]
        self._there: list[Worker] = []

    def start(self, changed: Callable[[], None]) -> None:
        """Subscribe to cache events and loads, if the transport carries them.

        `changed` is called when there may be room for more requests.
        """
        self._changed = changed
        self._watching = asyncio.create_task(self._watch())
        if self._feed is not None and self._peers is not None and self._caches is not None:
            self._feed.listen(self._caches.take, self._peers.take)
            self._peers.start()

    @property
    def watching(self) -> bool:
        """True if changes are noticed without polling."""
        return self._watching is not None

    async def _watch(self) -> None:
        while True:
            self._stale = True
            self.refresh()
            self._changed()
            await self._plane.changed()

    async def close(self) -> None:
        """Stop listening."""
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching
            self._watching = None
        if self._peers is not None:
            await self._peers.close()
        if self._caches is not None:
            await self._caches.close()

    def pool(self, card: ModelCard) -> Pool:
        return self.of(self.key_of(card))

    def key_of(self, card: ModelCard) -> PoolKey:
        """The traits of a card's pool, made once for a worker that is there, whose card is held."""
        return self._keys.get(id(card)) or PoolKey.of(card)

    def of(self, key: PoolKey) -> Pool:
        """The pool of these traits, as its workers are now; without any, if there are none."""
        if self._stale or self._watching is None:
            self.refresh()
        return self._pools.get(key) or self._of(key)

    def _of(self, key: PoolKey) -> Pool:
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = Pool(self._settings, self._random, self._clock)
        return pool

    def workers(self) -> Sequence[Worker]:
        """The workers that requests may go to; the same list until that has changed."""
        if self._stale or self._watching is None:
            self.refresh()
        return self._workers

    def refused(self) -> Mapping[str, str]:
        """Reasons by the id of each ready worker that no request goes to."""
        self.refresh()
        return {name: reason for part in self._parts for name, reason in part.refused.items()}

    def missing(self, name: str, models: Sequence[ModelCard]) -> OverloadedError | None:
        """As `FleetPart.missing`, of all parts."""
        found = (part.missing(name, models) for part in self._parts)
        return next((error for error in found if error is not None), None)

    def look_again(self) -> None:
        """A worker is gone before the plane has said so."""
        self._stale = True

    def refresh(self) -> None:
        """See which workers there are now, unless nothing has changed."""
        if self._watching is not None and not self._stale:
            return
        self._stale = False
        workers = self._plane.workers()
        cards = [worker.card for worker in workers]
        announced = self._plane.announced() if isinstance(self._plane, Announces) else cards
        if (
            len(workers) == len(self._there)
            and all(map(is_, workers, self._there))
            and all(map(is_, cards, self._cards))
            and (announced is cards or announced is self._announced)
        ):
            return
        self._there, self._cards, self._announced = list(workers), cards, announced
        self._keys = {id(card): PoolKey.of(card) for card in cards}
        self._workers = list(workers)
        for part in self._parts:
            self._workers = part.accept(self._workers, announced)
        grouped: dict[PoolKey, list[Worker]] = {key: [] for key in self._pools}
        for worker in self._workers:
            grouped.setdefault(self.key_of(worker.card), []).append(worker)
        self._pool_of = {}
        for key, some in grouped.items():
            pool = self._of(key)
            new = pool.take(some, self._others)
            self._pool_of |= dict.fromkeys(pool.members, pool)
            for member in new:
                if self._caches is not None:
                    self._caches.follow(pool, member)
                if self._peers is not None:
                    self._peers.watch(member)
            if not some:
                # Its members have left: what is still under way ends by itself.
                del self._pools[key]
        if self._caches is not None:
            self._caches.drop_left()
        encoders = self._encoders()
        for pool in self._pools.values():
            pool.encoders = encoders

    def _encoders(self) -> Mapping[tuple[str, str], Sequence[EncodeWorker]]:
        """The workers that encode media and do nothing else, by (id of their encoder, dtype)."""
        found: dict[tuple[str, str], list[EncodeWorker]] = {}
        for pool in self._pools.values():
            for member in pool.seated:
                card = member.card
                if card.role is Task.ENCODE and card.media and card.address and not card.asleep:
                    key = card.media.encoder_id, card.dtype
                    found.setdefault(key, []).append(EncodeWorker(pool, member, card.address))
        return found

    async def changed(self) -> None:
        """Return at the next change of the plane's workers."""
        await self._plane.changed()

    def loads(self) -> dict[str, WorkerLoad]:
        """Load of each worker by its id, of all frontends."""
        pools = self._pools.values()
        return {id_: member.load for pool in pools for id_, member in pool.members.items()}

    def sent(self, pool: Pool, member: PoolMember, keys: Keys) -> None:
        """A worker was sent a prompt of these blocks."""
        pool.sent(member, keys)
        if self._peers is not None:
            self._peers.sent(member, keys)

    def _others(self, worker_id: str) -> WorkerLoad:
        return WorkerLoad() if self._peers is None else self._peers.load(worker_id)

    def _set_others(self, worker_id: str, load: WorkerLoad) -> None:
        pool = self._pool_of.get(worker_id)
        if pool is None:
            return
        member = pool.members[worker_id]
        fewer = load.requests < member.others.requests
        pool.set_others(member, load)
        if fewer:
            self._changed()

    def _routed(self, worker_id: str, keys: Keys) -> None:
        pool = self._pool_of.get(worker_id)
        if pool is not None:
            pool.sent(pool.members[worker_id], keys)


class ServedModel:
    """A model, or one of its adapters, that a client named.

    Attributes:
        card: of the model.
        adapter: that was named, or None.
        adapter_name: its name, or None.
        name: in responses.
        positions_before: positions that stand before every prompt; they count as the prompt's.
        max_len: positions of a client's prompt and its output together.
    """

    __slots__ = ("adapter", "adapter_name", "card", "max_len", "name", "positions_before")

    def __init__(self, card: ModelCard, adapter: Adapter | None = None) -> None:
        self.card = card
        self.adapter = adapter
        self.adapter_name = None if adapter is None else adapter.name
        self.name = self.adapter_name or card.name
        self.positions_before = 0 if adapter is None else adapter.num_positions
        self.max_len = card.limits.max_model_len - self.positions_before


def _rather(card: ModelCard, known: ModelCard) -> ModelCard:
    """A model does not become another while its encode workers alone are ready."""
    return known if card.role is Task.ENCODE and known.role is not Task.ENCODE else card


class Catalog:
    """The models and adapters of some workers.

    Args:
        workers: those that are ready, the same list as long as nothing has changed.
        missing: as `inlay.transport.api.Plane.unavailable`.
        clock: monotonic seconds.
        announced: cards as `inlay.transport.api.Announces`; None: the workers' own.
        explain: as `Fleet.missing`.
        retired_after: seconds without a worker after which a model is forgotten.
    """

    def __init__(
        self,
        workers: Callable[[], Sequence[Worker]],
        missing: Callable[[], Mapping[str, str]],
        clock: Callable[[], float] = time.monotonic,
        announced: Callable[[], Sequence[ModelCard]] | None = None,
        explain: Callable[[str, Sequence[ModelCard]], OverloadedError | None] = lambda *_: None,
        retired_after: float = RETIRED_SECONDS,
    ) -> None:
        self._retired_after = retired_after
        self._explain = explain
        self._announced = announced
        self._workers = workers
        self._missing = missing
        self._clock = clock
        self._seen: Sequence[Worker] | None = None
        self._told: Sequence[ModelCard] = ()
        self._cards: list[ModelCard] = []
        self._called: dict[tuple[str, Task | None], Called] = {}
        self._said: dict[str, Mapping[Weights, float]] = {}
        self._known: dict[str, ModelCard] = {}
        self._since: dict[str, float] = {}
        self._gone: dict[str, float] = {}

    def models(self) -> list[ModelCard]:
        """The card of each model that is, or was lately, served: one a name, aliases apart.

        Of several weights under a name it is of those with the largest share.
        """
        self._look()
        if self._gone:
            self._retire()
        return list(self._known.values())

    def _look(self) -> None:
        workers = self._workers()
        told = self._told if self._announced is None else self._announced()
        if workers is self._seen and told is self._told:
            return
        self._seen, self._called = workers, {}
        # In an order that all frontends have.
        self._cards = [worker.card for worker in sorted(workers, key=lambda worker: worker.id)]
        self._told = self._cards if self._announced is None else told
        found = dict.fromkeys(worker.card.name for worker in workers)
        for card in self._told:
            self._since[card.name] = card.rollout.since
        for name in found:
            here = self._find(name)
            shares = {one: share for one, share in here.shares.items() if one.name == name}
            card = here.cards[leader(shares)]
            self._known[name] = _rather(card, self._known.get(name, card))
            self._say(name)
        for name in self._gone.keys() & found.keys():
            del self._gone[name]
        for name in self._known.keys() - found.keys() - self._gone.keys():
            self._gone[name] = self._clock()
        self._since = {name: self._since.get(name, 0.0) for name in self._known}
        self._known = dict(sorted(self._known.items(), key=lambda item: self._since[item[0]]))

    def _say(self, name: str) -> None:
        """Log the weights that requests for `name` go to, where that has changed."""
        shares = self._find(name).shares
        now = {one: share for one, share in shares.items() if share}
        before = self._said.get(name)
        self._said[name] = now
        if now != before and (before is not None or len(shares) > 1):
            told = ", ".join(f"{one} {share:.1%}" for one, share in now.items())
            log.warning("requests for `%s` go to the weights %s", name, told or "of nobody")

    def _retire(self) -> None:
        """Forget models that have had no worker for long; those that went first stand first."""
        while self._gone and self._seen:
            name, since = next(iter(self._gone.items()))
            if len(self._gone) <= MAX_GONE and self._clock() - since < self._retired_after:
                return
            del self._gone[name], self._known[name]
            self._said.pop(name, None)
            self._called = {}

    def _find(self, name: str, task: Task | None = None) -> Called:
        found = self._called.get((name, task))
        if found is None:
            found = Called(self._cards, self._told, name, task)
            if found.shares:  # clients may name anything
                self._called[name, task] = found
        return found

    def shares(self, name: str, task: Task | None = None) -> Mapping[Weights, float]:
        """Each set of weights that is ready under this name, and its share of requests for it.

        Those that no worker connected here has are left out; empty where there is none.
        """
        self._look()
        return self._find(name, task).shares

    def model(
        self, name: str, task: Task | None = None, number: float | None = None
    ) -> ServedModel:
        """The model or adapter that clients know by `name`.

        Args:
            name: of a model or an adapter, or an alias.
            task: as for `base`.
            number: as for `draw`; None: as `base`.

        Raises:
            NotFoundError: no such model.
            OverloadedError: no worker has been ready yet.
        """
        try:
            card = self.base(name, task) if number is None else self.draw(name, number, task)
            return ServedModel(card)
        except NotFoundError:
            for card in self.models():
                for adapter in self.adapters(card):
                    if name == adapter.name:
                        return ServedModel(card, adapter)
            raise

    def base(self, name: str, task: Task | None = None) -> ModelCard:
        """The model with this name of its own or alias. Raises as `model`.

        With a `task`, the card of a pool that does it, first of one that does nothing else. Of
        several weights it is of those with the largest share.
        """
        base, _ = self._resolve(name, task)
        return base

    def _resolve(self, name: str, task: Task | None) -> tuple[ModelCard, Called]:
        """Return what is called so, and the card that stands for it. Raises as `model`."""
        self._look()
        found = self._called.get((name, task)) or self._find(name, task)
        if found.base is not None:
            return found.base, found
        models = self.models()
        known = next((card for card in models if name in (card.name, *card.aliases)), None)
        if found.shares:
            card = found.cards[leader(found.shares)]
            found.base = card if known is None or task is Task.ENCODE else _rather(card, known)
            return found.base, found
        if known is not None:
            return known, found
        if not models:
            raise self.unready()
        raise self._explain(name, models) or self.unknown(name)

    def draw(self, name: str, number: float, task: Task | None = None) -> ModelCard:
        """As `base`, but of the weights that a random `number` from 0 to below 1 falls to.

        Raises also `OverloadedError` where all ready workers have `--weight 0`.
        """
        base, found = self._resolve(name, task)
        shares = found.shares
        if shares and not any(shares.values()):
            raise OverloadedError(
                f"The ready workers of `{name}` take no requests (--weight 0).", retry_after=1
            )
        if len(shares) < 2:
            return base
        return _rather(found.cards[drawn(shares, number)], base)

    def same_weights(self, card: ModelCard, task: Task) -> ModelCard:
        """The card of a pool with these weights that does `task`; `card` itself if none does."""
        if task is card.role:
            return card
        self._look()
        return self._find(card.name, task).cards.get(Weights.of(card), card)

    def adapters(self, card: ModelCard) -> list[Adapter]:
        """The adapters that some worker of a model can use now.

        While none is ready, those there were.
        """
        found: dict[str, Adapter] = {}
        for known in [worker.card for worker in self.workers(card)] or [card]:
            for adapter in known.adapters:
                found.setdefault(adapter.name, adapter)
        return list(found.values())

    def workers(self, card: ModelCard) -> list[Worker]:
        """The ready workers of a model's pool."""
        pool = PoolKey.of(card)
        return [worker for worker in self._workers() if PoolKey.of(worker.card) == pool]

    def equivalent_workers(
        self, card: ModelCard, adapter: str | None, *, rows: bool = False
    ) -> list[Worker]:
        """The ready workers that would answer as the one with this card does.

        With `rows`, those that take a prompt with rows.
        """
        content = None if adapter is None else content_of(card, adapter)
        return [
            worker
            for worker in self.workers(card)
            if (adapter is None or content_of(worker.card, adapter) == content)
            and not (rows and worker.card.prompt_embeds is not None)
        ]

    def unknown(self, name: str) -> NotFoundError:
        """The error of a model or adapter that is not there."""
        return NotFoundError(
            f"The model `{name}` does not exist{self._served()}",
            param="model",
            code="model_not_found",
        )

    def _served(self) -> str:
        shown = [card for card in self.models() if not card.is_inner]
        names = [name for card in shown for name in (card.name, *card.aliases)]
        more = ", ..." if len(names) > _NAMED else ""
        return "; served: " + ", ".join(f"`{name}`" for name in names[:_NAMED]) + more

    def unready(self) -> OverloadedError:
        """The error where no worker is ready; it says what is known of why."""
        missing = "".join(f"; {name}: {reason}" for name, reason in self._missing().items())
        return OverloadedError(f"no worker is ready{missing}", retry_after=1)
