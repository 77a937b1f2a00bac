"""Prefix cache: the page of each block digest, and LRU eviction."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from itertools import islice

_LOGGED = 4096
"""Digests that are remembered as forgotten; who has missed more looks all up again."""


class PrefixCache:
    """Digests of full, computed pages, for each page group. Knows no sequences and no tensors.

    Each page is unknown (no digest), held (a digest, and used by a sequence), or idle (a digest,
    and unused). Only idle pages are evicted, least recently used first, across all groups.

    Attributes:
        num_forgotten: digests found by `find_at` that have been removed since.
    """

    __slots__ = ("_forgotten", "_idle", "_indices", "_log", "_names", "_pages", "num_forgotten")

    def __init__(
        self, num_groups: int = 1, forgotten: Callable[[bytes, int], None] | None = None
    ) -> None:
        self._forgotten = forgotten
        self._pages: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._names: dict[int, tuple[int, bytes]] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._indices: dict[int, int] = {}
        self._log: deque[tuple[int, bytes, int]] = deque(maxlen=_LOGGED)
        self.num_forgotten = 0

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, page: int) -> bool:
        return page in self._names

    @property
    def idle(self) -> int:
        """Number of pages that can be evicted."""
        return len(self._idle)

    def find(self, digest: bytes, group: int = 0) -> int | None:
        """Return the page in `group` of the last positions of the prefix `digest`, or None."""
        return self._pages[group].get(digest)

    def find_at(self, index: int, digest: bytes, group: int) -> int | None:
        """Return as `find`, for a digest of `index` + 1 pages: `forgotten_since` tells of it."""
        page = self._pages[group].get(digest)
        if page is not None:
            self._indices[page] = index
        return page

    def forgotten_since(self, number: int) -> Iterable[tuple[int, bytes, int]] | None:
        """Return (page index, digest, group) of what was forgotten since `num_forgotten` was so.

        Newest first; None where that is not known any more.
        """
        count = self.num_forgotten - number
        return None if count > len(self._log) else islice(reversed(self._log), count)

    def insert(self, digest: bytes, page: int, group: int = 0) -> bool:
        """Assign a digest to a held page. Returns False if another page already has it.

        In that case `page` stays unknown.
        """
        if digest in self._pages[group] or page in self._names:
            return False
        self._pages[group][digest] = page
        self._names[page] = (group, digest)
        return True

    def mark_idle(self, page: int) -> None:
        """Mark a page that lost its last user: it is now the most recently used idle page."""
        self._idle[page] = None

    def mark_used(self, page: int) -> None:
        self._idle.pop(page, None)

    def touch(self, page: int) -> None:
        """Make an idle page the most recently used one."""
        if page in self._idle:
            self._idle.move_to_end(page)

    def names(self) -> list[tuple[int, bytes]]:
        """Group and digest of every page with a digest."""
        return list(self._names.values())

    @property
    def oldest_idle(self) -> int | None:
        """The page that `evict` would evict."""
        return next(iter(self._idle), None)

    def name(self, page: int) -> tuple[int, bytes]:
        """Group and digest of a page that has one."""
        return self._names[page]

    def evict(self) -> int | None:
        """Evict the least recently used idle page and return it; None if no page is idle."""
        page = self.oldest_idle
        if page is not None:
            self.forget(page)
        return page

    def forget(self, page: int) -> bool:
        """Remove a page's digest. Returns True if it had one."""
        name = self._names.pop(page, None)
        if name is None:
            return False
        group, digest = name
        del self._pages[group][digest]
        self._idle.pop(page, None)
        index = self._indices.pop(page, None)
        if index is not None:
            self._log.append((index, digest, group))
            self.num_forgotten += 1
        if self._forgotten is not None:
            self._forgotten(digest, group)
        return True
