"""Pages in host memory: records in a stretch of memory that outlives the engine's process.

    entries    for each slot: layout, digest, group, and when it was used last; zeros if it is empty
    slots      one record each

The process that supervises the engine creates the memory and lends it to each engine it starts. An
engine that comes after a crash finds its pages by the entries. It trusts none: a record that was
half written is none, as its checksum says.
"""

import mmap
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from inlay.base.errors import EngineError
from inlay.engine.torch.pages.copying import RecordShape
from inlay.engine.torch.pages.tier_events import TierEvents

_entry = struct.Struct("<16s16sQQ")
_SLOT_ALIGNMENT = 64


class HostPages:
    """Records by group and digest, the least recently used of which give way. In any thread.

    Args:
        shape: of the records.
        fd: descriptor of the memory; this object's own from here on.

    Attributes:
        num_slots: records that there is room for.
        events: records what changes, or None.

    Raises:
        EngineError: there is room for none.
    """

    name = "host memory"

    def __init__(self, shape: RecordShape, fd: int) -> None:
        self.events: TierEvents | None = None
        self._shape = shape
        self._layout = bytes.fromhex(shape.layout)
        self._fd = fd
        size = os.fstat(fd).st_size
        largest = max(map(shape.record_bytes, range(len(shape.sizes))))
        slot = -(-largest // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
        self.num_slots = (size - mmap.PAGESIZE) // (slot + _entry.size)
        if self.num_slots < 1:
            raise EngineError(
                f"a page has {largest} bytes, {size} bytes of host memory hold none: raise "
                "--kv-offloading-size"
            )
        self._map = mmap.mmap(fd, size)
        first = -(-self.num_slots * _entry.size // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
        self._slots = torch.frombuffer(
            self._map, dtype=torch.uint8, offset=first, count=self.num_slots * slot
        ).view(self.num_slots, slot)
        self._lock = threading.Lock()
        self._uses = 0
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._places: OrderedDict[tuple[int, bytes], int] = OrderedDict()
        self._restore()

    def _restore(self) -> None:
        # Read, not mapped: reading a hole of mapped memory would fill it.
        table = os.pread(self._fd, self.num_slots * _entry.size, 0)
        found = []
        for place, (layout, digest, group, used) in enumerate(_entry.iter_unpack(table)):
            if used and layout == self._layout and group < len(self._shape.sizes):
                found.append((used, place, (group, digest)))
        for used, place, key in sorted(found):
            self._places[key] = place
            self._uses = used
        taken = set(self._places.values())
        self._free = [place for place in self._free if place not in taken]

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_bytes(self) -> int:
        """Bytes of the records."""
        return len(self._places) * self._slots.shape[1]

    def has(self, group: int, digest: bytes) -> bool:
        """True if there is a record of that name; it may turn out to be damaged."""
        return (group, digest) in self._places

    def names(self) -> list[tuple[int, bytes]]:
        """Group and digest of every record."""
        with self._lock:
            return list(self._places)

    def put(self, group: int, digest: bytes, record: Tensor) -> tuple[int, bytes, Tensor] | None:
        """Keep a sealed record, uint8 [record_bytes].

        Returns:
            Group, digest and record of what had to give way, if anything had to.
        """
        gone = None
        with self._lock:
            if (group, digest) in self._places:
                self._use(group, digest)
                return None
            if self._free:
                place = self._free.pop()
            else:
                (other, name), place = self._places.popitem(last=False)
                size = self._shape.record_bytes(other)
                if self.events is not None:
                    self.events.removed(other, name)
                gone = other, name, self._slots[place, :size].clone()
            # An engine that ends here leaves an empty slot.
            self._map[place * _entry.size : (place + 1) * _entry.size] = bytes(_entry.size)
            self._slots[place, : len(record)] = record
            self._places[group, digest] = place
            self._use(group, digest)
            if self.events is not None:
                self.events.stored(group, digest)
        return gone

    def read(self, group: int, digests: Sequence[bytes]) -> Tensor:
        """Return copies of the records of the first `digests`: uint8 [n, record_bytes]."""
        size = self._shape.record_bytes(group)
        with self._lock:
            places = []
            for digest in digests:
                place = self._places.get((group, digest))
                if place is None:
                    break
                places.append(place)
            # A page is of no use without those before it: they must give way later.
            for digest in reversed(digests[: len(places)]):
                self._use(group, digest)
            if not places:
                return torch.empty(0, size, dtype=torch.uint8)
            # Row by row: one look-up by many indices takes nine times as long.
            return torch.stack([self._slots[place, :size] for place in places])

    def drop(self, group: int, digest: bytes) -> None:
        """Forget a record."""
        with self._lock:
            place = self._places.pop((group, digest), None)
            if place is not None:
                self._map[place * _entry.size : (place + 1) * _entry.size] = bytes(_entry.size)
                self._free.append(place)
                if self.events is not None:
                    self.events.removed(group, digest)

    def clear(self) -> None:
        """Forget all, and give the memory back to the system."""
        with self._lock:
            if self.events is not None:
                for name in self._places:
                    self.events.removed(*name)
            self._places.clear()
            self._free = list(range(self.num_slots - 1, -1, -1))
            self._map[: self.num_slots * _entry.size] = bytes(self.num_slots * _entry.size)
            if hasattr(mmap, "MADV_REMOVE"):
                self._map.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Let go of the memory; its content stays as long as whoever lent it keeps it."""
        os.close(self._fd)

    def _use(self, group: int, digest: bytes) -> None:
        self._places.move_to_end((group, digest))
        self._uses += 1
        _entry.pack_into(
            self._map,
            self._places[group, digest] * _entry.size,
            self._layout,
            digest,
            group,
            self._uses,
        )
