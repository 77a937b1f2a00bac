"""Page groups: layers that share pages, and the pages a sequence needs in each group.

A layer with a sliding window needs the last `window` positions only, another layer all of them. So
layers are divided into groups of one window each, and a sequence holds a run of pages in every
group; in a group with a window, the run loses its first pages as the sequence grows. All groups
hold equally many layers, so all pages have the same size: any page serves any group, and memory
goes where it is needed, whatever the mix of long and short sequences. The idea is that of vLLM's
hybrid KV cache manager and of Jenga (arXiv 2503.18292).
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

MAX_GROUPS = 8
"""Maximum number of groups: every step fills the block tables of each."""

MAX_PLACES = 1.25
"""Maximum number of layer places of all groups together, per layer.

Unused places cost memory for sequences shorter than their windows.
"""


class PageGroup(NamedTuple):
    """Layers that keep the same positions in the same pages.

    Attributes:
        window: a position sees itself and the `window - 1` before it, and older ones are dropped;
            None keeps all.
        layers: layer numbers; the i-th has the i-th place in a page.
    """

    window: int | None
    layers: tuple[int, ...]


def group_layers(windows: Sequence[int | None], max_model_len: int) -> tuple[PageGroup, ...]:
    """Divide layers so that a sequence of `max_model_len` positions takes the least memory.

    Args:
        windows: window of each layer.
        max_model_len: maximum length of a sequence.

    Returns:
        Groups of one window each, within `MAX_GROUPS` and `MAX_PLACES`; one group of all layers if
        windows save too little.
    """
    kept = [window if window is not None and window < max_model_len else None for window in windows]
    kinds = Counter(kept)
    least, best = len(windows) * max_model_len, None
    # Of two equally good sizes, the first needs fewer groups.
    for size in range(len(windows), 0, -1):
        counts = {window: -(-count // size) for window, count in kinds.items()}
        taken = sum(size * count * (window or max_model_len) for window, count in counts.items())
        number = sum(counts.values())
        if number <= MAX_GROUPS and number * size <= MAX_PLACES * len(windows) and taken < least:
            least, best = taken, size
    if best is None:
        return (PageGroup(None, tuple(range(len(windows)))),)
    groups = []
    for window in sorted(kinds, key=lambda window: window or 0):
        layers = tuple(layer for layer, own in enumerate(kept) if own == window)
        groups += [
            PageGroup(window, layers[first : first + best]) for first in range(0, len(layers), best)
        ]
    return tuple(groups)


def pages_for(positions: int, page_size: int) -> int:
    """Return the number of pages that hold the first `positions`."""
    return -(-positions // page_size)


def first_page(window: int | None, computed: int, page_size: int) -> int:
    """Return the index of the first page that a position from `computed` on can see."""
    return 0 if window is None else max(0, computed - window + 1) // page_size


def most_pages(window: int | None, length: int, chunk: int, page_size: int) -> int:
    """Return the maximum number of pages of a group that a sequence holds.

    It has `length` positions and is computed by at most `chunk` of them per step.
    """
    every = pages_for(length, page_size)
    if window is None:
        return every
    # A step needs window - 1 positions and its own; the first may be the last of a page.
    return min(every, (window - 1 + chunk + page_size - 2) // page_size + 1)


__all__ = [
    "MAX_GROUPS",
    "MAX_PLACES",
    "PageGroup",
    "first_page",
    "group_layers",
    "most_pages",
    "pages_for",
]
