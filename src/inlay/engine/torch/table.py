"""Which pages are free, how many sequences hold each, and which must be scrubbed before anyone else may have them."""

from collections.abc import Iterable, Sequence

from inlay.engine.torch.prefix_cache import PrefixCache


class PageTable:
    """Hands out pages by number and counts who holds them.

    Every page is exactly one of: free, used (at least one holder), idle (no holder, but in the prefix cache), dirty (no
    holder, not to be handed out before it is scrubbed). A holder is a list of page numbers, in the order of the positions
    they hold; the table alone changes it.
    """

    __slots__ = ("_cache", "_condemned", "_dirty", "_free", "_proven", "_references", "num_pages")

    def __init__(self, num_pages: int, cache: PrefixCache) -> None:
        self.num_pages = num_pages
        self._cache = cache
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._proven = bytearray(num_pages)
        self._condemned: set[int] = set()
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

    def exclusive(self, holder: Iterable[int]) -> int:
        """How many pages nobody but `holder` holds."""
        return sum(self._references[page] == 1 for page in holder)

    def unheld(self, pages: Iterable[int]) -> int:
        """How many of `pages` nobody holds."""
        return sum(self._references[page] == 0 for page in pages)

    def grow(self, holder: list[int], count: int) -> bool:
        """Append `count` pages of unknown content to `holder`, evicting idle ones if need be.

        Returns:
            False, with nothing changed, when fewer than `count` are available.
        """
        if count > self.available:
            return False
        for _ in range(count):
            page = self._free.pop() if self._free else self._cache.evict()
            if page is None:
                raise RuntimeError("the page table counted a page that is not there")
            self._references[page] = 1
            self._proven[page] = False
            holder.append(page)
        return True

    def share(self, holder: list[int], pages: Sequence[int]) -> None:
        """Append pages that the prefix cache knows to `holder`."""
        for page in pages:
            self._references[page] += 1
            self._cache.wake(page)
        holder.extend(pages)

    def release(self, holder: list[int]) -> None:
        """Empty `holder`. Pages that nobody else holds become idle, free or dirty."""
        # From the last to the first: a prefix must outlive what continues it, which is worth nothing without it.
        for page in reversed(holder):
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._condemned:
                self._condemned.discard(page)
                self._dirty.append(page)
            elif page in self._cache:
                self._cache.rest(page)
            else:
                self._free.append(page)
        holder.clear()

    def prove(self, pages: Iterable[int]) -> None:
        """Note that finite logits came out of these pages."""
        for page in pages:
            self._proven[page] = True

    def condemn(self, pages: Sequence[int], written: int) -> None:
        """Non-finite logits came out of `pages`, held ones: no digest may name what may hold bad keys or values.

        Pages that gave finite logits before are spared, or one bad prompt could empty the cache of the prefix it shares
        with good ones.

        Args:
            pages: what the sequence holds, in order.
            written: index of the first page that the failed step itself wrote to; from there on none is spared.
        """
        for index, page in enumerate(pages):
            if index >= written or not self._proven[page]:
                self._cache.forget(page)
                self._condemned.add(page)

    def take_dirty(self) -> list[int]:
        """The pages to scrub now; they are free from here on, so the caller scrubs them before it runs anything."""
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


__all__ = ["PageTable"]
