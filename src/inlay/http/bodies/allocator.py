"""Settings of the C allocator: keep freed memory for the next body, trim it when idle."""

import asyncio
import ctypes
import sys

from inlay.base.allocator import trim
from inlay.http.bodies.accounting import ByteBudget

IDLE_SECONDS = 5.0
"""Interval in seconds at which memory may be given back."""

_LITTLE = 8 << 20
"""Bytes below which memory is not worth giving back, and below which the server counts as idle."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_NEVER = 1 << 30


def keep_freed_memory() -> bool:
    """Set the allocator to keep freed large blocks; return True if that succeeded.

    By default glibc maps every large block anew and unmaps it when freed. Touching new pages costs
    several times more than filling them: half of all CPU time for a body of 64 MB. With one arena
    and no trimming, the next body reuses the pages of the last one. The process keeps its peak
    memory, which the in-flight limits bound, until `give_back_memory` trims it.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, _NEVER), (_M_TRIM_THRESHOLD, _NEVER))
    done = [mallopt(name, value) for name, value in settings]
    return all(done)


async def give_back_memory(budget: ByteBudget) -> None:
    """Trim the allocator whenever much memory was used and little is in use, until cancelled."""
    seen = 0
    while True:
        await asyncio.sleep(IDLE_SECONDS)
        if budget.used < _LITTLE and budget.taken - seen >= _LITTLE:
            seen = budget.taken
            await asyncio.to_thread(trim)
