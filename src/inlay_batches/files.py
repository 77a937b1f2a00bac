"""Files of clients: kept as pieces, each found by its owner and its id alone."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import BinaryIO

from inlay.base.errors import NotFoundError, OverloadedError, RateLimitedError
from inlay.store.kept.contents import Contents, age_of, new_name
from inlay.store.shared import Storage
from inlay_batches.matrix import write_matrix
from inlay_batches.records import BatchRecord, FileRecord, decode, encode, new_id

MAX_FILES = 10_000
"""Files and batches of one owner."""

_FULL_SECONDS = 60


class Files:
    """The files and batches of all owners, in one storage.

    An owner is the digest of a tenant; a file of another is as absent as one that never was.

    Args:
        storage: keeps records and contents.
        contents: its contents.
        max_bytes: of all contents.
        owner_bytes: of all files of one owner.
        ttl: seconds for which files are kept that say nothing else.
        clock: Unix time.
    """

    def __init__(
        self,
        storage: Storage,
        contents: Contents,
        *,
        max_bytes: int,
        owner_bytes: int,
        ttl: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.storage = storage
        self.contents = contents
        self._max = max_bytes
        self._owner_max = owner_bytes
        self._ttl = ttl
        self._clock = clock
        self._taking = asyncio.Lock()
        self._arriving: Counter[str] = Counter()

    def now(self) -> float:
        """Return the Unix time."""
        return self._clock()

    async def create(
        self,
        owner: str,
        file: BinaryIO,
        *,
        filename: str,
        purpose: str,
        size: int,
        ttl: int | None,
    ) -> FileRecord:
        """Keep what is in `file`, of `size` bytes, as a new file.

        Raises:
            RateLimitedError: the owner's files are at their limit.
            OverloadedError: the storage is full, or does not answer.
        """
        async with self._room(owner, size):
            pieces = await self.contents.write_file(new_name(), file)
            now = int(self._clock())
            expires = None if ttl is None else now + ttl
            if purpose == "batch" and ttl is None:
                expires = now + int(self._ttl)
            record = FileRecord(
                new_id("file-"), filename, purpose, size, now, expires, tuple(pieces)
            )
            if not await self.storage.swap(f"{owner}.{record.id}", encode(record), 0):
                raise OverloadedError("the file could not be kept; send it again", retry_after=1)
        # Another frontend may have found the same room: whoever looks last sees what both keep.
        try:
            await self._check(owner, size, Counter(), kept=record.id)
        except (RateLimitedError, OverloadedError):
            with suppress(OverloadedError, NotFoundError):
                await self.delete(owner, record.id)
            raise
        return record

    @asynccontextmanager
    async def _room(self, owner: str, size: int) -> AsyncIterator[None]:
        """Take room for a file until it is recorded. Raises as `create`."""
        async with self._taking:
            await self.check_room(owner, size)
            self._arriving[owner] += size
        try:
            yield
        finally:
            self._arriving[owner] -= size
            self._arriving = +self._arriving

    async def check_room(self, owner: str, size: int) -> None:
        """Check that an owner may keep `size` bytes more than it has and sends now.

        Raises as `create`.
        """
        # Before the records: a file that is recorded meanwhile may count twice, but is not missed.
        await self._check(owner, size, self._arriving.copy())

    async def _check(
        self, owner: str, size: int, arriving: Counter[str], *, kept: str | None = None
    ) -> None:
        """Check that there is room for `size` bytes, which are there already in the file `kept`."""
        records = [record for record in await self.all_of(owner) if record.id != kept]
        if len(records) >= MAX_FILES:
            raise RateLimitedError(
                f"you keep {len(records)} files and batches, which is the limit; delete some",
                retry_after=_FULL_SECONDS,
            )
        used = _bytes(records) + arriving[owner]
        if used + size > self._owner_max:
            raise RateLimitedError(
                f"your files have {used} bytes; {size} more would pass the limit of "
                f"{self._owner_max} (--files-tenant-bytes)",
                retry_after=_FULL_SECONDS,
            )
        await self._check_all(arriving.total() - (size if kept else 0), size)

    async def _check_all(self, others: int, size: int) -> None:
        """Check that `size` bytes fit with all that is kept and `others`."""
        total = (await self.storage.size())[0] + others
        if total + size > self._max:
            raise OverloadedError(
                f"all files have {total} bytes; {size} more would pass the limit of {self._max} "
                "(--batch-store-bytes)",
                retry_after=_FULL_SECONDS,
            )

    async def has_room(self, owner: str, size: int) -> bool:
        """Return True if all that an owner keeps and `size` bytes more are within its limit.

        Raises `OverloadedError`: with what all keep they are not, or the storage does not answer.
        """
        await self._check_all(0, size)
        return _bytes(await self.all_of(owner)) + size <= self._owner_max

    async def all_of(self, owner: str) -> "list[FileRecord | BatchRecord]":
        """Return the records of an owner, those that have expired left out."""
        now = self._clock()
        found = [decode(key, kept) for key, _, kept in await self.storage.list(owner)]
        return [record for record in found if not _expired(record, now)]

    async def get(self, owner: str, id_: str) -> FileRecord:
        """Return a file.

        Raises:
            NotFoundError: there is no such file of this owner.
            OverloadedError: the storage does not answer.
        """
        _, record = await self.find(owner, id_)
        if not isinstance(record, FileRecord) or _expired(record, self._clock()):
            raise NotFoundError(f"file {id_[:80]!r} does not exist", param="file_id")
        return record

    async def find(self, owner: str, id_: str) -> "tuple[int, FileRecord | BatchRecord | None]":
        """Return (revision, record) of an id; None where an owner has none of it."""
        if not id_.isascii() or not id_.replace("-", "").replace("_", "").isalnum():
            return 0, None
        key = f"{owner}.{id_[:80]}"
        revision, kept = await self.storage.find(key)
        return revision, None if kept is None else decode(key, kept)

    def read(self, record: FileRecord) -> AsyncIterator[bytes]:
        """Yield the bytes of a file, a piece at a time. Raises as `Contents.read`."""
        return self.contents.stream(record.pieces)

    async def delete(self, owner: str, id_: str) -> None:
        """Remove a file. A batch that reads it goes on. Raises as `get`."""
        record = await self.get(owner, id_)
        revision, _ = await self.find(owner, id_)
        if not await self.storage.drop(f"{owner}.{id_}", revision):
            await self.get(owner, id_)
        used = {piece.name for other in await self.all_of(owner) for piece in other.pieces}
        await self.contents.erase([each for each in record.pieces if each.name not in used])

    async def publish(self, owner: str, record: BatchRecord) -> None:
        """Make the files of a batch, those that are not there yet. Raises `OverloadedError`."""
        ttl = self._ttl if record.output_ttl is None else record.output_ttl
        made = record.times.get("finalizing_at", record.created_at)
        for id_, kind, pieces in (
            (record.output_file_id, "output", record.output),
            (record.error_file_id, "error", record.error),
        ):
            if id_ is not None:
                file = FileRecord(
                    id_,
                    f"{record.id}_{kind}.jsonl",
                    "batch_output",
                    sum(piece.size for piece in pieces),
                    made,
                    made + int(ttl),
                    pieces,
                )
                await self.storage.swap(f"{owner}.{id_}", encode(file), 0)
        await self._publish_matrix(owner, record, made, made + int(ttl))

    async def _publish_matrix(
        self, owner: str, record: BatchRecord, made: int, expires: int
    ) -> None:
        id_, form = record.matrix_file_id, record.output_format
        if id_ is None or form == "jsonl" or (await self.find(owner, id_))[1] is not None:
            return
        pieces = await write_matrix(self.contents, record.matrix, record.rows, record.width, form)
        size = sum(piece.size for piece in pieces)
        name = f"{record.id}.{form}"
        file = FileRecord(id_, name, "batch_output", size, made, expires, tuple(pieces))
        await self.storage.swap(f"{owner}.{id_}", encode(file), 0)

    async def sweep(self, ended_ttl: float, orphan_seconds: float) -> int:
        """Remove what has expired, and contents that nobody names; the number of both."""
        contents = await self.storage.contents()
        now, removed = self._clock(), 0
        used: set[str] = set()
        for key, revision, kept in await self.storage.list():
            record = decode(key, kept)
            if _expired(record, now, ended_ttl):
                if await self.storage.drop(key, revision):
                    removed += 1
                continue
            used.update(piece.name for piece in record.pieces)
        for name in contents - used:
            if age_of(name, now) > orphan_seconds:
                await self.storage.erase(name)
                removed += 1
        return removed


def _bytes(records: "list[FileRecord | BatchRecord]") -> int:
    """Bytes of all contents that records name, also of what batches have made so far."""
    return sum({piece.name: piece.size for each in records for piece in each.pieces}.values())


def _expired(record: FileRecord | BatchRecord, now: float, ended_ttl: float | None = None) -> bool:
    if isinstance(record, FileRecord):
        return record.expires_at is not None and now >= record.expires_at
    return (
        ended_ttl is not None
        and record.ended
        and now >= max(record.times.values(), default=record.created_at) + ended_ttl
    )
