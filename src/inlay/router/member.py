"""One worker as a router knows it: its load and its cache."""

import math

from inlay.card import ModelCard
from inlay.digest import BLOCK_SIZE
from inlay.router.key_table import Keys
from inlay.router.kv_index import KvIndex
from inlay.router.policies import hash_of
from inlay.routing import WorkerLoad
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

    Its cached blocks are three holders of the pool's index. `told` has those of its events. `young`
    and `old` have those of the prompts it was sent: recent ones are young. When the young are half
    of the worker's capacity, or half of their time is over, the old are dropped and the young
    become old. So no state is kept for each block, and a sent block counts as cached for at least
    half, and at most all, of the capacity or time.

    Attributes:
        seat: its place in the pool's arrays; None while it has none.
        turns_at: when half of the time of what it was sent is over, if it was sent anything.
        own: load of this frontend there.
        others: load of the other frontends.
        num_clients: clients with requests there through this frontend.
        hash: of its id, for sessions.
        tiers: by name, what it can read from each.
    """

    __slots__ = (
        "_index", "_num_old", "_num_young", "card", "hash", "num_clients", "old",
        "others", "own", "seat", "tiers", "told", "turns_at", "worker", "young",
    )  # fmt: skip

    def __init__(self, worker: Worker, index: KvIndex) -> None:
        self.worker = worker
        self.card: ModelCard = worker.card
        self.seat: int | None = None
        self.own = _NOTHING
        self.others = _NOTHING
        self.num_clients = 0
        self.hash = hash_of(worker.id)
        self._index = index
        self.told = index.add_holder()
        self.young = index.add_holder()
        self.old = index.add_holder()
        self._num_young = self._num_old = 0
        self.tiers: dict[str, TierHolding] = {}
        self.turns_at: float | None = None

    @property
    def id(self) -> str:
        """Of the worker."""
        return self.worker.id

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

    @property
    def clients(self) -> int:
        """Known clients with requests there; those of all other frontends count as one."""
        return self.num_clients + (self.others.requests > 0)

    @property
    def takes_rows(self) -> bool:
        """True if it accepts prompts with rows."""
        return self.card.prompt_embeds is None

    def has_adapter(self, name: str | None) -> bool:
        """True if it can serve requests with this adapter; None is none."""
        return name is None or any(adapter.name == name for adapter in self.card.adapters)

    def sent(self, keys: Keys, now: float, ttl: float) -> bool:
        """It was sent a prompt of these blocks, some `ttl` seconds of which it may keep it.

        Whether it must be looked at again later.
        """
        self._num_young += self._index.store(self.young, keys)
        half = self.card.num_blocks * self.card.block_size // BLOCK_SIZE // 2
        if half and self._num_young >= half:
            self.turn()
        if self.turns_at is not None or not self._num_young + self._num_old:
            return False
        self._turn_later(now, ttl)
        return True

    def _turn_later(self, now: float, ttl: float) -> None:
        self.turns_at = now + (min(ttl, BRIDGED_SECONDS) if self.card.kv_events else ttl) / 2

    def turn_due(self, due: float, ttl: float) -> bool:
        """Half of the time was over at `due`. Whether it must be looked at again."""
        self.turns_at = None
        if self.seat is None:
            return False
        self.turn()
        if not self._num_old:
            return False
        self._turn_later(due, ttl)
        return True

    def turn(self) -> None:
        """Forget the old; the young are old now."""
        self._index.drop(self.old)
        self.old, self.young = self.young, self._index.add_holder()
        self._num_old, self._num_young = self._num_young, 0

    def tier(self, name: str) -> TierHolding | None:
        """Return the pages it can read from a tier; none yet, if that is new.

        Returns None for one more than `MAX_TIERS`.
        """
        found = self.tiers.get(name)
        if found is None and len(self.tiers) < MAX_TIERS:
            found = self.tiers[name] = TierHolding(self._index.add_holder())
        return found

    def forget_tiers(self) -> None:
        """Nothing is known any more of its tiers."""
        for tier in self.tiers.values():
            self._index.drop(tier.holder)
        self.tiers = {}

    def forget_told(self) -> None:
        """Nothing is known any more of what it said."""
        self._index.drop(self.told)
        self.told = self._index.add_holder()

    def forget(self) -> None:
        """It has nothing cached any more."""
        self.forget_told()
        self.turn()
        self.turn()

    def leave(self) -> None:
        """It is gone, and so is all it had."""
        self.seat = None
        for holder in (self.told, self.young, self.old):
            self._index.drop(holder)
        self.forget_tiers()
