"""How this process gets memory from the system."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_NEVER = 1 << 30


def keep_freed_memory() -> bool:
    """Have the allocator keep large blocks it gets back, for the next large body; whether that could be done.

    By default glibc maps every large block anew and gives it back at once, and touching new pages costs several times more
    than filling them: half of all CPU time for a body of 64 MB. With one arena and no trimming the next body finds the
    last one's pages. The process keeps what it once needed at most, which the in-flight limits bound.
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
