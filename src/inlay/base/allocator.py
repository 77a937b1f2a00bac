"""Memory that the C allocator has and nobody uses."""

import ctypes


def trim() -> None:
    """Give freed memory back to the system; with another C library than glibc it stays."""
    try:
        give_back = ctypes.CDLL(None).malloc_trim
    except (AttributeError, TypeError):
        return
    give_back(0)
