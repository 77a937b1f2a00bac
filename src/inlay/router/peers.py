"""Messages of others: frontends tell of their loads, workers of their caches."""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from inlay.base.errors import InlayError
from inlay.messages.routing import (
    KEY_SIZE,
    Cleared,
    FrontendLoad,
    KvEvents,
    KvSnapshot,
    Priced,
    Stored,
    WorkerLoad,
)
from inlay.router.index import Keys, keys_of
from inlay.router.member import MAX_TIERS, PoolMember, TierHolding
from inlay.router.snapshot import Pool

log = logging.getLogger(__name__)

TELL_SECONDS = 0.25
"""Period of messages with changes."""

WHOLE_SECONDS = 5.0
"""Period of messages with everything."""

FORGOTTEN_SECONDS = 15.0
"""Silence after which a frontend counts as having no load."""

_MOST_ROUTED = 1 << 20
"""Bytes of routed blocks in a message; of more the others do not hear."""

RETRY_SECONDS = 1.0
"""Before a snapshot is asked for again."""

_AT_ONCE = 4096
"""Blocks of a snapshot that are taken before others have a turn."""

_KEPT = 4096
"""Messages kept while a snapshot is on its way; when more come it is asked for again."""

_NOTHING = WorkerLoad()


class _PeerFrontend:
    __slots__ = ("heard_at", "loads", "sequence")

    def __init__(self) -> None:
        self.sequence = -1
        self.heard_at = 0.0
        self.loads: dict[str, WorkerLoad] = {}


class PeerLoads:
    """Sums the loads of other frontends, and publishes that of this one.

    Args:
        publish: sends a message to the others.
        learned: called with the load of all others at a worker, when it changes.
        routed: called with the prompts sent to a worker that publishes no cache events.
        name: of this frontend, unique.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        publish: Callable[[FrontendLoad], None],
        learned: Callable[[str, WorkerLoad], None],
        routed: Callable[[str, Keys], None],
        *,
        name: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._publish = publish
        self._learned = learned
        self._routed_elsewhere = routed
        self._name = name or secrets.token_hex(8)
        self._clock = clock
        self._peers: dict[str, _PeerFrontend] = {}
        self._sums: dict[str, WorkerLoad] = {}
        self._members: dict[str, PoolMember] = {}
        self._told: dict[str, WorkerLoad] = {}
        self._routed: dict[str, list[bytes]] = {}
        self._routed_bytes = 0
        self._sequence = 0
        self._whole_at = 0.0
        self._telling: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to tell."""
        self._telling = asyncio.create_task(self._tell_on())

    async def close(self) -> None:
        """Publish that this frontend has no load any more."""
        if self._telling is not None:
            self._telling.cancel()
            with suppress(asyncio.CancelledError):
                await self._telling
            self._sequence += 1
            self._publish(FrontendLoad(frontend=self._name, sequence=self._sequence, leaving=True))

    def load(self, worker_id: str) -> WorkerLoad:
        """Load of all others at a worker."""
        return self._sums.get(worker_id, _NOTHING)

    def watch(self, member: PoolMember) -> None:
        """This frontend sends requests to a worker."""
        self._members[member.id] = member

    def sent(self, member: PoolMember, keys: Keys) -> None:
        """A worker was sent a prompt of these blocks."""
        if not member.card.kv_events and self._routed_bytes + keys.nbytes <= _MOST_ROUTED:
            self._routed.setdefault(member.id, []).append(keys.astype("<u8").tobytes())
            self._routed_bytes += keys.nbytes

    def take(self, message: FrontendLoad) -> None:
        """Apply a message of another frontend; older ones than the last are ignored."""
        if message.frontend == self._name:
            return
        peer = self._peers.get(message.frontend)
        if message.leaving:
            if peer is not None:
                self._forget(message.frontend)
            return
        if peer is None:
            peer = self._peers[message.frontend] = _PeerFrontend()
            self._whole_at = 0.0  # it does not know this frontend either
        if message.sequence <= peer.sequence:
            return
        peer.sequence, peer.heard_at = message.sequence, self._clock()
        if message.whole:
            for worker_id in set(peer.loads) - set(message.loads):
                self._set(peer, worker_id, _NOTHING)
        for worker_id, load in message.loads.items():
            self._set(peer, worker_id, load)
        for worker_id, keys in message.routed.items():
            self._routed_elsewhere(worker_id, keys_of(keys))

    def _set(self, peer: _PeerFrontend, worker_id: str, load: WorkerLoad) -> None:
        before = peer.loads.pop(worker_id, _NOTHING)
        if load != _NOTHING:
            peer.loads[worker_id] = load
        if load == before:
            return
        known = self.load(worker_id)
        now = WorkerLoad(
            known.requests + load.requests - before.requests,
            known.prefill + load.prefill - before.prefill,
            known.decode + load.decode - before.decode,
        )
        if now == _NOTHING:
            del self._sums[worker_id]
        else:
            self._sums[worker_id] = now
        self._learned(worker_id, now)

    def _forget(self, name: str) -> None:
        peer = self._peers.pop(name)
        for worker_id in list(peer.loads):
            self._set(peer, worker_id, _NOTHING)

    async def _tell_on(self) -> None:
        while True:
            self.tell()
            await asyncio.sleep(TELL_SECONDS)

    def tell(self) -> None:
        """Publish changes, or everything when due; forget frontends that are silent."""
        now = self._clock()
        for name in [
            name for name, peer in self._peers.items() if now - peer.heard_at > FORGOTTEN_SECONDS
        ]:
            self._forget(name)
        loads = {id_: member.own for id_, member in self._members.items() if member.own != _NOTHING}
        whole = now - self._whole_at >= WHOLE_SECONDS
        changed = loads if whole else self._changes(loads)
        for id_ in [id_ for id_, member in self._members.items() if member.seat is None]:
            del self._members[id_]
        if not (whole or changed or self._routed):
            return
        if whole:
            self._whole_at = now
        self._told = loads
        routed = {worker_id: b"".join(parts) for worker_id, parts in self._routed.items()}
        self._routed, self._routed_bytes = {}, 0
        self._sequence += 1
        self._publish(
            FrontendLoad(
                frontend=self._name,
                sequence=self._sequence,
                whole=whole,
                loads=changed,
                routed=routed,
            )
        )

    def _changes(self, loads: dict[str, WorkerLoad]) -> dict[str, WorkerLoad]:
        changed = {id_: load for id_, load in loads.items() if self._told.get(id_) != load}
        return changed | {id_: _NOTHING for id_ in self._told if id_ not in loads}


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
            log.warning(
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
                log.info("worker %s sends no snapshot of its cache: %s", member.id, error.message)
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
