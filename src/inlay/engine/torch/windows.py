"""Positions that layers of local attention see: sliding windows, and Llama 4's chunks."""

from typing import NamedTuple, TypeAlias


class Chunk(NamedTuple):
    """A position sees itself and those before it in its own chunk of `size` positions.

    The first chunk begins at position 0.
    """

    size: int


Window: TypeAlias = int | Chunk | None
"""Positions that a position sees: so many up to itself, those of its chunk, or all before it."""


def first_seen(window: Window, position: int) -> int:
    """Return the first position that `position` sees."""
    if window is None:
        return 0
    if isinstance(window, Chunk):
        return position // window.size * window.size
    return max(0, position - window + 1)


def size_of(window: Window) -> int | None:
    """Return the most positions that a position sees; None for no limit."""
    return window.size if isinstance(window, Chunk) else window
