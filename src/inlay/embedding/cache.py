"""Result cache by digest of the inputs.

Bounded in bytes; a result that is being computed is not computed again.

A result is a bundle of named arrays: the embedding of a text, or an encoder's output for an image.
Keys are digests of everything a result depends on, and of the tenant where tenants must not share:
then neither a hit nor a wait reveals what another tenant asked.
"""

import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from inlay.base.lru import LruBytes
from inlay.base.single_flight import SingleFlight

Bundle: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""Named arrays that belong together. Cached arrays are read-only."""

_ENTRY_BYTES = 2 * sys.getsizeof(0) + 96
"""Size of an ordered dictionary's entry beside key and value.

Measured with CPython 3.11 to 3.13, rounded up.
"""


class ResultCache:
    """LRU cache of results. For one event loop.

    Args:
        limit: maximum bytes of cached results, overhead included; 0 caches nothing, but equal keys
            are still computed once at a time.

    Attributes:
        kept: the results that are cached.
        hits: results found in the cache.
        joined: results that were already being computed for another caller.
        misses: results that were computed.
        refused: results larger than the limit.
    """

    def __init__(self, limit: int) -> None:
        self.kept: LruBytes[bytes, Bundle] = LruBytes(limit, size_of)
        self.hits = self.joined = self.misses = self.refused = 0
        self._flights: SingleFlight[bytes, Bundle] = SingleFlight()

    def __len__(self) -> int:
        """Number of cached results."""
        return len(self.kept)

    @property
    def evictions(self) -> int:
        """Results that gave way to newer ones."""
        return self.kept.evictions

    async def fetch(
        self, keys: Sequence[bytes], compute: Callable[[Sequence[int]], Awaitable[Sequence[Bundle]]]
    ) -> list[Bundle]:
        """Return the result of each key.

        Args:
            keys: digests; equal keys share one result.
            compute: takes indices into `keys` (distinct keys) and returns their results. Called for
                keys that are neither cached nor being computed, and for those whose computation,
                begun by another caller, failed: its error is that caller's. It goes on while
                anyone waits for a result of it, whoever began it.

        Raises:
            BaseException: any error of `compute`, `asyncio.CancelledError` included.
        """
        found: dict[bytes, Bundle] = {}
        places = {key: index for index, key in reversed(list(enumerate(keys)))}

        async def missing(lacking: Sequence[bytes]) -> list[Bundle]:
            bundles = list(map(_owned, await compute([places[key] for key in lacking])))
            self.misses += len(lacking)
            for key, bundle in zip(lacking, bundles, strict=True):
                if not self.kept.put(key, bundle):
                    self.refused += bool(self.kept.limit)
            return bundles

        while lacking := [key for key in places if key not in found]:
            for key in lacking:
                kept = self.kept.get(key)
                if kept is not None:
                    self.hits += 1
                    found[key] = kept
            wanted = [key for key in lacking if key not in found]
            joined = {key for key in wanted if key in self._flights}
            computed = await self._flights.run_many(wanted, missing)
            self.joined += len(joined & computed.keys())
            found |= computed
        return [found[key] for key in keys]


def size_of(key: bytes, bundle: Bundle) -> int:
    """Return the bytes that caching `bundle` under `key` takes, array memory included."""
    arrays = sum(sys.getsizeof(array) for array in bundle.values())
    return sys.getsizeof(key) + sys.getsizeof(bundle) + arrays + _ENTRY_BYTES


def _owned(bundle: Bundle) -> Bundle:
    """Copy arrays that are views: a view of a batch would keep the whole batch in memory."""
    owned = {}
    for name, array in bundle.items():
        own = np.array(array, copy=True) if array.base is not None else array
        own.setflags(write=False)
        owned[name] = own
    return owned
