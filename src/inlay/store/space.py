"""Room in a fleet's storage, made of what is least recently used, and quotas of tenants."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

import msgspec

from inlay.base.errors import OverloadedError, RateLimitedError
from inlay.store.entry import Description, cost
from inlay.store.index import LONGEST_WAIT, TENANT_FLAG
from inlay.store.names import Key
from inlay.store.reaper import Reaper
from inlay.store.shared import Shared, listed

_SPARE = 1 / 20
"""Part of the store that is freed beyond need, so that not every upload must free room."""


class FleetLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a fleet's storage, and lifetime of its prompts.

    Attributes:
        max_bytes: of all contents.
        max_entries: prompts.
        max_per_tenant_bytes: of one tenant, as `inlay.store.entry.cost` counts them; None for no
            bound of its own.
        ttl: seconds an unpinned prompt is kept after its last use.
    """

    max_bytes: int
    ttl: float
    max_entries: int = 65536
    max_per_tenant_bytes: int | None = None


class SharedSpace:
    """Bytes of a fleet's storage for this frontend's uploads."""

    def __init__(
        self, shared: Shared, limits: FleetLimits, reaper: Reaper, clock: Callable[[], float]
    ) -> None:
        self.evictions = 0
        self._shared = shared
        self._limits = limits
        self._reaper = reaper
        self._clock = clock
        self._turn = asyncio.Lock()
        self._writing = 0

    @asynccontextmanager
    async def taken(self, size: int) -> AsyncIterator[None]:
        """Make room for `size` bytes, which are written within this context.

        Raises `OverloadedError` where pinned prompts leave none.
        """
        async with self._turn:
            await self._make_room(size)
            self._writing += size
        try:
            yield
        finally:
            self._writing -= size

    async def _make_room(self, size: int) -> None:
        """Make room for `size` bytes; the least recently used prompts go, pinned ones stay."""
        limits = self._limits
        held, count = await self._shared.size()
        short = held + self._writing + size - limits.max_bytes
        over = count + 1 - limits.max_entries
        if short <= 0 and over <= 0:
            return
        now = self._clock()
        records = await listed(self._shared)
        # The server counts those that were just removed too.
        over = len(records) + 1 - limits.max_entries
        victims = [found for found in records if not (found[2].pinned and found[2].is_live(now))]
        victims.sort(key=lambda found: (found[2].is_live(now), found[2].used_at))
        if sum(record.size for _, _, record in victims) < short or len(victims) < over:
            raise OverloadedError(
                f"the fleet's store of prompt_embeds is full of pinned ones; {size} bytes more "
                "find no room",
                retry_after=min(limits.ttl, LONGEST_WAIT),
            )
        short = max(0, short + int(_SPARE * limits.max_bytes))
        over += int(_SPARE * limits.max_entries)
        for name, revision, record in victims:
            if short <= 0 and over <= 0:
                break
            if await self._reaper.remove(name, revision, record):
                self.evictions += 1
                short, over = short - record.size, over - 1


class TenantQuotas:
    """Quotas of tenants, in bytes as `inlay.store.entry.cost` counts them.

    Of uploads in progress only those of this frontend are known.

    Args:
        shared: the fleet's storage.
        share: of each tenant; None for no bound.
        wait: `Retry-After` of a refused upload, in seconds.
        clock: seconds since the epoch.
    """

    def __init__(
        self, shared: Shared, share: int | None, wait: float, clock: Callable[[], float]
    ) -> None:
        self._shared = shared
        self._share = share
        self._wait = wait
        self._clock = clock
        self._under_way: Counter[Description] = Counter()
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    async def take(self, description: Description) -> None:
        """Take part of the tenant's share for an upload, until `give_back`.

        The same prompt twice counts once.

        Raises:
            RateLimitedError: there is not as much left.
            OverloadedError: NATS does not say what is stored.
        """
        if self._share is not None:
            lock = self._locks.setdefault(description.tenant, asyncio.Lock())
            async with lock:
                await self._check(description, self._share)
                self._under_way[description] += 1

    def give_back(self, description: Description) -> None:
        """Count an upload no more: it is stored, or given up."""
        if self._share is not None:
            self._under_way[description] -= 1
            if not self._under_way[description]:
                del self._under_way[description]

    async def _check(self, description: Description, share: int) -> None:
        # Taken before the list: an upload that ends meanwhile need not be in the list.
        held: dict[Key, int] = {
            other.key: cost(other.num_bytes)
            for other in self._under_way
            if other.tenant == description.tenant
        }
        now = self._clock()
        for _, _, record in await listed(self._shared, description.tenant.hex()):
            if record.is_live(now):
                held[record.description.key] = cost(record.description.num_bytes)
        held.pop(description.key, None)
        used, size = sum(held.values()), cost(description.num_bytes)
        if used + size > share:
            raise RateLimitedError(
                f"your stored prompt_embeds take {used} bytes; {size} more would pass your share "
                f"of {share} ({TENANT_FLAG}): delete some, or wait until they expire",
                retry_after=self._wait,
            )
