"""Number of KV pages to allocate."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from inlay.engine.settings import EngineSettings
from inlay.engine.torch.cache.page_groups import most_pages
from inlay.errors import EngineError, InvalidRequestError

TYPICAL_LENGTH = 512
"""Expected length of a sequence, for the default cache size."""

SHARE = 4
"""Without a setting, the cache takes at most 1/SHARE of the available memory."""


def num_pages(
    settings: EngineSettings,
    *,
    page_bytes: int,
    windows: Sequence[int | None],
    max_model_len: int,
    available: int,
    asked: int | None = None,
) -> int:
    """Return the number of pages of `settings.block_size` positions.

    Either the configured size, or enough for the settings within bounds.

    Args:
        settings: settings of the engine.
        page_bytes: keys and values of a page, over all its layers.
        windows: window of each page group.
        max_model_len: maximum length of a sequence.
        available: free memory in bytes, after the model is loaded.
        asked: bytes of the cache from `share_of_gpu`, or None.

    Raises:
        InvalidRequestError: the configured size does not hold one sequence of `max_model_len`.
        EngineError: the available memory does not.
    """

    def most(length: int, chunk: int) -> int:
        return sum(most_pages(window, length, chunk, settings.block_size) for window in windows)

    longest = most(max_model_len, settings.max_num_batched_tokens)
    need = (
        f"one sequence of {max_model_len} positions needs {longest * page_bytes} bytes of KV cache"
    )
    if settings.kv_cache_memory_bytes is not None:
        pages = settings.kv_cache_memory_bytes // page_bytes
        if pages < longest:
            raise InvalidRequestError(
                f"{need}, kv_cache_memory_bytes is {settings.kv_cache_memory_bytes}: raise it or "
                "lower max_model_len"
            )
        return pages
    if asked is not None:
        if asked // page_bytes < longest:
            raise InvalidRequestError(
                f"{need}, gpu_memory_utilization {settings.gpu_memory_utilization} leaves "
                f"{max(0, asked)} beside the weights: raise it or lower max_model_len"
            )
        return asked // page_bytes
    typical = settings.max_num_seqs * most(min(TYPICAL_LENGTH, max_model_len), 1)
    pages = min(max(longest, typical), available // SHARE // page_bytes)
    if pages < longest:
        raise EngineError(
            f"{need}, a quarter of the available memory is {available // SHARE}: "
            "lower max_model_len, or say kv_cache_memory_bytes"
        )
    return pages


def share_of_gpu(settings: EngineSettings, device: torch.device) -> int | None:
    """Return the bytes that `gpu_memory_utilization` leaves for the cache; None if it is not set.

    Memory that this process has already allocated is subtracted.

    Args:
        settings: settings of the engine.
        device: the GPU, if it is set; holds the weights already.

    Raises:
        EngineError: other processes use some of it.
    """
    if settings.gpu_memory_utilization is None:
        return None
    free, total = torch.cuda.mem_get_info(device)
    asked = int(total * settings.gpu_memory_utilization) - torch.cuda.memory_allocated(device)
    spare = free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if asked > spare:
        raise EngineError(
            f"gpu_memory_utilization {settings.gpu_memory_utilization} asks for {asked} bytes of "
            f"KV cache, and {spare} of the GPU's {total} are free: lower it"
        )
    return asked


def available_memory(device: torch.device) -> int:
    """Return the bytes that can be allocated on `device` now."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    group = _group_memory()
    return _system_memory() if group is None else min(_system_memory(), group)


def _system_memory() -> int:
    path = Path("/proc/meminfo")
    if path.exists():
        for line in path.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    name = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")


def _group_memory() -> int | None:
    """Return the memory left in this container's cgroup, None without a limit."""
    root = Path("/sys/fs/cgroup")
    limit, current = root / "memory.max", root / "memory.current"
    if not limit.exists() or not current.exists():
        return None
    text = limit.read_text(encoding="ascii").strip()
    if text == "max":
        return None
    return max(0, int(text) - int(current.read_text(encoding="ascii")))


__all__ = ["available_memory", "num_pages", "share_of_gpu"]
