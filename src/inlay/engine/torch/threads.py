"""CPU threads of the engine's process.

No torch: the environment must stand before torch is imported.
"""

import os
from collections.abc import Mapping


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Environment variables an engine's process must be started with, beside those it inherits.

    What a user has set stays.

    libgomp's threads spin at barriers; beside a busy neighbour (the frontend, say) a spinning
    thread takes the core the other one waits for, and two threads become several times slower than
    one. A short spin keeps both.

    Weights are read from end to end at every step. In pages of 4 KB a core spends a quarter of that
    on address look-ups; glibc asks for huge ones when told to.
    """
    tunables = inherited.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb" not in tunables:
        tunables = ":".join(filter(None, (tunables, "glibc.malloc.hugetlb=1")))
    return {"GOMP_SPINCOUNT": inherited.get("GOMP_SPINCOUNT", "1000"), "GLIBC_TUNABLES": tunables}


def count(num_threads: int | None) -> int:
    """Threads the engine computes with.

    `num_threads`, or the cores this process may use less one, at least one.
    """
    if num_threads is not None:
        return num_threads
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, cores - 1)
