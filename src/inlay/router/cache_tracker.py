"""Follows what workers tell of their caches.

Numbered messages, and a snapshot where one is missing.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from inlay.errors import InlayError
from inlay.router.kv_index import keys_of
from inlay.router.member import MAX_TIERS, PoolMember, TierHolding
from inlay.router.snapshot import Pool
from inlay.routing import KEY_SIZE, Cleared, KvEvents, KvSnapshot, Priced, Stored

_log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""Before a snapshot is asked for again."""

_AT_ONCE = 4096
"""Blocks of a snapshot that are taken before others have a turn."""

_KEPT = 4096
"""Messages kept while a snapshot is on its way; when more come it is asked for again."""


class _Followed:
    """One worker's cache.

    `sequence` is of the last message it holds, None while a snapshot is waited for.
    """

    __slots__ = ("asking", "member", "named_too_many", "pool", "sequence", "waiting")

    def __init__(self, pool: Pool, member: PoolMember) -> None:
        self.pool = pool
        self.member = member
        self.sequence: int | None = None
        self.waiting: list[KvEvents] = []
        self.asking: asyncio.Task[None] | None = None
        self.named_too_many = False

    def has_left(self) -> bool:
        """Return True if the worker is gone."""
        return self.member.seat is None

    def tier(self, name: str) -> TierHolding | None:
        """Return a tier of the worker, as `PoolMember.tier`; say once that it names too many."""
        found = self.member.tier(name)
        if found is None and not self.named_too_many:
            self.named_too_many = True
            _log.warning(
                "worker %s names over %d tiers: the rest is not used", self.member.id, MAX_TIERS
            )
        return found


class CacheTracker:
    """Applies the cache events of workers to the indexes of their pools."""

    def __init__(self, snapshot: Callable[[str], Awaitable[KvSnapshot]]) -> None:
        self._snapshot = snapshot
        self._followed: dict[str, _Followed] = {}

    def follow(self, pool: Pool, member: PoolMember) -> None:
        """Add a worker; request a snapshot if it publishes events."""
        if (known := self._followed.pop(member.id, None)) is not None:
            self._stop(known)
        if member.card.kv_events:
            followed = self._followed[member.id] = _Followed(pool, member)
            self._ask(followed)

    def drop_left(self) -> None:
        """Forget workers that are gone, and with them the indexes of their pools."""
        for id_ in [id_ for id_, known in self._followed.items() if known.has_left()]:
            self._stop(self._followed.pop(id_))

    def take(self, worker_id: str, message: KvEvents) -> None:
        """Apply the events of a worker."""
        followed = self._followed.get(worker_id)
        if followed is None or followed.member.seat is None:
            return
        if followed.sequence is None:
            followed.waiting.append(message)
            if len(followed.waiting) > _KEPT:
                followed.waiting.clear()  # the gap is seen when the snapshot has come
            return
        if message.sequence <= followed.sequence:
            return
        if message.sequence > followed.sequence + 1:
            followed.sequence = None
            followed.waiting = [message]
            self._ask(followed)
            return
        followed.sequence = message.sequence
        self._apply(followed, message)

    def _apply(self, followed: _Followed, message: KvEvents) -> None:
        pool, member = followed.pool, followed.member
        for event in message.events:
            if isinstance(event, Cleared):
                member.forget()
                pool.renumbered(member)
                continue
            known = len(member.tiers)
            tier = followed.tier(event.tier) if event.tier else None
            if event.tier and tier is None:
                continue
            if isinstance(event, Priced):
                if tier is not None:
                    tier.price = event.price
                    pool.tiers_changed()
                continue
            change = pool.index.store if isinstance(event, Stored) else pool.index.remove
            change(member.reported if tier is None else tier.holder, keys_of(event.keys))
            if len(member.tiers) > known:
                pool.tiers_changed()

    def _ask(self, followed: _Followed) -> None:
        if followed.asking is None or followed.asking.done():
            followed.asking = asyncio.create_task(self._learn(followed))

    async def _learn(self, followed: _Followed) -> None:
        """Ask until it is known what the worker has, and nothing is missing after that."""
        member, pool = followed.member, followed.pool
        while not followed.has_left() and followed.sequence is None:
            try:
                snapshot = await self._snapshot(member.id)
            except InlayError as error:
                _log.info("worker %s sends no snapshot of its cache: %s", member.id, error.message)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if followed.has_left():
                return  # it left meanwhile, and its holders are others' now
            member.forget_reported()
            member.forget_tiers()
            pool.renumbered(member)
            parts = [(member.reported, snapshot.keys)]
            for kept in snapshot.tiers:
                tier = followed.tier(kept.name)
                if tier is not None:
                    tier.price = kept.price
                    parts.append((tier.holder, kept.keys))
            pool.tiers_changed()
            for holder, keys in parts:
                view = keys.view
                for start in range(0, len(view), _AT_ONCE * KEY_SIZE):
                    piece = bytes(view[start : start + _AT_ONCE * KEY_SIZE])
                    pool.index.store(holder, keys_of(piece))
                    await asyncio.sleep(0)
                    if followed.has_left():
                        return
            followed.sequence = snapshot.sequence
            waiting, followed.waiting = followed.waiting, []
            for index, message in enumerate(waiting):
                if message.sequence > followed.sequence + 1:
                    followed.sequence, followed.waiting = None, waiting[index:]
                    break
                self.take(member.id, message)

    async def close(self) -> None:
        """Ask for nothing more."""
        tasks = [known.asking for known in self._followed.values() if known.asking is not None]
        for known in self._followed.values():
            self._stop(known)
        self._followed.clear()
        await asyncio.gather(*tasks, return_exceptions=True)

    @staticmethod
    def _stop(followed: _Followed) -> None:
        if followed.asking is not None:
            followed.asking.cancel()
