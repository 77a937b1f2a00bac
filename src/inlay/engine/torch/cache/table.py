"""Page table: free pages, reference counts, and pages to scrub before they are reused."""

from collections.abc import Callable, Iterable, Sequence

from inlay.engine.torch.cache.prefix_cache import PrefixCache


class PageRun:
    """The pages that one sequence holds in one page group.

    They have the page indices `first` up to `end`.

    Index i holds positions from i * page size on. Only `PageTable` changes a run.

    Attributes:
        pages: page numbers, in order.
        first: index of the first page held; earlier ones are no longer needed.
    """

    __slots__ = ("first", "pages")

    def __init__(self, pages: Iterable[int] = ()) -> None:
        self.pages = list(pages)
        self.first = 0

    @property
    def end(self) -> int:
        """Index after the last page."""
        return self.first + len(self.pages)

    def since(self, index: int, stop: int | None = None) -> list[int]:
        """Return the pages from page index `index` on, up to index `stop` if given."""
        return self.pages[
            max(0, index - self.first) : None if stop is None else max(0, stop - self.first)
        ]


class PageTable:
    """Allocates pages by number, from 1 on, and counts references.

    Every page is exactly one of: free, used (at least one reference), idle (no reference, but in
    the prefix cache), dirty (no reference, to be scrubbed before it is free). Page 0 is the null
    page: it pads block tables.

    Attributes:
        evicted: called with group, digest and number of each page that makes room for others, if it
            gave finite logits; its content is there until somebody writes to it.
    """

    __slots__ = (
        "_cache",
        "_dirty",
        "_free",
        "_invalidated",
        "_references",
        "_verified",
        "evicted",
        "num_pages",
    )

    def __init__(self, num_pages: int, cache: PrefixCache) -> None:
        self.num_pages = num_pages
        self.evicted: Callable[[int, bytes, int], None] | None = None
        self._cache = cache
        self._free = list(range(num_pages, 0, -1))
        self._references = [0] * (num_pages + 1)
        self._verified = bytearray(num_pages + 1)
        self._invalidated: set[int] = set()
        self._dirty: list[int] = []

    @property
    def available(self) -> int:
        """Number of pages that `grow` can allocate."""
        return len(self._free) + self._cache.idle

    @property
    def free(self) -> int:
        """Number of pages without references and digests."""
        return len(self._free)

    @property
    def dirty(self) -> int:
        """Number of pages to scrub."""
        return len(self._dirty)

    @property
    def used(self) -> int:
        """Number of pages with references."""
        return self.num_pages - self.available - len(self._dirty)

    def references(self, page: int) -> int:
        """Return the reference count of `page`."""
        return self._references[page]

    def is_verified(self, page: int) -> bool:
        """Return True if `page` gave finite logits here."""
        return bool(self._verified[page])

    def num_unreferenced(self, pages: Iterable[int]) -> int:
        """Return the number of `pages` without references."""
        return sum(self._references[page] == 0 for page in pages)

    def grow(self, runs: Sequence[PageRun], count: int) -> bool:
        """Append `count` new pages to each run, evicting idle pages if needed.

        Returns:
            False, with nothing changed, if fewer pages are available.
        """
        if count * len(runs) > self.available:
            return False
        for run in runs:
            for _ in range(count):
                page = self._free.pop() if self._free else self._evict()
                if page is None:
                    raise RuntimeError("the page table counted a page that is not there")
                self._references[page] = 1
                self._verified[page] = False
                run.pages.append(page)
        return True

    def _evict(self) -> int | None:
        page = self._cache.oldest_idle
        if page is not None and self.evicted is not None and self._verified[page]:
            self.evicted(*self._cache.name(page), page)
        return self._cache.evict()

    def share(self, run: PageRun, pages: Sequence[int]) -> None:
        """Append cached pages to `run`."""
        for page in pages:
            self._references[page] += 1
            self._cache.mark_used(page)
        run.pages.extend(pages)

    def advance(self, run: PageRun, first: int) -> None:
        """Release the pages before page index `first`: the run starts there, or later."""
        if first > run.first:
            passed = first - run.first
            self._let_go(run.pages[:passed])
            del run.pages[:passed]
            run.first = first

    def release(self, runs: Sequence[PageRun]) -> None:
        """Empty the runs of a sequence. Unreferenced pages become idle, free or dirty."""
        # Release the pages of full attention last: a window's pages are useless without them, so
        # they should be evicted first.
        for run in reversed(runs):
            self._let_go(run.pages)
            run.pages.clear()
            run.first = 0

    def mark_verified(self, pages: Iterable[int]) -> None:
        """Record that these pages gave finite logits."""
        for page in pages:
            self._verified[page] = True

    def invalidate(self, pages: Iterable[int], *, keep_verified: bool) -> None:
        """Remove the digests of pages, held or idle, that gave non-finite logits.

        A digest must never name bad keys or values.

        Args:
            pages: page numbers.
            keep_verified: skip pages that gave finite logits before; otherwise one bad prompt could
                evict the prefix it shares with good ones. False for pages that the failed step
                itself wrote.
        """
        for page in pages:
            if keep_verified and self._verified[page]:
                continue
            known = self._cache.forget(page)
            if self._references[page]:
                self._invalidated.add(page)
            elif known:
                self._dirty.append(page)

    def take_dirty(self) -> list[int]:
        """Return the dirty pages, which are free from here on.

        The caller must scrub them before it runs anything.
        """
        pages, self._dirty = self._dirty, []
        self._free.extend(pages)
        return pages

    def reset_cache(self) -> int:
        """Evict every idle page; return their number."""
        count = 0
        while (page := self._cache.evict()) is not None:
            self._free.append(page)
            count += 1
        return count

    def _let_go(self, pages: Sequence[int]) -> None:
        # From last to first: a block is useless without its prefix, so the prefix must be evicted
        # later.
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._invalidated:
                self._invalidated.discard(page)
                self._dirty.append(page)
            elif page in self._cache:
                self._cache.mark_idle(page)
            else:
                self._free.append(page)
