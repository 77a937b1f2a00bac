"""Memory in huge pages, of 2 MiB on most systems, which a core reads faster than those of 4 KB."""

import mmap
import threading
from contextlib import suppress

import torch
from torch import Tensor

_ALIGNED = 2 << 20
"""Bytes of a huge page."""

_SLAB = 64 << 20
"""Bytes that a `Slabs` asks for at a time; what nobody writes to takes no memory."""

_LINE = 64
"""Bytes that what a `Slabs` gives is aligned to."""


def large_pages(size: int, parts: int = 1, small: int = 0) -> Tensor | None:
    """Return zeros, uint8 [size], whose pages the system may refuse; None where there are none.

    Args:
        size: bytes.
        parts: equal ones that it has, each of which is used from its begin on.
        small: bytes at the begin of each part whose pages stay small: the first byte that is
            written in a huge page has the system clear, and keep, all of it.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    memory = mmap.mmap(-1, size + _ALIGNED, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    found = torch.frombuffer(memory, dtype=torch.uint8)
    first, part = -found.data_ptr() % _ALIGNED, size // parts
    # A kernel may be built without them.
    with suppress(OSError):
        if small:
            # Where they are used unasked.
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        for start in range(0, part * parts, max(1, part)):
            begin = -(-(start + small) // _ALIGNED) * _ALIGNED
            if begin < start + part:
                memory.madvise(mmap.MADV_HUGEPAGE, first + begin, start + part - begin)
    return found[first:][:size]


class Slabs:
    """Memory for tensors one after another, so that small ones lie in huge pages too."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._lock = threading.Lock()

    def take(self, size: int) -> Tensor:
        """Return zeros, uint8 [size], that begin a line of the caches."""
        whole = -(-size // _LINE) * _LINE
        with self._lock:
            if whole > len(self._rest):
                slab = max(whole, _SLAB)
                found = large_pages(slab)
                self._rest = torch.zeros(slab, dtype=torch.uint8) if found is None else found
            found, self._rest = self._rest[:size], self._rest[whole:]
        return found
