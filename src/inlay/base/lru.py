"""Cache by least recent use, bounded by the sizes of what it holds."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruBytes(Generic[K, V]):
    """Values by key; those that were not used for longest give way to new ones.

    Args:
        limit: of all sizes together.
        size_of: the size of a value, taken when it is put; without it, each counts one.
        on_evict: called with each that has given way.

    Attributes:
        limit: as above.
        used: all sizes together; never over `limit`.
        evictions: values that have given way.
    """

    __slots__ = ("_items", "_on_evict", "_size_of", "evictions", "limit", "used")

    def __init__(
        self,
        limit: int,
        size_of: Callable[[K, V], int] = lambda _key, _value: 1,
        on_evict: Callable[[K, V], None] = lambda _key, _value: None,
    ) -> None:
        self.limit = limit
        self.used = self.evictions = 0
        self._size_of = size_of
        self._on_evict = on_evict
        self._items: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: K) -> bool:
        return key in self._items

    def __iter__(self) -> Iterator[K]:
        """All keys, the least recently used first."""
        return iter(self._items)

    def get(self, key: K) -> V | None:
        """The value of `key`, which is used by that."""
        found = self._items.get(key)
        if found is None:
            return None
        self._items.move_to_end(key)
        return found[0]

    def peek(self, key: K) -> V | None:
        """The value of `key`; not a use."""
        found = self._items.get(key)
        return None if found is None else found[0]

    def oldest(self) -> tuple[K, V] | None:
        """The next to give way."""
        for key, (value, _) in self._items.items():
            return key, value
        return None

    def put(self, key: K, value: V) -> bool:
        """Hold `value` as used now, in place of an older one; False if it alone is too large."""
        size = self._size_of(key, value)
        self.pop(key)
        if size > self.limit:
            return False
        self._items[key] = value, size
        self.used += size
        while self.used > self.limit:
            gone, (lost, freed) = self._items.popitem(last=False)
            self.used -= freed
            self.evictions += 1
            self._on_evict(gone, lost)
        return True

    def pop(self, key: K) -> V | None:
        """Take the value of `key` out, if there is one; it has not given way."""
        found = self._items.pop(key, None)
        if found is None:
            return None
        self.used -= found[1]
        return found[0]
