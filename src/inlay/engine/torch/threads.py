"""CPU threads and memory settings of the engine's process.

No torch: the environment must be set before torch is imported.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from inlay.engine.settings import EngineSettings

_NODES = Path("/sys/devices/system/node")


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


def count(num_threads: int | None, processes: int = 1) -> int:
    """Return the number of compute threads.

    `num_threads`, or the cores available to this process less one, at least one.

    Args:
        num_threads: number that is set, or None.
        processes: number of processes that share the cores.
    """
    if num_threads is not None:
        return num_threads
    return max(1, max(1, len(_available()) - 1) // processes)


def bind(rank: int, size: int, nodes: Path = _NODES) -> int:
    """Run this thread, and those it starts from now on, on the cores of one memory node or more.

    Does nothing with fewer nodes than processes, or where the system does not tell.

    Returns the number of processes that share the cores of this one.
    """
    mine = _available()
    lists = sorted(nodes.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
    cores = [cores for path in lists if (cores := mine & _cores(path.read_text()))]
    if len(cores) >= size > 1:
        each = len(cores) // size
        os.sched_setaffinity(0, set[int]().union(*cores[rank * each : (rank + 1) * each]))
        return 1
    return size


def _available() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _cores(ranges: str) -> set[int]:
    """Return the numbers of a list as Linux writes it: 0-3,8."""
    found: set[int] = set()
    for part in filter(None, ranges.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
