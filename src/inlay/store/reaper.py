"""Removes unusable objects from a fleet's storage; one frontend at a time."""

import time
from collections.abc import Callable

import msgspec

from inlay.store.shared import Record, Shared, listed

PERIOD_SECONDS = 60.0
"""Period of removals."""
ORPHAN_SECONDS = 900.0
"""Age at which a content without a record is removed: far more than an upload takes."""
LEASE = "reaper"
"""Key of the record of who removes what has expired."""


class _Lease(msgspec.Struct, frozen=True, array_like=True):
    """Holder of the lease, and its end (seconds since the epoch)."""

    holder: str
    until: float


_encode = msgspec.msgpack.Encoder().encode
_decode_lease = msgspec.msgpack.Decoder(_Lease).decode


class Reaper:
    """One frontend's part in it.

    The lease only saves effort: everything is removed by compare-and-set, so two at once
    do no harm.

    Attributes:
        expired: records removed because they were not used.
    """

    def __init__(
        self,
        shared: Shared,
        holder: str,
        clock: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shared = shared
        self._holder = holder
        self._clock = clock
        self._monotonic = monotonic
        self._orphans: dict[str, float] = {}
        self.expired = 0

    async def turn(self) -> bool:
        """True if this frontend holds the lease, which lasts for three periods.

        Raises `OverloadedError`.
        """
        revision, kept = await self._shared.find(LEASE)
        now = self._clock()
        if kept is not None:
            lease = _decode_lease(kept)
            if lease.holder != self._holder and now < lease.until:
                return False
        new = _Lease(self._holder, now + 3 * PERIOD_SECONDS)
        return await self._shared.swap(LEASE, _encode(new), revision)

    async def reap(self) -> None:
        """Remove expired and half-deleted records, and contents without one.

        Raises `OverloadedError`.
        """
        # First contents, then records: a content that is not in the second list had no record for
        # longer than its upload takes.
        contents = await self._shared.contents()
        used: set[str] = set()
        for name, revision, record in await listed(self._shared):
            if record.is_live(self._clock()):
                used.add(record.content)
            else:
                self.expired += await self.remove(name, revision, record)
        now = self._monotonic()
        self._orphans = {name: self._orphans.get(name, now) for name in contents - used}
        for name, since in list(self._orphans.items()):
            if now - since >= ORPHAN_SECONDS:
                await self._shared.erase(name)
                del self._orphans[name]

    async def remove(self, name: str, revision: int, record: Record) -> bool:
        """Remove a record and its content; False, and nothing, when another has changed it."""
        if not await self._shared.drop(name, revision):
            return False
        await self._shared.erase(record.content)
        self._shared.tell(name)
        return True
