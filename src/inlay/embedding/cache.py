"""Results by what they were computed from.

Kept up to a number of bytes, and never computed twice at a time.

A result is a bundle of named arrays: the vector of a text, or what an encoder makes of an image.
Keys are digests that hold all a result depends on and, where tenants share nothing, whose it is:
then neither a hit nor a wait tells one what another asked.
"""

import asyncio
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Bundle: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""Named arrays that belong together. Those a cache holds may not be written to."""

_ENTRY_BYTES = 2 * sys.getsizeof(0) + 96
"""What a place in an ordered dictionary takes beside key and value.

Measured with CPython 3.11 to 3.13, rounded up.
"""


class _Flight:
    """A result that is being computed.

    `done` tells its bundle, or None when whoever computed it has given up.
    """

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done: asyncio.Future[Bundle | None] = asyncio.get_running_loop().create_future()


class ResultCache:
    """The least recently used results go first. For one event loop.

    Args:
        limit: bytes of results kept, with what keeping them takes; 0 keeps none, and equal ones in
            flight are still computed once.

    Attributes:
        limit: likewise.
        bytes: those kept now.
        hits: results that were there.
        joined: results that somebody else was computing already.
        misses: results that were computed.
        evictions: results that went for others.
        refused: results that are larger than the limit.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self.hits = self.joined = self.misses = self.evictions = self.refused = 0
        self._kept: OrderedDict[bytes, tuple[Bundle, int]] = OrderedDict()
        self._flights: dict[bytes, _Flight] = {}

    def __len__(self) -> int:
        """Results kept."""
        return len(self._kept)

    async def fetch(
        self, keys: Sequence[bytes], compute: Callable[[Sequence[int]], Awaitable[Sequence[Bundle]]]
    ) -> list[Bundle]:
        """The result of each key.

        Args:
            keys: equal ones have one result.
            compute: given indices into `keys`, no two of equal keys, the results of those. It is
                called for what is neither kept nor being computed, and again for what others have
                given up: an error is of its own caller, and nobody else hears of it.

        Raises:
            BaseException: what `compute` raised, `asyncio.CancelledError` included.
        """
        found: dict[bytes, Bundle] = {}
        places = {key: index for index, key in reversed(list(enumerate(keys)))}
        while lacking := [key for key in places if key not in found]:
            mine: list[bytes] = []
            theirs: list[tuple[bytes, _Flight]] = []
            for key in lacking:
                kept, flight = self._get(key), self._flights.get(key)
                if kept is not None:
                    found[key] = kept
                elif flight is not None:
                    theirs.append((key, flight))
                else:
                    self._flights[key] = _Flight()
                    mine.append(key)
            if mine:
                found |= await self._lead(mine, [places[key] for key in mine], compute)
            for key, flight in theirs:
                # Shielded: whoever stops waiting must not take the result from the others.
                bundle = await asyncio.shield(flight.done)
                if bundle is not None:
                    self.joined += 1
                    found[key] = bundle
        return [found[key] for key in keys]

    async def _lead(
        self,
        keys: Sequence[bytes],
        indices: Sequence[int],
        compute: Callable[[Sequence[int]], Awaitable[Sequence[Bundle]]],
    ) -> dict[bytes, Bundle]:
        computed: dict[bytes, Bundle] = {}
        try:
            bundles = await compute(indices)
            computed = {key: _owned(bundle) for key, bundle in zip(keys, bundles, strict=True)}
        finally:
            for key in keys:
                self._flights.pop(key).done.set_result(computed.get(key))
        self.misses += len(keys)
        for key, bundle in computed.items():
            self._keep(key, bundle)
        return computed

    def _get(self, key: bytes) -> Bundle | None:
        kept = self._kept.get(key)
        if kept is None:
            return None
        self.hits += 1
        self._kept.move_to_end(key)
        return kept[0]

    def _keep(self, key: bytes, bundle: Bundle) -> None:
        size = size_of(key, bundle)
        if size > self.limit:
            self.refused += bool(self.limit)
            return
        self._kept[key] = bundle, size
        self.bytes += size
        while self.bytes > self.limit:
            _, (_, freed) = self._kept.popitem(last=False)
            self.bytes -= freed
            self.evictions += 1


def size_of(key: bytes, bundle: Bundle) -> int:
    """Bytes of memory that keeping `bundle` under `key` takes, its arrays' own memory included."""
    arrays = sum(sys.getsizeof(array) for array in bundle.values())
    return sys.getsizeof(key) + sys.getsizeof(bundle) + arrays + _ENTRY_BYTES


def _owned(bundle: Bundle) -> Bundle:
    """`bundle` with arrays of their own memory: a view of a batch would keep all of the batch."""
    owned = {}
    for name, array in bundle.items():
        own = np.array(array, copy=True) if array.base is not None else array
        own.setflags(write=False)
        owned[name] = own
    return owned


__all__ = ["Bundle", "ResultCache", "size_of"]
