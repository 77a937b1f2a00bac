"""Pages of the prefix cache that leave for other workers, and that come from them."""

from collections.abc import Iterator
from collections.abc import Sequence as Run
from dataclasses import dataclass
from itertools import chain, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.engine.torch.cache.table import PageRun
from inlay.engine.torch.cache_events import CacheEventQueue
from inlay.engine.torch.pages.copying import PageCopier, PageSealer, RecordShape
from inlay.engine.torch.pages.tiers import Offloading, PageTiers
from inlay.engine.torch.prefix_lookup import may_stop
from inlay.engine.torch.scheduler import Scheduler
from inlay.engine.torch.sequence import Sequence


class PageBatch(NamedTuple):
    """Consecutive pages of one group: those from page index `first` on, by their digests."""

    group: int
    first: int
    digests: tuple[bytes, ...]


class FillResult(NamedTuple):
    """Result of filling the cache with some records.

    Attributes:
        pages: how many of the first are in the cache now.
        damaged: the next one is none of its page.
    """

    pages: int
    damaged: bool


@dataclass(frozen=True, slots=True)
class MissingPages:
    """Pages that a sequence lacks, and that a peer may have.

    Attributes:
        sequence: that does not run; it knows the digests.
        bounds: limits of the engine.
        shape: of the records.
        cached: page index up to which it finds pages here.
        stop: page index up to which it can use pages.
        present: (group, page index) of later pages that are here all the same.
    """

    sequence: Sequence
    bounds: EngineLimits
    shape: RecordShape
    cached: int
    stop: int
    present: frozenset[tuple[int, int]] = frozenset()

    @property
    def positions(self) -> int:
        """Positions that need not be computed with these pages."""
        return (self.stop - self.cached) * self.bounds.page_size

    @property
    def num_pages(self) -> int:
        """Number of them, in all groups."""
        return sum(len(piece.digests) for piece in self._all())

    @property
    def num_bytes(self) -> int:
        """Bytes of all their records."""
        return sum(
            len(piece.digests) * self.shape.record_bytes(piece.group) for piece in self._all()
        )

    def _all(self) -> Iterator[PageBatch]:
        return chain(self.full(), self.windows(self.stop))

    @property
    def name(self) -> bytes:
        """Digest of the prefix with these pages."""
        return self.sequence.page_digest(self.stop - 1, self.bounds.page_size) or b""

    def full(self) -> Iterator[PageBatch]:
        """Pieces of the groups that keep all positions, so that any first ones are of use."""
        groups = [group for group, window in enumerate(self.bounds.windows) if window is None]
        count = min(map(self.shape.question, groups), default=1)
        for start in range(self.cached, self.stop, count):
            for group in groups:
                yield from self._pieces(group, start, min(start + count, self.stop))

    def last_end(self, stop: int) -> int:
        """Return the last page index up to `stop` at which the sequence may go on.

        No atomic segment begins before and ends after it.
        """
        while stop > self.cached and not may_stop(self.sequence, stop * self.bounds.page_size):
            stop -= 1
        return stop

    def windows(self, stop: int) -> Iterator[PageBatch]:
        """Pieces of the groups with windows, to go on from page index `stop`."""
        size = self.bounds.page_size
        for group, window in enumerate(self.bounds.windows):
            if window is not None:
                first = max(self.cached, self.bounds.first_page(group, stop * size))
                count = self.shape.question(group)
                for start in range(first, stop, count):
                    yield from self._pieces(group, start, min(start + count, stop))

    def _pieces(self, group: int, start: int, stop: int) -> Iterator[PageBatch]:
        """Pieces of what is not present from page index `start` to `stop`."""
        indices = range(start, stop)
        for present, run in groupby(indices, lambda index: (group, index) in self.present):
            if not present:
                found = list(run)
                digests = (self.sequence.page_digest(i, self.bounds.page_size) for i in found)
                yield PageBatch(group, found[0], tuple(digest or b"" for digest in digests))


class CachedPages:
    """Reads and fills the pages of a prefix cache. In the engine's thread, between two steps.

    No call holds a page: what is read is copied at once, and what is filled is idle in the cache
    at once, to be evicted like any. While sequences run, a call copies no more than a piece.

    Args:
        scheduler: whose cache it is.
        copier: of its pages.
        events: records of pages that the cache gains.

    Attributes:
        copier: as above.
        offloading: copies pages that the cache evicts, or None.
    """

    def __init__(
        self, scheduler: Scheduler, copier: PageCopier, events: CacheEventQueue | None = None
    ) -> None:
        self.copier = copier
        self._scheduler = scheduler
        self._events = events
        self.offloading: Offloading | None = None

    def offload_to(self, tiers: PageTiers) -> None:
        """Keep pages in `tiers` that the cache evicts; preempted sequences ask for them."""
        self.offloading = Offloading(self.copier, tiers)
        if self._events is not None:
            self._events.tiers = tiers
        self._scheduler.table.evicted = self.offloading.evicted
        self._scheduler.start_needs.is_kept = lambda group, digest: not tiers.lacks(group, digest)

    def find_missing_pages(self, sequence: Sequence) -> MissingPages:
        """Return the pages that `sequence`, which does not run now, would have to compute.

        No more than there is room for beside what running sequences need.
        """
        bounds = self._scheduler.bounds
        hits = self._scheduler.hits(sequence)
        cached, pages = (0, []) if hits is None else (hits.stop, list(chain(*hits.pages)))
        for page in reversed(pages):
            self._scheduler.cache.touch(page)
        room = self._scheduler.spare - self._scheduler.table.num_unreferenced(pages)
        size = bounds.page_size
        stop = sequence.max_cacheable // size
        while stop > cached and (
            self._num_needed(cached, stop) > room or not may_stop(sequence, stop * size)
        ):
            stop -= 1
        stop = max(cached, stop)
        present = frozenset(self._present(sequence, cached, stop))
        return MissingPages(sequence, bounds, self.copier.shape, cached, stop, present)

    def _num_needed(self, start: int, stop: int) -> int:
        """Pages that a sequence with those before page index `start` needs to go on at `stop`."""
        bounds = self._scheduler.bounds
        return sum(
            stop - max(start, bounds.first_page(group, stop * bounds.page_size))
            for group in range(len(bounds.windows))
        )

    def _present(self, sequence: Sequence, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield (group, page index) of pages that are here, and keep them a while."""
        bounds, cache = self._scheduler.bounds, self._scheduler.cache
        for index in range(stop - 1, start - 1, -1):
            digest = sequence.page_digest(index, bounds.page_size)
            for group in range(len(bounds.windows)):
                page = None if digest is None else cache.find(digest, group)
                if page is not None:
                    cache.touch(page)
                    yield group, index

    def has(self, group: int, digest: bytes) -> bool:
        """True if a page can be read: it is cached, and gave finite logits."""
        page = self._scheduler.cache.find(digest, group)
        return page is not None and self._scheduler.table.is_verified(page)

    @torch.inference_mode()
    def read(self, sealer: PageSealer, group: int, digests: Run[bytes], records: Tensor) -> int:
        """Copy the first of `digests` that are cached; return how many were copied.

        Of pages that gave finite logits alone; 0 if the first is none.

        Args:
            sealer: of the records.
            group: of the pages.
            digests: their names.
            records: uint8 [len(digests), record_bytes], that they are written to.
        """
        cache, table = self._scheduler.cache, self._scheduler.table
        found: list[int] = []
        for digest in digests[: self._at_a_time(group)]:
            page = cache.find(digest, group)
            if page is None or not table.is_verified(page):
                break
            found.append(page)
        for page in reversed(found):
            cache.touch(page)
        if found:
            count = len(found)
            self.copier.read(sealer, group, found, digests[:count], records[:count])
        return len(found)

    @torch.inference_mode()
    def fill(
        self, sealer: PageSealer, lack: MissingPages, piece: PageBatch, records: Tensor
    ) -> FillResult | None:
        """Put the first pages of a piece into the cache, as far as their records are good.

        Args:
            sealer: of the records.
            lack: what the piece belongs to.
            piece: pages.
            records: uint8 [n, record_bytes], of its first n pages.

        Returns:
            None, with nothing changed, if running sequences need the room.
        """
        cache, table = self._scheduler.cache, self._scheduler.table
        count = min(len(records), self._at_a_time(piece.group) or len(records))
        new = [
            place
            for place, digest in enumerate(piece.digests[:count])
            if cache.find(digest, piece.group) is None
        ]
        run = PageRun()
        if len(new) > self._scheduler.spare or not table.grow([run], len(new)):
            return None
        damaged = False
        if new:
            if self.offloading is not None:
                self.offloading.copy()
            some = records[:count] if len(new) == count else records[new]
            names = [piece.digests[place] for place in new]
            good = self.copier.write(sealer, piece.group, run.pages, names, some)
            damaged = good < len(new)
            count = new[good] if damaged else count
        for place, page in zip(new, run.pages, strict=True):
            if place < count:
                cache.insert(piece.digests[place], page, piece.group)
                if self._events is not None:
                    self._events.stored(lack.sequence, piece.first + place, piece.group)
        table.release([run])
        # A page is of no use without those before it: they must be evicted later.
        for index in range(piece.first + count - 1, -1, -1):
            digest = lack.sequence.page_digest(index, lack.bounds.page_size)
            known = None if digest is None else cache.find(digest, piece.group)
            if known is not None:
                cache.touch(known)
        return FillResult(count, damaged)

    def _at_a_time(self, group: int) -> int | None:
        """Pages that are copied between two steps; None for any number, as nobody waits."""
        return self.copier.shape.piece(group) if len(self._scheduler) else None
