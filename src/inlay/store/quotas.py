"""Quotas of tenants in a fleet's store, uploads in progress included."""

import asyncio
from collections import Counter
from collections.abc import Callable
from weakref import WeakValueDictionary

from inlay.errors import RateLimitedError
from inlay.store.entry import Description, cost
from inlay.store.names import Key
from inlay.store.shared import Shared, listed


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
                f"of {share}: delete some, "
                "or wait until they expire",
                retry_after=self._wait,
            )
