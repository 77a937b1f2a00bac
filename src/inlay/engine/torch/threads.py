"""CPU threads and memory settings of the engine's process.

No torch: the environment must be set before torch is imported.
"""

import os
from collections.abc import Mapping

from inlay.engine.settings import EngineSettings


def engine_environment(
    settings: EngineSettings, inherited: Mapping[str, str], host: str
) -> dict[str, str]:
    """As `environment`, whatever the settings and the host."""
    return environment(inherited)


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables to add to those an engine's process inherits.

    Variables set by the user are kept.

    libgomp's threads spin at barriers: next to another busy process, such as the frontend, a
    spinning thread occupies the core that the other needs, and two threads become several times
    slower than one. A short spin avoids both.

    Weights are read completely in every step. With pages of 4 KB, address translation takes a
    quarter of that time; glibc can use huge pages.
    """
    tunables = inherited.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb" not in tunables:
        tunables = ":".join(filter(None, (tunables, "glibc.malloc.hugetlb=1")))
    return {"GOMP_SPINCOUNT": inherited.get("GOMP_SPINCOUNT", "1000"), "GLIBC_TUNABLES": tunables}


def count(num_threads: int | None) -> int:
    """Return the number of compute threads.

    `num_threads`, or the cores available to this process less one, at least one.
    """
    if num_threads is not None:
        return num_threads
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, cores - 1)
