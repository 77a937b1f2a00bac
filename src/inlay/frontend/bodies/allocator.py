"""Memory of this process.

Kept from one large body to the next, and given back to the system when none comes.
"""

import asyncio
import ctypes
import sys

from inlay.frontend.bodies.admission import ByteBudget

IDLE_SECONDS = 5.0
"""Seconds between two looks at whether memory is to be given back."""

_LITTLE = 8 << 20
"""Bytes that are neither worth giving back, nor much to be held by requests."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_NEVER = 1 << 30


def keep_freed_memory() -> bool:
    """Have the allocator keep large blocks it gets back, for the next large body.

    Whether that could be done.

    By default glibc maps every large block anew and gives it back at once, and touching new pages
    costs several times more than filling them: half of all CPU time for a body of 64 MB. With one
    arena and no trimming the next body finds the last one's pages. The process keeps what it once
    needed at most, which the in-flight limits bound, until `give_back_memory` gives it back.
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
    """Give back what the allocator keeps whenever requests have held much and hold little now, until cancelled.

    Args:
        budget: of all requests' bytes.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, TypeError):  # another C library
        return
    seen = 0
    while True:
        await asyncio.sleep(IDLE_SECONDS)
        if budget.used < _LITTLE and budget.taken - seen >= _LITTLE:
            seen = budget.taken
            await asyncio.to_thread(trim, 0)
