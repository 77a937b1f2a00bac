"""Tiers behind the prefix cache: pages that it evicts are kept, and found again."""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

import torch
from msgspec.structs import replace
from torch import Tensor

from inlay.engine.torch.pages.copying import PageCopier, PageSealer
from inlay.engine.torch.pages.disk import MAX_RUN, DiskPages
from inlay.engine.torch.pages.host_memory import HostPages
from inlay.engine.torch.pages.tier_events import Tell, TierEvents
from inlay.messages.card import Stats
from inlay.messages.routing import Priced
from inlay.store.background import BackgroundThread

MAX_QUEUED_BYTES = 64 << 20
"""Of evicted pages that wait to be kept; pages that come meanwhile are not kept."""
_MAX_READS = 8
"""Pieces that are read at a time."""


class Tier(Protocol):
    """Records by group and digest. In any thread."""

    events: TierEvents | None

    @property
    def name(self) -> str:
        """Noun for it."""

    def names(self) -> list[tuple[int, bytes]]:
        """Group and digest of every record."""

    def __len__(self) -> int:
        """Number of records."""

    def has(self, group: int, digest: bytes) -> bool:
        """True if there is a record of that name; it may turn out to be damaged."""

    def read(self, group: int, digests: Sequence[bytes]) -> Tensor:
        """Return copies of the records of the first `digests`: uint8 [n, record_bytes]."""

    def drop(self, group: int, digest: bytes) -> None:
        """Forget a record."""

    def clear(self) -> None:
        """Forget all. Blocks."""

    def close(self) -> None:
        """Let go of what it lies in."""


class PageTiers:
    """Tiers that evicted pages go to, and are looked for in, the fastest first.

    Pages are kept in a thread of its own. What comes faster than that is not kept.

    Args:
        sealer: of the model's records.
        host: memory that takes them first, or None.
        disk: files that take what gives way there, or None.

    Attributes:
        sealer: as above.
        num_kept: pages that were kept when the cache evicted them.
        num_damaged: records that were dropped, as they are not what was kept.
    """

    def __init__(
        self, sealer: PageSealer, host: HostPages | None, disk: DiskPages | None = None
    ) -> None:
        self.num_kept = 0
        self.num_damaged = 0
        self.host = host
        self.disk = disk
        self._tell: Tell | None = None
        self._prices: dict[str, float] = {}
        self._runs: dict[int, list[tuple[bytes, Tensor]]] = {}
        self.sealer = sealer
        self._lock = threading.Lock()
        self._queued = 0
        self._closed = False
        self._background = BackgroundThread("inlay-pages")
        self._readers = ThreadPoolExecutor(_MAX_READS, "inlay-page-reads")

    @property
    def stores(self) -> tuple[Tier, ...]:
        """The tiers that there are, the fastest first."""
        return tuple(tier for tier in (self.host, self.disk) if tier is not None)

    def watch(self, group: int, tell: Tell) -> None:
        """Call `tell` with what the tiers have of a page group, and what changes, in order."""
        self._tell = tell
        for store in self.stores:
            store.events = events = TierEvents(store.name, group, tell)
            events.begin(store.names())

    def cost_updated(self, tier: str, price: float) -> None:
        """Tell what a position costs that a tier gives, where that has changed."""
        before = self._prices.get(tier)
        if self._tell is not None and (before is None or abs(price - before) > 0.1 * before):
            self._prices[tier] = price
            self._tell((Priced(tier, price),))

    def _flush_events(self) -> None:
        for store in self.stores:
            if store.events is not None:
                store.events.flush()

    @property
    def room(self) -> bool:
        """True if pages that are evicted now can be kept."""
        return self._queued < MAX_QUEUED_BYTES

    def lacks(self, group: int, digest: bytes) -> bool:
        """True if no tier has a page of that name."""
        return not any(store.has(group, digest) for store in self.stores)

    def keep(self, group: int, digests: Sequence[bytes], records: Tensor) -> None:
        """Keep pages, uint8 [n, record_bytes]. Does not wait."""
        with self._lock:
            self._queued += records.nbytes
        self._background.submit(partial(self._keep, group, digests, records))

    def _keep(self, group: int, digests: Sequence[bytes], records: Tensor) -> None:
        try:
            for digest, record in zip(digests, records, strict=True):
                if self.host is None:
                    # Its own memory: a run must not keep that of others.
                    self._to_disk(group, digest, record.clone())
                elif gone := self.host.put(group, digest, record):
                    self._to_disk(*gone)
            self.num_kept += len(digests)
        finally:
            with self._lock:
                self._queued -= records.nbytes
            self._flush_events()

    def _to_disk(self, group: int, digest: bytes, record: Tensor) -> None:
        """Gather pages to a run, and write it once it is as long as a piece."""
        if self.disk is None or self.disk.has(group, digest):
            return
        run = self._runs.setdefault(group, [])
        run.append((digest, record))
        if len(run) >= min(MAX_RUN, self.sealer.shape.piece(group)):
            self._write(group)

    def _write(self, group: int) -> None:
        run = self._runs.pop(group)
        if self.disk is not None:
            self.disk.put(group, [name for name, _ in run], torch.stack([one for _, one in run]))

    def counted(self, stats: Stats) -> Stats:
        """Return `stats` with what is kept."""
        return replace(
            stats,
            kv_pages_offloaded=self.num_kept,
            kv_pages_refused=self.num_damaged,
            kv_host_bytes=0 if self.host is None else self.host.num_bytes,
            kv_disk_bytes=0 if self.disk is None else self.disk.num_bytes,
            kv_disk_refused_files=0 if self.disk is None else self.disk.num_refused,
            kv_disk_errors=0 if self.disk is None else self.disk.num_errors,
        )

    def read(self, store: Tier, group: int, digests: Sequence[bytes]) -> Tensor:
        """Return records of the first `digests` that `store` has: uint8 [n, record_bytes]. Blocks.

        They are not checked.
        """
        records = store.read(group, digests)
        self._flush_events()
        return records

    def drop(self, store: Tier, group: int, digest: bytes) -> None:
        """Forget a record that is damaged. Does not wait."""
        self.num_damaged += 1
        self._background.submit(partial(self._drop, store, group, digest))

    def _drop(self, store: Tier, group: int, digest: bytes) -> None:
        store.drop(group, digest)
        self._flush_events()

    async def reading(self, store: Tier, group: int, digests: Sequence[bytes]) -> Tensor:
        """As `read`, in a thread. One that nobody waits for any more goes on until `close`."""
        read = partial(self.read, store, group, digests)
        return await asyncio.get_running_loop().run_in_executor(self._readers, read)

    def clear(self) -> None:
        """Forget all pages. Blocks."""
        self._background.submit(self._clear)
        self._background.flush()

    def _clear(self) -> None:
        self._runs.clear()
        for tier in self.stores:
            tier.clear()
        self._flush_events()

    def rest(self) -> None:
        """Give host memory back to the system; what is on disk stays. Blocks."""
        self._background.flush()
        if self.host is not None:
            self.host.clear()
            self._flush_events()

    def flush(self) -> None:
        """Return when all pages that came so far are kept; the last may be on no disk yet."""
        self._background.flush()

    def close(self) -> None:
        """Keep what came, end what is read, and let go of memory and directory.

        Blocks. May be called again.
        """
        if self._closed:
            return
        self._closed = True
        self._readers.shutdown(cancel_futures=True)
        self.write_rest()
        self._background.close()
        for tier in self.stores:
            tier.close()

    def write_rest(self) -> None:
        """Write runs that are not full yet. Blocks."""
        self._background.submit(self._write_runs)
        self._background.flush()

    def _write_runs(self) -> None:
        for group in tuple(self._runs):
            self._write(group)
        self._flush_events()


class Offloading:
    """Copies pages that a cache evicts, before they are overwritten. In the engine's thread."""

    def __init__(self, copier: PageCopier, tiers: PageTiers) -> None:
        self._copier = copier
        self._tiers = tiers
        self._evicted: dict[int, list[tuple[bytes, int]]] = {}

    def evicted(self, group: int, digest: bytes, page: int) -> None:
        """Note a page that is not in the cache any more; it keeps its content until `copy`."""
        if self._tiers.lacks(group, digest):
            self._evicted.setdefault(group, []).append((digest, page))

    @torch.inference_mode()
    def copy(self) -> None:
        """Copy what was noted; to be called before anything is written to pages."""
        evicted, self._evicted = self._evicted, {}
        for group, pages in evicted.items():
            count = self._copier.shape.piece(group)
            for start in range(0, len(pages), count):
                piece = pages[start : start + count]
                if self._tiers.room:
                    records = self._copier.empty(group, len(piece))
                    digests, numbers = zip(*piece, strict=True)
                    self._copier.read(self._tiers.sealer, group, numbers, digests, records)
                    self._tiers.keep(group, digests, records)
