"""Exchange of loads among the frontends of a fleet, in the background."""

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import suppress

from inlay.router.key_table import Keys
from inlay.router.kv_index import keys_of
from inlay.router.member import PoolMember
from inlay.routing import FrontendLoad, WorkerLoad

TELL_SECONDS = 0.25
"""Period of messages with changes."""

WHOLE_SECONDS = 5.0
"""Period of messages with everything."""

FORGOTTEN_SECONDS = 15.0
"""Silence after which a frontend counts as having no load."""

_MOST_ROUTED = 1 << 20
"""Bytes of routed blocks in a message; of more the others do not hear."""

_NOTHING = WorkerLoad()


class _Peer:
    __slots__ = ("heard_at", "loads", "sequence")

    def __init__(self) -> None:
        self.sequence = -1
        self.heard_at = 0.0
        self.loads: dict[str, WorkerLoad] = {}


class Peers:
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
        self._peers: dict[str, _Peer] = {}
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
            peer = self._peers[message.frontend] = _Peer()
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

    def _set(self, peer: _Peer, worker_id: str, load: WorkerLoad) -> None:
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
