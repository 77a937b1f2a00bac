"""Cached pages with which a sequence can go on."""

from collections.abc import Iterable
from dataclasses import dataclass

from inlay.engine.torch.cache.limits import EngineLimits
from inlay.engine.torch.cache.prefix_cache import PrefixCache
from inlay.engine.torch.sequence import Sequence
from inlay.prompt import split_point


@dataclass(frozen=True, slots=True)
class Hits:
    """Cached pages with which a sequence can go on up to page index `stop`.

    In each group the last before it that are needed.
    """

    stop: int
    pages: list[list[int]]


class PrefixLookup:
    """Finds the pages of sequences in a prefix cache; changes nothing.

    Args:
        cache: names pages by digests.
        bounds: size of a page, and windows of the page groups.
    """

    def __init__(self, cache: PrefixCache, bounds: EngineLimits) -> None:
        self._cache = cache
        self._bounds = bounds

    def hits(self, sequence: Sequence) -> Hits | None:
        """Cached pages with which `sequence` can go on from where it is, as far as that goes.

        They never reach a position that must be computed to give logits, and never end inside an
        atomic segment.
        """
        size = self._bounds.page_size
        if sequence.num_computed_tokens % size:
            return None
        first = sequence.num_computed_tokens // size
        stop = self._cached_until(sequence, first, sequence.max_cacheable // size)
        if stop <= first:
            return None
        starts = (
            max(first, self._bounds.first_page(group, stop * size))
            for group in range(len(sequence.pages))
        )
        found = [
            self.found(sequence, group, range(start, stop)) for group, start in enumerate(starts)
        ]
        return Hits(stop, found)

    def _cached_until(self, sequence: Sequence, first: int, stop: int) -> int:
        """The last page index up to `stop` from which `sequence` could go on if it took what is cached from `first` on.

        A group without a window needs every page before that index. One with a window needs the
        last few: if the earliest of them is missing at index i, none of those that need it will do,
        and i is the next to try.
        """
        size = self._bounds.page_size
        for group, window in enumerate(self._bounds.windows):
            if window is None:
                stop = self._missing(sequence, group, first, stop)
        while stop > first:
            shorter = stop
            for group, window in enumerate(self._bounds.windows):
                if window is not None:
                    low = self._bounds.first_page(group, stop * size)
                    shorter = self._missing(sequence, group, max(first, low), shorter)
            if shorter == stop:
                if may_stop(sequence, stop * size):
                    break
                shorter -= 1
            stop = shorter
        return stop

    def _missing(self, sequence: Sequence, group: int, start: int, stop: int) -> int:
        """The first page index from `start` on that is not cached in `group`, at most `stop`."""
        for index in range(start, stop):
            if self._cached(sequence, group, index) is None:
                return index
        return stop

    def found(self, sequence: Sequence, group: int, indices: Iterable[int]) -> list[int]:
        """The pages that are cached in `group` of those with these indices."""
        pages = (self._cached(sequence, group, index) for index in indices)
        return [page for page in pages if page is not None]

    def _cached(self, sequence: Sequence, group: int, index: int) -> int | None:
        digest = sequence.page_digest(index, self._bounds.page_size)
        return None if digest is None else self._cache.find(digest, group)


def may_stop(sequence: Sequence, position: int) -> bool:
    """Return True if a chunk or a hit may end before `position`: not inside an atomic segment."""
    return split_point(sequence.atomic, position) == position


__all__ = ["Hits", "PrefixLookup", "may_stop"]
