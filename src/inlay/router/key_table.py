"""Millions of keys to small numbers, in flat memory, looked up a whole prompt at a time."""

import mmap
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Keys: TypeAlias = npt.NDArray[np.uint64]
Values: TypeAlias = npt.NDArray[np.int32]
_Slots: TypeAlias = npt.NDArray[np.int64]
_Flags: TypeAlias = npt.NDArray[np.bool_]


def _zeros(num_bytes: int) -> mmap.mmap:
    """Zeroed memory in small pages.

    Keys touch it all over from the first on, and each touch of a huge page has the kernel clear 2
    MB: the first prompt after a table of 400 MB was made took 0.4 s.
    """
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


class KeyTable:
    """A map of 64-bit keys to int32 values in a fixed number of slots.

    Open addressing with linear probing, 12 bytes a slot.

    Keys are digests, so they are their own hash; none is 0. A key keeps its slot for good: to
    remove keys, fill another table.

    Attributes:
        size: slots, a power of two. No more than three quarters of them may ever be used.
        used: slots that have a key.
    """

    __slots__ = ("_keys", "_mask", "_values", "size", "used")

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self._mask = size - 1
        self._keys: Keys = np.frombuffer(_zeros(size * 8), np.uint64)
        self._values: Values = np.frombuffer(_zeros(size * 4), np.int32)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._keys.nbytes + self._values.nbytes

    def _find(self, keys: Keys) -> tuple[_Slots, _Flags]:
        """The slot of each key or, where it has none, the free one in which the search ended.

        And whether it has one.
        """
        slots: _Slots = keys.view(np.int64) & self._mask
        there = self._keys[slots]
        here = there == keys
        looking = np.flatnonzero(~here & (there != 0))
        while len(looking):
            further = (slots[looking] + 1) & self._mask
            slots[looking] = further
            there = self._keys[further]
            same = there == keys[looking]
            here[looking] = same
            looking = looking[~same & (there != 0)]
        return slots, here

    def get(self, keys: Keys) -> tuple[Values, _Flags]:
        """(value of each key, whether it is there at all); what is not there is 0."""
        slots, here = self._find(keys)
        # A free slot's value is 0.
        return self._values[slots], here

    def put(self, keys: Keys, values: Values) -> None:
        """Set the values of keys, each of which comes once."""
        slots, here = self._find(keys)
        while True:
            if here.all():
                self._values[slots] = values
                return
            free, new = slots[~here], keys[~here]
            # Of several that want one free slot the last gets it, and the others look again.
            self._keys[free] = new
            self.used += int(np.count_nonzero(self._keys[free] == new))
            slots, here = self._find(keys)

    def slice(self, start: int, stop: int) -> tuple[Keys, Values]:
        """The keys in some of the slots whose value is not 0, and their values."""
        values = self._values[start:stop]
        filled = np.flatnonzero(values)
        return self._keys[start:stop][filled], values[filled]
