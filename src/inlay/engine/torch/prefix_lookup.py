"""Pages of a sequence that are cached, and those that another is computing."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.engine.torch.cache.prefix_cache import PrefixCache
from inlay.engine.torch.needs import Need
from inlay.engine.torch.sequence import Sequence
from inlay.messages.prompt import split_point


@dataclass(frozen=True, slots=True)
class Hits(Collection[int]):
    """Cached pages with which a sequence can continue up to page index `stop`.

    For each group, the last pages before it that are needed; good until the next look-up.
    """

    stop: int
    pages: list[list[int]]

    def __len__(self) -> int:
        """Return the number of pages of all groups."""
        return sum(map(len, self.pages))

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.pages)

    def __contains__(self, page: object) -> bool:
        return any(page in pages for pages in self.pages)


class PrefixLookup:
    """Finds cached pages of sequences; changes nothing.

    A sequence that waits is looked at in each step. What was found of it in groups without a window
    is kept with it: only what the cache forgot since then makes that shorter, and it can become
    longer at its end alone. So a further look takes as long as what has changed.
    """

    def __init__(self, cache: PrefixCache, bounds: EngineLimits) -> None:
        self._cache = cache
        self._bounds = bounds

    def hits(self, sequence: Sequence) -> Hits | None:
        """Return the longest run of cached pages that continues `sequence`; None if there are none.

        They exclude positions whose logits are needed, and never end inside an atomic segment.
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
            self._kept(sequence, group, stop)
            if not first and self._bounds.windows[group] is None
            else self.found(sequence, group, range(start, stop))
            for group, start in enumerate(starts)
        ]
        return Hits(stop, found)

    def _kept(self, sequence: Sequence, group: int, stop: int) -> list[int]:
        pages = sequence.cached[group]
        return pages if len(pages) == stop else pages[:stop]

    def _cached_until(self, sequence: Sequence, first: int, stop: int) -> int:
        """Return the last page index up to `stop` that cached pages from `first` on reach.

        A group without a window needs every page before that index. One with a window needs the
        last few: if the earliest of them is missing at index i, no run that needs it is possible,
        and i is tried next.
        """
        size = self._bounds.page_size
        if not first:
            self._forget_lost(sequence)
        for group, window in enumerate(self._bounds.windows):
            if window is None:
                missing = self._missing if first else self._grown
                stop = missing(sequence, group, first, stop)
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

    def _forget_lost(self, sequence: Sequence) -> None:
        """Cut what was found of a sequence at the first page that the cache has forgotten."""
        lost = self._cache.forgotten_since(sequence.looked_up_at)
        sequence.looked_up_at = self._cache.num_forgotten
        if lost is None:
            sequence.forget_cached()
            return
        for index, digest, group in lost:
            pages = sequence.cached[group]
            if index < len(pages) and self._digest(sequence, index) == digest:
                del pages[index:]

    def _grown(self, sequence: Sequence, group: int, start: int, stop: int) -> int:
        """Return as `_missing`, from what was found before on."""
        pages = sequence.cached[group]
        for index in range(len(pages), stop):
            digest = self._digest(sequence, index)
            page = None if digest is None else self._cache.find_at(index, digest, group)
            if page is None:
                return index
            pages.append(page)
        return min(stop, len(pages))

    def _missing(self, sequence: Sequence, group: int, start: int, stop: int) -> int:
        """Return the first page index from `start` to `stop` that is not cached in `group`."""
        for index in range(start, stop):
            if self._cached(sequence, group, index) is None:
                return index
        return stop

    def found(self, sequence: Sequence, group: int, indices: Iterable[int]) -> list[int]:
        """Return the cached pages of `group` among these indices."""
        pages = (self._cached(sequence, group, index) for index in indices)
        return [page for page in pages if page is not None]

    def _digest(self, sequence: Sequence, index: int) -> bytes | None:
        return sequence.page_digest(index, self._bounds.page_size)

    def _cached(self, sequence: Sequence, group: int, index: int) -> int | None:
        digest = self._digest(sequence, index)
        return None if digest is None else self._cache.find(digest, group)


class PagesInProgress:
    """Full pages that running sequences are computing, by digest: the first of each computes it.

    Those that would compute it too wait for it: requests that share a prompt compute it once.
    """

    def __init__(self, page_size: int) -> None:
        self._size = page_size
        self._makers: dict[bytes, Sequence] = {}
        self._waiters: dict[bytes, set[Sequence]] = {}

    def add(self, sequence: Sequence, computed: int) -> None:
        """A sequence has started: it computes its known pages from position `computed` on."""
        for digest in self._digests(sequence, computed):
            if self._makers.setdefault(digest, sequence).paused:
                self._makers[digest] = sequence

    def remove(self, sequence: Sequence, computed: int) -> None:
        """A sequence has stopped; its positions up to `computed` were committed."""
        for digest in self._digests(sequence, computed):
            self.complete(digest, sequence)

    def complete(self, digest: bytes, sequence: Sequence) -> None:
        """A sequence has computed a page, or found it cached."""
        if self._makers.get(digest) is sequence:
            del self._makers[digest]
            self._release(digest)

    def paused(self, sequence: Sequence) -> None:
        """Nobody knows when a sequence goes on: no other waits for what it computes."""
        for digest in [one for one, maker in self._makers.items() if maker is sequence]:
            self._release(digest)

    def wait(self, sequence: Sequence, cached: int) -> bool:
        """Have a sequence wait if one before it computes the page that it would compute next.

        Args:
            sequence: has not started.
            cached: page index up to which it finds pages in the cache.
        """
        stop = (cached + 1) * self._size
        if stop > sequence.max_cacheable or not may_stop(sequence, stop):
            return False
        digest = sequence.page_digest(cached, self._size)
        maker = None if digest is None else self._makers.get(digest)
        if digest is None or maker is None or maker.paused or maker.order >= sequence.order:
            return False
        sequence.needs.add(Need("prefix", digest))
        self._waiters.setdefault(digest, set()).add(sequence)
        return True

    def ended(self, sequence: Sequence) -> None:
        """A sequence waits for no page any more."""
        for need in sequence.needs:
            if need.kind == "prefix":
                self._waiters[need.key].discard(sequence)

    def _release(self, digest: bytes) -> None:
        for sequence in self._waiters.pop(digest, ()):
            sequence.needs.discard(Need("prefix", digest))

    def _digests(self, sequence: Sequence, computed: int) -> Iterable[bytes]:
        for index in range(computed // self._size, sequence.length // self._size):
            digest = sequence.page_digest(index, self._size)
            if digest is not None:
                yield digest


def may_stop(sequence: Sequence, position: int) -> bool:
    """Return True if a chunk or a hit may end at `position`: not inside an atomic segment."""
    return split_point(sequence.atomic, position) == position
