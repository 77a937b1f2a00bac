"""Which prompts are stored, in which tier, and who goes first when room is needed.

No IO, no locks, no clock.

Memory is a cache of what is on disk, and the only place of what is not (no directory, no room
there, or a disk that failed). Room is found in the order that loses least: first the elements of
entries that also have a file, then kept digests, both least recently used first; only then, entry
by entry, what is in memory alone; a cast never costs an entry. Pinned entries may leave memory,
never the store.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable

import msgspec

from inlay.base.errors import BodyTooLargeError, OverloadedError, RateLimitedError
from inlay.messages.prompt import Buffer, Rows
from inlay.store.entry import Entry, StoredFile, Target, cost
from inlay.store.names import Key

TENANT_FLAG = "--prompt-store-tenant-bytes"
LONGEST_WAIT = 60.0
"""Bound of `Retry-After` of a refused upload, in seconds."""


class StoreLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a store, in bytes as `cost` counts them, and lifetime of its prompts.

    Attributes:
        memory_bytes: tensors, digests and casts in memory, those being uploaded included.
        disk_bytes: files; 0 without a directory.
        ttl: seconds an unpinned prompt is kept after its last use.
        max_per_tenant_bytes: of one tenant, in any tier; None for no bound of its own.
        max_entries: prompts, in any tier: what bounds the index.
    """

    memory_bytes: int
    disk_bytes: int
    ttl: float
    max_per_tenant_bytes: int | None
    max_entries: int


class StoreIndex:
    """The entries and the bytes they hold.

    Attributes:
        limits: what it keeps to.
        memory_used: bytes held in memory, reservations included; never over `limits.memory_bytes`.
        disk_used: bytes of files, reservations included, those in `trash` not; never over
            `limits.disk_bytes`.
        trash: files no entry has any more, to be removed before the next is written.
        evictions: entries that went to make room.
        expirations: entries removed because they were not used.
    """

    def __init__(self, limits: StoreLimits) -> None:
        self.limits = limits
        self.memory_used = 0
        self.disk_used = 0
        self.trash: deque[StoredFile] = deque()
        self.evictions = 0
        self.expirations = 0
        self._entries: dict[Key, Entry] = {}
        self._pinned: dict[Key, Entry] = {}
        self._unpinned: OrderedDict[Key, Entry] = OrderedDict()
        self._resident: OrderedDict[Key, Entry] = OrderedDict()
        self._tenants: dict[bytes, int] = {}
        self._admitted = 0
        self._reserved = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> Iterable[Entry]:
        """All of them."""
        return self._entries.values()

    @property
    def num_pinned(self) -> int:
        """Number of pinned entries."""
        return len(self._pinned)

    @property
    def _wait(self) -> float:
        return min(self.limits.ttl, LONGEST_WAIT)

    # Finding

    def find(self, key: Key, now: float) -> Entry | None:
        """The entry, unless it has expired."""
        entry = self._entries.get(key)
        if entry is not None and self._has_expired(entry, now):
            self.remove(entry)
            self.expirations += 1
            return None
        return entry

    def touch(self, entry: Entry, now: float) -> None:
        """Note a use: it starts the entry's TTL again, and others go before it."""
        entry.used_at = max(entry.used_at, now)
        for order in (self._unpinned, self._resident):
            if entry.key in order:
                order.move_to_end(entry.key)

    def expire(self, now: float) -> int:
        """Remove entries not used for the TTL; return their number."""
        count = 0
        # Ordered by last use, so the expired are in front.
        while self._unpinned:
            entry = next(iter(self._unpinned.values()))
            if not self._has_expired(entry, now):
                break
            self.remove(entry)
            count += 1
        self.expirations += count
        return count

    def _has_expired(self, entry: Entry, now: float) -> bool:
        return not entry.pinned and now >= entry.used_at + self.limits.ttl

    # Coming and going

    def admit(self, tenant: bytes, num_bytes: int) -> None:
        """Reserve a place and a part of the tenant's quota for an entry; `dismiss` gives it back.

        Raises:
            BodyTooLargeError: it can never fit.
            RateLimitedError: the tenant's share is used up.
            OverloadedError: every place is taken by a pinned entry.
        """
        size, limits = cost(num_bytes), self.limits
        share = limits.max_per_tenant_bytes
        largest = max(limits.memory_bytes, limits.disk_bytes)
        if size > min(largest, largest if share is None else share):
            raise BodyTooLargeError(
                f"prompt_embeds of {num_bytes} bytes take {size} in the store, which may hold "
                f"{largest} (--prompt-store-memory-bytes, --prompt-store-disk-bytes)"
                + ("" if share is None else f", and {share} for one caller ({TENANT_FLAG})")
            )
        used = self._tenants.get(tenant, 0)
        if share is not None and used + size > share:
            raise RateLimitedError(
                f"your stored prompt_embeds take {used} bytes; {size} more would pass your share "
                f"of {share} ({TENANT_FLAG}): delete some, or wait until they expire",
                retry_after=self._wait,
            )
        while len(self._entries) + self._admitted >= limits.max_entries:
            if not self._unpinned:
                raise self.full(num_bytes)
            self._evict(next(iter(self._unpinned.values())))
        self._admitted += 1
        self._tenants[tenant] = used + size

    def dismiss(self, tenant: bytes, num_bytes: int) -> None:
        """Give up what `admit` took."""
        self._admitted -= 1
        self._give_back_share(tenant, num_bytes)

    def add(self, entry: Entry) -> None:
        """Take in an admitted entry."""
        self._admitted -= 1
        self._enter(entry)

    def restore(self, entry: Entry, file: StoredFile) -> bool:
        """Take in an entry found on disk, as the least recently used.

        False, and no change, when there is no room.
        """
        if (
            entry.key in self._entries
            or len(self) >= self.limits.max_entries
            or self.disk_used + file.cost > self.limits.disk_bytes
        ):
            return False
        self.disk_used += file.cost
        entry.file = file
        tenant = entry.description.tenant
        self._tenants[tenant] = self._tenants.get(tenant, 0) + cost(entry.description.num_bytes)
        self._enter(entry)
        if not entry.pinned:
            self._unpinned.move_to_end(entry.key, last=False)
        return True

    def _enter(self, entry: Entry) -> None:
        self._entries[entry.key] = entry
        (self._pinned if entry.pinned else self._unpinned)[entry.key] = entry

    def remove(self, entry: Entry) -> None:
        """Take the entry out of every tier; its file goes to the trash."""
        if entry.gone:
            return
        self.forget_file(entry)
        self._leave_memory(entry)
        self._forget_digests(entry)
        entry.gone = True
        for table in (self._entries, self._pinned, self._unpinned):
            table.pop(entry.key, None)
        self._give_back_share(entry.description.tenant, entry.description.num_bytes)

    def _evict(self, entry: Entry) -> None:
        self.remove(entry)
        self.evictions += 1

    def _give_back_share(self, tenant: bytes, num_bytes: int) -> None:
        left = self._tenants[tenant] - cost(num_bytes)
        if left:
            self._tenants[tenant] = left
        else:
            del self._tenants[tenant]

    def set_pinned(self, entry: Entry, pinned: bool, now: float) -> None:
        """Pin or unpin; also a use."""
        if pinned != entry.pinned:
            entry.pinned = pinned
            old, new = (self._unpinned, self._pinned) if pinned else (self._pinned, self._unpinned)
            del old[entry.key]
            new[entry.key] = entry
        self.touch(entry, now)

    def full(self, num_bytes: int) -> OverloadedError:
        """The error for an upload that finds no room."""
        return OverloadedError(
            f"the store of prompt_embeds is full of pinned or unsaved ones; {num_bytes} bytes more "
            "find no room",
            retry_after=self._wait,
        )

    # Memory

    def reserve(self, num_bytes: int, *, sparing: Entry | None = None) -> bool:
        """Reserve `num_bytes` of memory, if dropping copies of files makes room.

        No prompt is evicted.
        """
        limit = self.limits.memory_bytes
        if num_bytes > limit:
            return False
        if self.memory_used + num_bytes > limit:
            self._drop_copies(limit - num_bytes, sparing)
        if self.memory_used + num_bytes > limit:
            self._drop_digests(limit - num_bytes, sparing)
        if self.memory_used + num_bytes > limit:
            return False
        self.memory_used += num_bytes
        self._reserved += num_bytes
        return True

    def release(self, num_bytes: int) -> None:
        """Give a reservation up."""
        self._reserved -= num_bytes
        self.memory_used -= num_bytes

    def _take(self, entry: Entry, num_bytes: int) -> None:
        self._reserved -= num_bytes
        entry.held += num_bytes

    def _drop(self, entry: Entry, num_bytes: int) -> None:
        entry.held -= num_bytes
        self.memory_used -= num_bytes

    def _drop_copies(self, target: int, sparing: Entry | None) -> None:
        for entry in list(self._droppable(self.memory_used - target, sparing)):
            self._leave_memory(entry)

    def _droppable(self, num_bytes: int, sparing: Entry | None) -> Iterable[Entry]:
        for entry in self._resident.values():
            if num_bytes <= 0:
                return
            if entry.file is not None and entry is not sparing:
                num_bytes -= entry.held - entry.digest_bytes
                yield entry

    def _drop_digests(self, target: int, sparing: Entry | None) -> None:
        for table in (self._unpinned, self._pinned):
            for entry in table.values():
                if self.memory_used <= target:
                    return
                if entry is not sparing:
                    self._forget_digests(entry)

    def _forget_digests(self, entry: Entry) -> None:
        self._drop(entry, entry.forget_made() + entry.digest_bytes)
        entry.digests.clear()

    def _leave_memory(self, entry: Entry) -> None:
        if entry.data is None:
            return
        self._drop(entry, entry.forget_made() + cost(entry.description.num_bytes))
        entry.data = None
        del self._resident[entry.key]

    def hold(self, entry: Entry, data: Buffer) -> None:
        """Keep the elements in memory, from a reservation of their `cost`."""
        self._take(entry, cost(len(data)))
        entry.data = data
        self._resident[entry.key] = entry

    def remember(
        self,
        entry: Entry,
        target: Target,
        data: Buffer,
        digests: tuple[bytes, ...],
        made: tuple[Rows, ...],
    ) -> None:
        """Keep the results of the checks for `target`.

        That it passed, its digests, and its rows where memory allows.
        """
        if entry.gone:
            return
        entry.pass_for(target)
        if target.dtype not in entry.digests:
            size = sum(len(part) for part in digests)
            # Without its digests a prompt costs a pass over its elements at every use: worth the
            # oldest upload's place.
            while not self.reserve(size, sparing=entry):
                if not self.evict_unsaved(size, sparing=entry):
                    return
            self._take(entry, size)
            entry.digests[target.dtype] = digests
        if entry.data is not data:
            return
        self._drop(entry, entry.forget_made())
        size = (
            0 if target.dtype == entry.description.dtype else sum(len(rows.data) for rows in made)
        )
        if self.reserve(size, sparing=entry):
            self._take(entry, size)
            entry.keep(target, made)

    def oldest_unsaved(self) -> Entry | None:
        """The least recently used entry that is in memory alone and might be written to disk."""
        return next(
            (
                entry
                for entry in self._resident.values()
                if entry.file is None and not entry.memory_only
            ),
            None,
        )

    def evict_unsaved(self, num_bytes: int, *, sparing: Entry | None = None) -> bool:
        """Evict the oldest entry that is and stays in memory alone.

        False, and no eviction, if that cannot free `num_bytes`.
        """
        stuck = self._reserved + sum(
            entry.held for entry in self._pinned.values() if entry.file is None
        )
        if sparing is not None and not sparing.pinned:
            stuck += sparing.held
        if stuck + num_bytes > self.limits.memory_bytes:
            return False
        for entry in self._unpinned.values():
            stays = entry.memory_only or not self.limits.disk_bytes
            if entry.file is None and stays and entry is not sparing:
                self._evict(entry)
                return True
        return False

    # Disk

    def reserve_disk(self, num_bytes: int, entry: Entry) -> bool:
        """Reserve `num_bytes` on disk for `entry`, evicting unpinned, less recently used ones.

        Such an entry that is in memory too stays there, without its file; any other is evicted.
        """
        short = self.disk_used + num_bytes - self.limits.disk_bytes
        victims: list[Entry] = []
        for other in self._unpinned.values():
            if short <= 0 or other is entry:
                break
            if other.file is not None:
                victims.append(other)
                short -= other.file.cost
        if short > 0:
            return False
        for victim in victims:
            if victim.data is None:
                self._evict(victim)
            else:
                self.forget_file(victim)
                victim.memory_only = True
        self.disk_used += num_bytes
        return True

    def file(self, entry: Entry, file: StoredFile, used_at: float) -> None:
        """Note an entry's file, from a reservation of its cost, and the last use it knows.

        Trash if the entry is gone.
        """
        entry.file, entry.saved_use, entry.memory_only = file, used_at, False
        if entry.gone:
            self.forget_file(entry)

    def retry_saving(self) -> list[Entry]:
        """The entries that could not be written, which may be tried again."""
        entries = [entry for entry in self._resident.values() if entry.memory_only]
        for entry in entries:
            entry.memory_only = False
        return entries

    def set_aside(self, num_bytes: int) -> None:
        """Count with less room on disk, as others' files take it."""
        left = max(0, self.limits.disk_bytes - num_bytes)
        self.limits = msgspec.structs.replace(self.limits, disk_bytes=left)

    def release_disk(self, num_bytes: int) -> None:
        """Give a reservation up."""
        self.disk_used -= num_bytes

    def forget_file(self, entry: Entry) -> None:
        """Part the entry from its file, which goes to the trash."""
        if entry.file is not None:
            self.disk_used -= entry.file.cost
            self.trash.append(entry.file)
            entry.file = None

    def check(self) -> None:
        """Verify that the books agree with the entries; for tests, while nothing is reserved.

        Raises:
            ValueError: they do not.
        """
        if (self._reserved, self._admitted) != (0, 0):
            raise ValueError(
                f"{self._reserved} bytes and {self._admitted} places are still reserved"
            )
        books = (self.memory_used, self.disk_used, sum(self._tenants.values()), len(self._resident))
        counted = [0, 0, 0, 0]
        for entry in self._entries.values():
            resident = entry.data is not None
            real = entry.digest_bytes + entry.cast_bytes
            real += cost(entry.description.num_bytes) if resident else 0
            if entry.held != real or resident is (entry.key not in self._resident):
                raise ValueError(f"an entry of {real} bytes in memory is booked as {entry.held}")
            if entry.gone or (not resident and entry.file is None):
                raise ValueError("an entry is in no tier")
            counted[0] += real
            counted[1] += 0 if entry.file is None else entry.file.cost
            counted[2] += cost(entry.description.num_bytes)
            counted[3] += resident
        if list(books) != counted:
            raise ValueError(f"the books say {books}, the entries {counted}")
        if self.memory_used > self.limits.memory_bytes or self.disk_used > self.limits.disk_bytes:
            raise ValueError(f"{books} is over {self.limits}")
