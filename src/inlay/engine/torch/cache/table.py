"""Which pages are free, how many sequences hold each, and which must be scrubbed before anyone else may have them."""

from collections import Counter
from collections.abc import Iterable, Sequence

from inlay.engine.torch.cache.prefix_cache import PrefixCache


class PageRun:
    """The pages that one sequence holds in one page group.

    Those of page indices `first` up to `end`.

    Index i holds positions from i * page size on. The table alone changes a run.

    Attributes:
        pages: page numbers, in order.
        first: index of the first; what came before is no longer needed.
    """

    __slots__ = ("first", "pages")

    def __init__(self, pages: Iterable[int] = ()) -> None:
        self.pages = list(pages)
        self.first = 0

    @property
    def end(self) -> int:
        """One more than the last index."""
        return self.first + len(self.pages)

    def since(self, index: int, stop: int | None = None) -> list[int]:
        """The pages held from page index `index` on, up to index `stop` if given."""
        return self.pages[
            max(0, index - self.first) : None if stop is None else max(0, stop - self.first)
        ]


class PageTable:
    """Hands out pages by number, from 1 on, and counts who holds them.

    Every page is exactly one of: free, used (at least one holder), idle (no holder, but in the
    prefix cache), dirty (no holder, not to be handed out before it is scrubbed). Page 0 is the null
    page: it fills block tables where nobody looks.
    """

    __slots__ = (
        "_cache",
        "_dirty",
        "_free",
        "_invalidated",
        "_references",
        "_verified",
        "num_pages",
    )

    def __init__(self, num_pages: int, cache: PrefixCache) -> None:
        self.num_pages = num_pages
        self._cache = cache
        self._free = list(range(num_pages, 0, -1))
        self._references = [0] * (num_pages + 1)
        self._verified = bytearray(num_pages + 1)
        self._invalidated: set[int] = set()
        self._dirty: list[int] = []

    @property
    def available(self) -> int:
        """Pages that `grow` could hand out now."""
        return len(self._free) + self._cache.idle

    @property
    def free(self) -> int:
        """Pages that nobody holds and no digest names."""
        return len(self._free)

    @property
    def dirty(self) -> int:
        """Pages that wait to be scrubbed."""
        return len(self._dirty)

    @property
    def used(self) -> int:
        """Pages that at least one sequence holds."""
        return self.num_pages - self.available - len(self._dirty)

    def references(self, page: int) -> int:
        """How many hold `page`."""
        return self._references[page]

    def num_exclusive(self, runs: Iterable[PageRun]) -> int:
        """Number of pages that only these runs, of one sequence or several, hold."""
        holders = Counter(page for run in runs for page in run.pages)
        return sum(self._references[page] == count for page, count in holders.items())

    def num_unreferenced(self, pages: Iterable[int]) -> int:
        """How many of `pages` nobody holds."""
        return sum(self._references[page] == 0 for page in pages)

    def grow(self, runs: Sequence[PageRun], count: int) -> bool:
        """Append `count` pages of unknown content to each run, evicting idle ones if need be.

        Returns:
            False, with nothing changed, when fewer than that are available.
        """
        if count * len(runs) > self.available:
            return False
        for run in runs:
            for _ in range(count):
                page = self._free.pop() if self._free else self._cache.evict()
                if page is None:
                    raise RuntimeError("the page table counted a page that is not there")
                self._references[page] = 1
                self._verified[page] = False
                run.pages.append(page)
        return True

    def share(self, run: PageRun, pages: Sequence[int]) -> None:
        """Append pages that the prefix cache knows to `run`."""
        for page in pages:
            self._references[page] += 1
            self._cache.mark_used(page)
        run.pages.extend(pages)

    def advance(self, run: PageRun, first: int) -> None:
        """Let go of the pages before page index `first`.

        The run starts there, if it has not started later.
        """
        if first > run.first:
            passed = first - run.first
            self._let_go(run.pages[:passed])
            del run.pages[:passed]
            run.first = first

    def release(self, runs: Sequence[PageRun]) -> None:
        """Empty the runs of a sequence. Pages that nobody else holds become idle, free or dirty."""
        # Without the last positions of a window what came before is of no use, so of the windows
        # the pages go first.
        for run in reversed(runs):
            self._let_go(run.pages)
            run.pages.clear()
            run.first = 0

    def mark_verified(self, pages: Iterable[int]) -> None:
        """Note that finite logits came out of these pages."""
        for page in pages:
            self._verified[page] = True

    def invalidate(self, pages: Iterable[int], *, keep_verified: bool) -> None:
        """Non-finite logits came out of these pages, held or idle.

        No digest may name what may hold bad keys or values.

        Args:
            pages: which.
            keep_verified: leave those alone that gave finite logits before, or one bad prompt could
                empty the cache of the prefix it shares with good ones. False for those that the
                failed step itself wrote to.
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
        """The pages to scrub now.

        They are free from here on, so the caller scrubs them before it runs anything.
        """
        pages, self._dirty = self._dirty, []
        self._free.extend(pages)
        return pages

    def reset_cache(self) -> int:
        """Forget every idle page; the number forgotten."""
        count = 0
        while (page := self._cache.evict()) is not None:
            self._free.append(page)
            count += 1
        return count

    def _let_go(self, pages: Sequence[int]) -> None:
        # From the last to the first: a prefix must outlive what continues it, which is worth
        # nothing without it.
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


__all__ = ["PageRun", "PageTable"]
