"""Layout of the KV cache: page groups, limits, and the number of pages.

A layer with a sliding window needs the last `window` positions only, another layer all of them. So
layers are divided into groups of one window each, and a sequence holds a run of pages in every
group; in a group with a window, the run loses its first pages as the sequence grows. All groups
hold equally many layers, so all pages have the same size: any page serves any group, and memory
goes where it is needed, whatever the mix of long and short sequences. The idea is that of vLLM's
hybrid KV cache manager and of Jenga (arXiv 2503.18292).
"""

import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from inlay.base.errors import EngineError, InvalidRequestError
from inlay.engine.sections import CacheOptions
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.attention.shape import LayerShape
from inlay.engine.torch.windows import Window, first_seen, size_of
from inlay.messages.fields import check_length
from inlay.messages.request import Request

MAX_GROUPS = 8
"""Maximum number of groups: every step fills the block tables of each."""

MAX_PLACES = 1.25
"""Maximum number of layer places of all groups together, per layer.

Unused places cost memory for sequences shorter than their windows.
"""

TYPICAL_LENGTH = 512
"""Expected length of a sequence, for the default cache size."""

SHARE = 4
"""Without a setting, the cache takes at most 1/SHARE of the available memory of a CPU."""

GPU_SHARE = 0.9
"""Default of `gpu_memory_utilization`, as in vLLM."""


class PageGroup(NamedTuple):
    """Layers that keep the same positions in the same pages.

    Attributes:
        window: positions that a position sees; those that no later one sees are dropped.
        layers: layer numbers; the i-th has the i-th place in a page.
    """

    window: Window
    layers: tuple[int, ...]


def page_groups(layers: Sequence[LayerShape], max_model_len: int) -> tuple[PageGroup, ...]:
    """Divide layers as `group_layers` does; one group if their shapes per position differ."""
    alike = len({layer.page for layer in layers}) == 1
    return group_layers([layer.window if alike else None for layer in layers], max_model_len)


def group_layers(windows: Sequence[Window], max_model_len: int) -> tuple[PageGroup, ...]:
    """Divide layers so that a sequence of `max_model_len` positions takes the least memory.

    Returns:
        Groups of one window each, within `MAX_GROUPS` and `MAX_PLACES`; one group of all layers if
        windows save too little.
    """
    kept = [
        window if (size_of(window) or max_model_len) < max_model_len else None for window in windows
    ]
    kinds = Counter(kept)
    least, best = len(windows) * max_model_len, None
    # Of two equally good sizes, the first needs fewer groups.
    for size in range(len(windows), 0, -1):
        counts = {window: -(-count // size) for window, count in kinds.items()}
        taken = sum(
            size * count * (size_of(window) or max_model_len) for window, count in counts.items()
        )
        number = sum(counts.values())
        if number <= MAX_GROUPS and number * size <= MAX_PLACES * len(windows) and taken < least:
            least, best = taken, size
    if best is None:
        return (PageGroup(None, tuple(range(len(windows)))),)
    groups = []
    for window in sorted(kinds, key=lambda window: size_of(window) or 0):
        layers = tuple(layer for layer, own in enumerate(kept) if own == window)
        groups += [
            PageGroup(window, layers[first : first + best]) for first in range(0, len(layers), best)
        ]
    return tuple(groups)


def pages_for(positions: int, page_size: int) -> int:
    """Return the number of pages that hold the first `positions`."""
    return -(-positions // page_size)


def first_page(window: Window, computed: int, page_size: int) -> int:
    """Return the index of the first page that a position from `computed` on can see."""
    return first_seen(window, computed) // page_size


def most_pages(window: Window, length: int, chunk: int, page_size: int) -> int:
    """Return the maximum number of pages of a group that a sequence holds.

    It has `length` positions and is computed by at most `chunk` of them per step.
    """
    every = pages_for(length, page_size)
    if window is None or (size := size_of(window)) is None:
        return every
    # A step needs size - 1 positions and its own; the first may be the last of a page.
    return min(every, (size - 1 + chunk + page_size - 2) // page_size + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits of the engine.

    Attributes:
        max_model_len: maximum number of positions of one sequence, prompt and output together.
        max_num_seqs: maximum number of sequences in one step.
        max_num_batched_tokens: maximum number of positions in one step.
        usual_positions: those of prompts in a step, unless a segment must not be split; None for as
            many as there may be.
        page_size: positions in a page, a multiple of `inlay.messages.digest.BLOCK_SIZE`.
        num_pages: total number of pages, shared by all page groups.
        windows: window of each page group, None for full attention; `Core` takes them from its
            model.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    num_pages: int
    windows: tuple[Window, ...] = (None,)
    usual_positions: int | None = None

    def pages_for(self, positions: int) -> int:
        """Return the number of pages of one group that hold the first `positions`."""
        return pages_for(positions, self.page_size)

    def first_page(self, group: int, computed: int) -> int:
        """Return the index of the first page in `group` needed after `computed` positions."""
        return first_page(self.windows[group], computed, self.page_size)

    def most_pages(self, length: int, chunk: int) -> int:
        """Return the maximum number of pages of all groups that a sequence holds.

        It has `length` positions and is computed by at most `chunk` of them per step.
        """
        return sum(most_pages(window, length, chunk, self.page_size) for window in self.windows)

    def pages_missing(self, computed: int, length: int) -> int:
        """Return an upper bound of the pages to allocate from `computed` to `length` positions."""
        end, have = self.pages_for(length), self.pages_for(computed)
        total = 0
        for group, window in enumerate(self.windows):
            most = end
            if window is not None:
                most = most_pages(window, length, self.max_num_batched_tokens, self.page_size)
                most = min(end, self.first_page(group, computed) + most)
            total += most - have
        return total

    def check(self, request: Request) -> None:
        """Refuse a request that could never run, however long it waited.

        Raises:
            ContextLengthError: prompt and output exceed the model or the pages.
            InvalidRequestError: an empty prompt, or a segment that may not be split exceeds a step.
        """
        prompt = len(request.prompt)
        if not prompt:
            raise InvalidRequestError(
                "a prompt needs at least one position, got none", param="prompt"
            )
        total = prompt + request.sampling.max_tokens
        atomic = request.prompt.atomic_bounds()
        chunk = max((stop - start for start, stop in atomic), default=1)
        if total > self.max_model_len or self.most_pages(total, chunk) > self.num_pages:
            lengths = range(self.max_model_len + 1)
            limit = (
                bisect_right(
                    lengths, self.num_pages, key=lambda length: self.most_pages(length, chunk)
                )
                - 1
            )
            check_length(prompt, limit, request.sampling.max_tokens)
        for start, stop in atomic:
            if stop - start > self.max_num_batched_tokens:
                raise InvalidRequestError(
                    f"positions {start} to {stop} must be computed in one step of at most "
                    f"{self.max_num_batched_tokens} positions, and are {stop - start}"
                )


def num_pages(
    settings: EngineSettings,
    *,
    page_bytes: int,
    windows: Sequence[Window],
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
        return sum(
            most_pages(window, length, chunk, settings.cache.block_size) for window in windows
        )

    longest = most(max_model_len, settings.batch.max_num_batched_tokens)
    need = (
        f"one sequence of {max_model_len} positions needs {longest * page_bytes} bytes of KV cache"
    )
    if settings.cache.kv_cache_memory_bytes is not None:
        pages = settings.cache.kv_cache_memory_bytes // page_bytes
        if pages < longest:
            raise InvalidRequestError(
                f"{need}, kv_cache_memory_bytes is {settings.cache.kv_cache_memory_bytes}: "
                "raise it or lower max_model_len"
            )
        return pages
    if asked is not None:
        if asked // page_bytes < longest:
            share = settings.cache.gpu_memory_utilization or GPU_SHARE
            raise InvalidRequestError(
                f"{need}, gpu_memory_utilization {share} leaves {max(0, asked)} beside the weights "
                "and a step's activations: raise it or lower max_model_len"
            )
        return asked // page_bytes
    typical = settings.batch.max_num_seqs * most(min(TYPICAL_LENGTH, max_model_len), 1)
    pages = min(max(longest, typical), available // SHARE // page_bytes)
    if pages < longest:
        raise EngineError(
            f"{need}, a quarter of the available memory is {available // SHARE}: "
            "lower max_model_len, or say kv_cache_memory_bytes"
        )
    return pages


def share_of_gpu(options: CacheOptions, device: torch.device, activations: int) -> int:
    """Return the bytes that `gpu_memory_utilization` leaves for the cache.

    Memory that this process has already allocated is subtracted.

    Args:
        options: may set the share.
        device: the GPU; holds the weights already.
        activations: bytes that a step takes beside them.

    Raises:
        EngineError: other processes use some of what is asked for.
    """
    # What loading left behind in the allocator is free for pages, and counts as used until then.
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_allocated(device)
    spare = free + torch.cuda.memory_reserved(device) - held
    share = options.gpu_memory_utilization
    asked = int(total * (share or GPU_SHARE)) - held - activations
    if share is None:
        return min(asked, spare - activations)
    if asked > spare:
        raise EngineError(
            f"gpu_memory_utilization {share} asks for {asked} bytes of KV cache, and {spare} of "
            f"the GPU's {total} are free: lower it"
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
