"""All pools of a plane, and what workers and other frontends tell of them."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import is_
from random import Random

from inlay import liveness
from inlay.card import ModelCard
from inlay.router.cache_tracker import CacheTracker
from inlay.router.encoders import Encoders
from inlay.router.graphs import Graphs
from inlay.router.key_table import Keys
from inlay.router.member import PoolMember
from inlay.router.peers import Peers
from inlay.router.policies import policy_of
from inlay.router.pool import Pool, PoolKey
from inlay.router.settings import RouterSettings
from inlay.routing import RoutingFeed, WorkerLoad
from inlay.transport.api import Plane, Worker


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
        self._policy = policy_of(settings, random)
        self._clock = clock
        self._pools: dict[PoolKey, Pool] = {}
        self._pool_of: dict[str, Pool] = {}
        self._workers: list[Worker] = []
        self._cards: list[ModelCard] = []
        feed = plane if isinstance(plane, RoutingFeed) else None
        self._feed = feed
        self._peers = (
            None
            if feed is None
            else Peers(feed.publish, self._set_others, self._routed, clock=liveness.now)
        )
        self._caches = None if feed is None else CacheTracker(feed.kv_snapshot)
        self._changed: Callable[[], None] = lambda: None
        self._watching: asyncio.Task[None] | None = None
        self._stale = True
        self._encoders: Encoders | None = None
        self._graphs = Graphs()
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
        """The pool of a model."""
        return self._of(PoolKey.of(card))

    def _of(self, key: PoolKey) -> Pool:
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = Pool(self._policy(), self._settings, self._clock)
        return pool

    @property
    def encoders(self) -> Encoders:
        """The workers that encode media and do nothing else, as they are now."""
        self.refresh()
        if self._encoders is None:
            slack = self._settings.router_session_slack
            self._encoders = Encoders(self._pools.values(), slack)
        return self._encoders

    def workers(self) -> Sequence[Worker]:
        """The workers that requests may go to; the same list until that has changed."""
        self.refresh()
        return self._workers

    def refused(self) -> Mapping[str, str]:
        """Reasons by the id of each ready worker that no request goes to."""
        self.refresh()
        return self._graphs.refused

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
        if (
            len(workers) == len(self._there)
            and all(map(is_, workers, self._there))
            and all(map(is_, cards, self._cards))
        ):
            return
        self._there, self._cards = list(workers), cards
        self._workers = self._graphs.alike(workers)
        self._encoders = None
        grouped: dict[PoolKey, list[Worker]] = {key: [] for key in self._pools}
        for worker in self._workers:
            grouped.setdefault(PoolKey.of(worker.card), []).append(worker)
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

    def loads(self) -> dict[str, WorkerLoad]:
        """Load of each worker by its id, of all frontends."""
        return {
            id_: member.load
            for pool in self._pools.values()
            for id_, member in pool.members.items()
        }

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
