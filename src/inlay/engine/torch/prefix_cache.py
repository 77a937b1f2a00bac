"""Which block digest is in which page, and which page goes first when room is needed."""

from collections import OrderedDict


class PrefixCache:
    """Digests of full, computed pages. Knows nothing of sequences or tensors.

    A page is in one of three conditions here: unknown (it has no digest), held (it has one and a sequence uses it), or
    idle (it has one and nobody uses it). Only idle pages are evicted, least recently used first.
    """

    __slots__ = ("_digests", "_idle", "_pages")

    def __init__(self) -> None:
        self._pages: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page: int) -> bool:
        return page in self._digests

    @property
    def idle(self) -> int:
        """Pages that could be evicted now."""
        return len(self._idle)

    def find(self, digest: bytes) -> int | None:
        """The page that holds the prefix `digest` names, or None."""
        return self._pages.get(digest)

    def insert(self, digest: bytes, page: int) -> bool:
        """Name a held page. False when the digest has a page already: then `page` stays unknown."""
        if digest in self._pages or page in self._digests:
            return False
        self._pages[digest] = page
        self._digests[page] = digest
        return True

    def rest(self, page: int) -> None:
        """A known page lost its last user: it is now the most recently used of the idle."""
        self._idle[page] = None

    def wake(self, page: int) -> None:
        """A known page has a user again, or still."""
        self._idle.pop(page, None)

    def evict(self) -> int | None:
        """Forget the least recently used idle page and return it, or None when nothing is idle."""
        if not self._idle:
            return None
        page, _ = self._idle.popitem(last=False)
        del self._pages[self._digests.pop(page)]
        return page

    def forget(self, page: int) -> bool:
        """Take a page's digest away; whether it had one."""
        digest = self._digests.pop(page, None)
        if digest is None:
            return False
        del self._pages[digest]
        self._idle.pop(page, None)
        return True


__all__ = ["PrefixCache"]
