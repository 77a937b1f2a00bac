"""One worker as a router knows it: its load and its cache."""

import math

import numpy as np
from blake3 import blake3

from inlay.messages.card import ModelCard
from inlay.messages.digest import BLOCK_SIZE
from inlay.messages.routing import WorkerLoad
from inlay.router.index import Keys, KvIndex
from inlay.transport.api import Worker

BRIDGED_SECONDS = 10.0
"""Seconds for which sent prompts count as cached at a worker that publishes events.

By then its events have said so.
"""

_NOTHING = WorkerLoad()
MAX_TIERS = 8
"""Tiers of a worker that are known; each takes a place in the pool's index."""
UNBOUNDED = 1 << 62
"""Positions that a worker may queue which names no bound."""


def hash_of(name: str) -> np.uint64:
    """64 bits of a name, the same everywhere."""
    return np.uint64(int.from_bytes(blake3(name.encode()).digest(8), "little"))


class TierHolding:
    """Pages that a worker can read from a tier behind its cache, that cache included.

    Attributes:
        holder: of the pool's index; of pages that only the tier has, their last blocks alone.
        price: of a position, in positions that are computed; None where it was not measured.
    """

    __slots__ = ("holder", "price")

    def __init__(self, holder: int, price: float | None = None) -> None:
        self.holder = holder
        self.price = price


class PoolMember:
    """A worker of a pool.

    Its cached blocks are three holders of the pool's index. `reported` has those of its events.
    `recent` and `previous` have those of the prompts it was sent. When the recent ones are half of
    the worker's capacity, or half of their time is over, the previous ones are dropped and the
    recent become previous. So no state is kept for each block, and a sent block counts as cached
    for at least half, and at most all, of the capacity or time.

    Attributes:
        seat: its place in the pool's arrays; None once it has left.
        gone: it refused a request as workers do that are gone; the plane has not said so yet.
        rotates_at: when half of the time of what it was sent is over, if it was sent anything.
        own: load of this frontend there.
        others: load of the other frontends.
        num_clients: clients with requests there through this frontend.
        hash: of its id, for sessions.
        tiers: by name, what it can read from each.
    """

    __slots__ = (
        "_index", "_num_previous", "_num_recent", "card", "gone", "hash", "id", "num_clients",
        "others", "own", "previous", "recent", "reported", "rotates_at", "seat", "tiers", "worker",
    )  # fmt: skip

    def __init__(self, worker: Worker, index: KvIndex) -> None:
        self.worker = worker
        self.id = worker.id
        self.card: ModelCard = worker.card
        self.seat: int | None = None
        self.gone = False
        self.own = _NOTHING
        self.others = _NOTHING
        self.num_clients = 0
        self.hash = hash_of(worker.id)
        self._index = index
        self.reported = index.add_holder()
        self.recent = index.add_holder()
        self.previous = index.add_holder()
        self._num_recent = self._num_previous = 0
        self.tiers: dict[str, TierHolding] = {}
        self.rotates_at: float | None = None

    @property
    def load(self) -> WorkerLoad:
        """Load of all frontends there."""
        own, others = self.own, self.others
        return WorkerLoad(
            own.requests + others.requests, own.prefill + others.prefill, own.decode + others.decode
        )

    def capacity(self, backlog: float) -> int:
        """Requests it may have at a time: running ones, and `backlog` times as many waiting."""
        return max(1, math.ceil(self.card.limits.max_num_seqs * (1 + backlog)))

    @property
    def queueable(self) -> int:
        """Positions of prompts it may have to compute at a time."""
        most = self.card.limits.max_num_queued_tokens
        return UNBOUNDED if most is None else most

    def sent(self, keys: Keys, now: float, ttl: float) -> bool:
        """It was sent a prompt of these blocks, some `ttl` seconds of which it may keep it.

        True if it must be looked at again later.
        """
        self._num_recent += self._index.store(self.recent, keys)
        half = self.card.num_blocks * self.card.block_size // BLOCK_SIZE // 2
        if half and self._num_recent >= half:
            self.rotate()
        if self.rotates_at is not None or not self._num_recent + self._num_previous:
            return False
        self._rotate_later(now, ttl)
        return True

    def _rotate_later(self, now: float, ttl: float) -> None:
        self.rotates_at = now + (min(ttl, BRIDGED_SECONDS) if self.card.kv_events else ttl) / 2

    def rotation_due(self, due: float, ttl: float) -> bool:
        """Half of the time was over at `due`. True if it must be looked at again."""
        self.rotates_at = None
        if self.seat is None:
            return False
        self.rotate()
        if not self._num_previous:
            return False
        self._rotate_later(due, ttl)
        return True

    def rotate(self) -> None:
        """Forget the previous blocks; the recent ones are previous now."""
        self._index.drop(self.previous)
        self.previous, self.recent = self.recent, self._index.add_holder()
        self._num_previous, self._num_recent = self._num_recent, 0

    def tier(self, name: str) -> TierHolding | None:
        """Return the pages it can read from a tier; none yet, if that is new.

        Returns None for one more than `MAX_TIERS`.
        """
        found = self.tiers.get(name)
        if found is None and len(self.tiers) < MAX_TIERS:
            found = self.tiers[name] = TierHolding(self._index.add_holder())
        return found

    def forget_tiers(self) -> None:
        """Forget what it can read from its tiers."""
        for tier in self.tiers.values():
            self._index.drop(tier.holder)
        self.tiers = {}

    def forget_reported(self) -> None:
        """Forget the blocks that its events named."""
        self._index.drop(self.reported)
        self.reported = self._index.add_holder()

    def forget(self) -> None:
        """Forget all it had in its cache."""
        self.forget_reported()
        self.rotate()
        self.rotate()

    def leave(self) -> None:
        """It is gone, and so is all it had."""
        self.seat = None
        for holder in (self.reported, self.recent, self.previous):
            self._index.drop(holder)
        self.forget_tiers()
