"""Which layers share a page, and which pages a sequence holds of each group of layers.

A layer with a sliding window needs the last `window` positions only, another layer all of them. So
layers are divided into groups of one window each, and a sequence holds a run of pages in every
group; in a group with a window the run loses its first pages as the sequence goes on. All groups
have room for equally many layers, hence all pages are alike: any page serves any group, and memory
goes to where it is needed, whatever the mix of long and short sequences. The idea is that of vLLM's
hybrid KV cache manager and of Jenga (arXiv 2503.18292).
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

MAX_GROUPS = 8
"""Groups at most: each has block tables of its own, which every step has to fill."""

MAX_PLACES = 1.25
"""Places for layers that all groups have together, per layer, at most.

A sequence within its windows pays for the unused.
"""


class PageGroup(NamedTuple):
    """Layers that keep the same positions in the same pages.

    Attributes:
        window: a position sees itself and the `window - 1` before it, and no more is kept; None:
            all are.
        layers: their numbers; the i-th has the i-th place of a page.
    """

    window: int | None
    layers: tuple[int, ...]


def group_layers(windows: Sequence[int | None], max_model_len: int) -> tuple[PageGroup, ...]:
    """Divide layers so that a sequence of `max_model_len` positions takes the least memory.

    Args:
        windows: of each layer.
        max_model_len: positions of the longest sequence.

    Returns:
        Groups of one window each, or one group of all layers where windows save too little, within
        `MAX_GROUPS` and `MAX_PLACES`.
    """
    kept = [window if window is not None and window < max_model_len else None for window in windows]
    kinds = Counter(kept)
    least, best = len(windows) * max_model_len, None
    # Of two sizes that take the same, the first has fewer groups.
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
    """Pages that hold the first `positions`."""
    return -(-positions // page_size)


def first_page(window: int | None, computed: int, page_size: int) -> int:
    """Index of the first page that a position from `computed` on can see."""
    return 0 if window is None else max(0, computed - window + 1) // page_size


def most_pages(window: int | None, length: int, chunk: int, page_size: int) -> int:
    """Pages of a group that a sequence of `length` positions holds at most, computed by `chunk` or fewer a step."""
    every = pages_for(length, page_size)
    if window is None:
        return every
    # A step needs window - 1 positions and its own; of these the first may be a page's last.
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
