"""Which block digest is in which page, and which page goes first when room is needed."""

from collections import OrderedDict
from collections.abc import Callable


class PrefixCache:
    """Digests of full, computed pages, in each page group. Knows nothing of sequences or tensors.

    A page is in one of three conditions here: unknown (it has no digest), held (it has one and a
    sequence uses it), or idle (it has one and nobody uses it). Only idle pages are evicted, least
    recently used first, whatever their group.

    Args:
        num_groups: groups of layers.
        forgotten: called with a digest, and the group that no longer has a page of it.
    """

    __slots__ = ("_forgotten", "_idle", "_names", "_pages")

    def __init__(
        self, num_groups: int = 1, forgotten: Callable[[bytes, int], None] | None = None
    ) -> None:
        self._forgotten = forgotten
        self._pages: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._names: dict[int, tuple[int, bytes]] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, page: int) -> bool:
        return page in self._names

    @property
    def idle(self) -> int:
        """Pages that could be evicted now."""
        return len(self._idle)

    def find(self, digest: bytes, group: int = 0) -> int | None:
        """The page that holds, for the layers of `group`, the last positions of the prefix `digest` names; or None."""
        return self._pages[group].get(digest)

    def insert(self, digest: bytes, page: int, group: int = 0) -> bool:
        """Name a held page. False when the digest has a page there already.

        Then `page` stays unknown.
        """
        if digest in self._pages[group] or page in self._names:
            return False
        self._pages[group][digest] = page
        self._names[page] = (group, digest)
        return True

    def mark_idle(self, page: int) -> None:
        """A known page lost its last user: it is now the most recently used of the idle."""
        self._idle[page] = None

    def mark_used(self, page: int) -> None:
        """A known page has a user again, or still."""
        self._idle.pop(page, None)

    def names(self) -> list[tuple[int, bytes]]:
        """Group and digest of every page that has one."""
        return list(self._names.values())

    def evict(self) -> int | None:
        """Forget the least recently used idle page and return it, or None when nothing is idle."""
        if not self._idle:
            return None
        page = next(iter(self._idle))
        self.forget(page)
        return page

    def forget(self, page: int) -> bool:
        """Take a page's digest away; whether it had one."""
        name = self._names.pop(page, None)
        if name is None:
            return False
        group, digest = name
        del self._pages[group][digest]
        self._idle.pop(page, None)
        if self._forgotten is not None:
            self._forgotten(digest, group)
        return True


__all__ = ["PrefixCache"]
