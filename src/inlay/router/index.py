"""Blocks of the routing chain that are cached, and where: millions of blocks, thousands of holders.

`KeyTable` maps keys to small numbers in flat memory, looked up a whole prompt at a time; `KvIndex`
has sets of holders for them.
"""

import mmap
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Keys: TypeAlias = npt.NDArray[np.uint64]
Values: TypeAlias = npt.NDArray[np.int32]
_Slots: TypeAlias = npt.NDArray[np.int64]
_Flags: TypeAlias = npt.NDArray[np.bool_]
Overlaps: TypeAlias = npt.NDArray[np.int32]


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


def keys_of(chain: bytes) -> Keys:
    """A routing chain as an index looks it up: uint64, none of them 0."""
    return np.frombuffer(chain, "<u8") | np.uint64(1)


_FULL = 0.5
"""Part of a table's slots in use from which on it is copied."""

_FILLED_ANEW = 0.35
"""Part in use at most of a table that is copied to.

A table of a power of two slots then doubles.
"""

_SHRINKS = 4
_MOVED_PER_KEY = 16
"""Slots copied with each key that changes.

With tables at most `_SHRINKS` times smaller, copying ends before the new one is full.
"""

_SAMPLE = 1 << 16


class _HolderSets:
    """Sets of holders by number, each as the bits of an integer. Number 0 is the empty set."""

    __slots__ = ("_numbers", "bits")

    def __init__(self) -> None:
        self.bits: list[int] = [0]
        self._numbers: dict[int, int] = {0: 0}

    def number(self, bits: int) -> int:
        """The number of a set, the same for equal ones."""
        number = self._numbers.get(bits)
        if number is None:
            number = self._numbers[bits] = len(self.bits)
            self.bits.append(bits)
        return number


class KvIndex:
    """A map of block keys to sets of holders, of which most blocks have one and few have many.

    A holder is a number: whatever caches blocks, or is thought to. As a key names its whole prefix
    (`inlay.messages.routing`), no tree is needed: what a holder has of a prompt is how many of the
    chain's keys, from the first on, it holds.

    Equal sets are kept once and blocks have the numbers of theirs, so forgetting a holder is
    forgetting its bit: `drop` takes the same time whatever was held. What is forgotten is gone from
    memory when table and sets are next copied, which is done a little with each change, so that no
    change takes long.

    Args:
        smallest: slots of the smallest table, a power of two; a quarter as many keys are handled at
            a time.
    """

    def __init__(self, smallest: int = 1 << 14) -> None:
        self._smallest = smallest
        self._batch = smallest // 4
        self._table = KeyTable(smallest)
        self._sets = _HolderSets()
        self._old: KeyTable | None = None
        self._old_sets = _HolderSets()
        self._translated: Values = np.zeros(1, np.int32)
        self._moved = 0
        self._sets_after_copy = 0
        self._alive = 0
        self._width = 0
        self._free: list[int] = []
        self._dead: list[int] = []
        self._dying: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the tables; sets are few beside them."""
        return self._table.nbytes + (0 if self._old is None else self._old.nbytes)

    @property
    def num_sets(self) -> int:
        """Different sets of holders."""
        return len(self._sets.bits) + (0 if self._old is None else len(self._old_sets.bits))

    @property
    def width(self) -> int:
        """Holders' numbers are below it."""
        return self._width

    def add_holder(self) -> int:
        """A holder that holds nothing yet."""
        if not self._free:
            more = max(1, self._width // 8)
            self._free = list(range(self._width + more - 1, self._width - 1, -1))
            self._width += more
        holder = self._free.pop()
        self._alive |= 1 << holder
        return holder

    def drop(self, holder: int) -> None:
        """Forget a holder and all it holds; its number may be another's later."""
        self._alive &= ~(1 << holder)
        self._dying.append(holder)
        if len(self._dying) > max(self._smallest // 64, self._width // 4):
            self._copy()

    def store(self, holder: int, keys: Keys) -> int:
        """`holder` has these blocks too, each named once. The number of those it had not."""
        added = 0
        for start in range(0, len(keys), self._batch):
            added += self._change(1 << holder, keys[start : start + self._batch], put=True)
        return added

    def remove(self, holder: int, keys: Keys) -> int:
        """`holder` has these blocks no more, each named once. The number of those it had."""
        removed = 0
        for start in range(0, len(keys), self._batch):
            removed += self._change(1 << holder, keys[start : start + self._batch], put=False)
        return removed

    def _change(self, bit: int, keys: Keys, *, put: bool) -> int:
        numbers = self._numbers(keys)
        # Runs of blocks with one set in common, as the blocks of a prompt are.
        begins = np.flatnonzero(np.diff(numbers, prepend=-1))
        bits = self._sets.bits
        after = [
            self._sets.number(bits[number] | bit if put else bits[number] & ~bit)
            for number in numbers[begins].tolist()
        ]
        lengths = np.diff(begins, append=len(keys))
        changed_to: Values = np.repeat(np.array(after, np.int32), lengths)
        changed = np.flatnonzero(changed_to != numbers)
        if not len(changed):
            return 0
        self._table.put(keys[changed], changed_to[changed])
        if self._old is not None:
            self._move(max(self._batch // 2, len(keys) * _MOVED_PER_KEY))
        elif len(self._sets.bits) > 2 * self._sets_after_copy + self._batch:
            self._copy()
        if self._table.used > _FULL * self._table.size:
            self._copy()
        return len(changed)

    def overlap(self, keys: Keys) -> Overlaps:
        """Number of leading blocks that each holder has: int32 [width]."""
        found: Overlaps = np.zeros(self._width, np.int32)
        numbers = self._numbers(keys)
        # Where the set changes; blocks with one set in common are looked at together.
        steps = np.flatnonzero(np.diff(numbers, prepend=-1)).tolist()
        holders = self._alive
        bits = self._sets.bits
        for step in steps:
            fewer = holders & bits[numbers[step]]
            if fewer != holders:
                if step:
                    found[self._flags(holders)] = step
                holders = fewer
                if not holders:
                    return found
        found[self._flags(holders)] = len(keys)
        return found

    def _flags(self, holders: int) -> npt.NDArray[np.bool_]:
        packed = np.frombuffer(holders.to_bytes((self._width + 7) // 8, "little"), np.uint8)
        return np.unpackbits(packed, count=self._width, bitorder="little").view(np.bool_)

    def _numbers(self, keys: Keys) -> Values:
        """The number of each block's set."""
        numbers, here = self._table.get(keys)
        if self._old is not None and not here.all():
            absent = np.flatnonzero(~here)
            old, _ = self._old.get(keys[absent])
            numbers[absent] = self._translate(old)
        return numbers

    def _translate(self, old: Values) -> Values:
        """Numbers of sets as they are copied: without the holders that are dead."""
        numbers: Values = self._translated[old]
        for number in np.unique(old[numbers < 0]).tolist():
            self._translated[number] = self._sets.number(self._old_sets.bits[number] & self._alive)
        return self._translated[old]

    def _copy(self) -> None:
        """Begin to copy what is alive; what is being copied is brought to its end before."""
        if self._old is not None:
            self._move(self._old.size)
        self._old, self._old_sets = self._table, self._sets
        self._sets = _HolderSets()
        self._translated = np.full(len(self._old_sets.bits), -1, np.int32)
        self._translated[0] = 0
        alive = self._alive_in_old()
        size = self._smallest
        while alive > _FILLED_ANEW * size or size * _SHRINKS < self._old.size:
            size *= 2
        self._table = KeyTable(size)
        self._moved = 0
        self._dead, self._dying = self._dying, []

    def _alive_in_old(self) -> float:
        """Estimate of the blocks that live holders have.

        Any run of slots is a random sample of them.
        """
        if self._old is None:
            return 0
        sample = min(_SAMPLE, self._old.size)
        _, old = self._old.slice(0, sample)
        return int(np.count_nonzero(self._translate(old))) * self._old.size / sample

    def _move(self, num_slots: int) -> None:
        """Copy some more slots of the old table, unless the new one has their keys already."""
        if self._old is None:
            return
        stop = min(self._moved + num_slots, self._old.size)
        keys, old = self._old.slice(self._moved, stop)
        numbers = self._translate(old)
        _, here = self._table.get(keys)
        wanted = np.flatnonzero(~here & (numbers != 0))
        self._table.put(keys[wanted], numbers[wanted])
        self._moved = stop
        if stop == self._old.size:
            self._old = None
            self._free += self._dead
            self._sets_after_copy = len(self._sets.bits)
