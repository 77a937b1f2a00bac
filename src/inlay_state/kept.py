"""Responses and conversations of owners, within their bounds."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from inlay.base.errors import NotFoundError, OverloadedError, RateLimitedError
from inlay.store.kept.contents import PIECE_BYTES, Contents, Piece, age_of, new_name
from inlay.store.shared import Storage
from inlay_state.records import (
    JOBS,
    ConversationRecord,
    Record,
    ResponseRecord,
    decode,
    encode,
)

_FULL_SECONDS = 60.0
_TRIES = 16
_READS, _AGAIN_SECONDS = 4, 0.05

R = TypeVar("R", ResponseRecord, ConversationRecord)
T = TypeVar("T")


class Kept:
    """Records and their contents.

    Args:
        storage: keeps both.
        contents: of `storage`.
        max_bytes: of all contents.
        owner_bytes: of those of one owner.
        ttl: seconds that a record is kept.
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
        self._max, self._owner_max = max_bytes, owner_bytes
        self._ttl = ttl
        self._clock = clock
        self._used: Counter[str] = Counter()
        self._all = 0
        self._unnamed: dict[str, tuple[str, int, bool]] = {}
        """By name, pieces that no sweep has seen in a record: owner, size, and if it is written."""
        self._grown: Counter[str] = Counter()
        """Bytes of records since the last sweep began to list them."""

    def now(self) -> float:
        """Return the Unix time."""
        return self._clock()

    def expiry(self) -> int:
        """Return the Unix time at which what is kept now expires."""
        return int(self._clock() + self._ttl)

    def check_room(self, owner: str, size: int) -> None:
        """Check that an owner may keep `size` bytes more; it may always keep fewer.

        Counted from the last sweep, and what this frontend has kept since.

        Raises:
            RateLimitedError: the owner is at its limit.
            OverloadedError: all owners together are.
        """
        if size <= 0:
            return
        used = self._used[owner]
        if used + size > self._owner_max:
            raise RateLimitedError(
                f"your responses and conversations have {used} bytes; {size} more would pass the "
                f"limit of {self._owner_max} (--responses-tenant-bytes): delete some, or send "
                "store: false",
                retry_after=_FULL_SECONDS,
            )
        if self._all + size > self._max:
            raise OverloadedError(
                f"all responses have {self._all} bytes; {size} more would pass the limit of "
                f"{self._max} (--response-store-bytes)",
                retry_after=_FULL_SECONDS,
            )

    def _count(self, owner: str, more: int) -> None:
        self._used[owner] += more
        self._all += more

    def _count_record(self, owner: str, more: int) -> None:
        self._count(owner, more)
        self._grown[owner] += max(more, 0)

    async def write(
        self,
        owner: str,
        kind: str,
        data: bytes | bytearray,
        *,
        instead_of: Sequence[Piece] = (),
        bounded: bool = True,
    ) -> tuple[Piece, ...]:
        """Keep bytes as pieces.

        Args:
            owner: digest of the tenant.
            kind: what they are.
            data: the bytes.
            instead_of: pieces that the caller erases then.
            bounded: False for what ends a response without its answer.

        Raises:
            RateLimitedError: as `check_room`.
            OverloadedError: as `check_room`, or the storage does not take them.
        """
        if bounded:
            self.check_room(owner, len(data) - sum(piece.size for piece in instead_of))
        # Counted before it is there: others that are checked meanwhile have no room for theirs.
        self._count(owner, len(data))
        name = new_name(kind)
        parts = {
            f"{name}-{number}": memoryview(data)[start : start + PIECE_BYTES]
            for number, start in enumerate(range(0, len(data), PIECE_BYTES))
        }
        self._unnamed.update((name, (owner, len(part), False)) for name, part in parts.items())
        try:
            async with self.contents.whole() as pieces:
                for name, part in parts.items():
                    pieces.append(await self.contents.write(name, bytes(part)))
        except BaseException:
            self._count(owner, -len(data))
            for name in parts:
                self._unnamed.pop(name, None)
            raise
        self._unnamed.update((name, (owner, len(part), True)) for name, part in parts.items())
        return tuple(pieces)

    async def read(self, pieces: Sequence[Piece]) -> bytes:
        """Return the bytes of pieces. Raises as `Contents.read`."""
        return b"".join([await self.contents.read(piece) for piece in pieces])

    async def find(self, owner: str, id_: str, kind: type[R]) -> tuple[int, R | None]:
        """Return (revision, record); None where the owner has no such record that is live."""
        if not id_.isascii() or not id_.replace("_", "").isalnum():
            return 0, None
        key = f"{owner}.{id_[:80]}"
        revision, kept = await self.storage.find(key)
        found = None if kept is None else decode(key, kept)
        if not isinstance(found, kind) or self._clock() >= found.expires_at:
            return 0, None
        return revision, found

    async def get(self, owner: str, id_: str, kind: type[R]) -> R:
        """Return a record.

        Raises:
            NotFoundError: this owner has none of the id.
            OverloadedError: the storage does not answer.
        """
        _, found = await self.find(owner, id_, kind)
        if found is None:
            raise _missing(id_, kind)
        return found

    async def content(
        self, owner: str, id_: str, kind: type[R], read: Callable[[R], Awaitable[T]]
    ) -> tuple[R, T]:
        """Return a record, and what `read` makes of some pieces of it.

        Whoever replaces pieces erases the old ones: where they are gone, the record is read again.

        Raises:
            NotFoundError: as `get`, or the pieces are gone though the record names them.
            InlayError: as `get` and `read`.
        """
        for left in reversed(range(_READS)):
            record = await self.get(owner, id_, kind)
            try:
                return record, await read(record)
            except NotFoundError:
                if not left:
                    raise
            await asyncio.sleep(_AGAIN_SECONDS)
        raise AssertionError

    async def add(self, owner: str, record: Record) -> None:
        """Keep a new record. Raises `OverloadedError`."""
        body = encode(record)
        if not await self.storage.swap(f"{owner}.{record.id}", body, 0):
            raise OverloadedError("it could not be kept; send it again", retry_after=1)
        self._count_record(owner, len(body))

    async def change(self, owner: str, id_: str, kind: type[R], change: Callable[[R], R]) -> R:
        """Change a record, on top of what others change; return it. Raises as `get`."""
        for _ in range(_TRIES):
            revision, found = await self.find(owner, id_, kind)
            if found is None:
                raise _missing(id_, kind)
            changed = change(found)
            if changed == found:
                return found
            body = encode(changed)
            if await self.storage.swap(f"{owner}.{id_}", body, revision):
                self._count_record(owner, len(body) - len(encode(found)))
                return changed
        raise OverloadedError("others change it all the time; try again", retry_after=1)

    async def drop(self, owner: str, id_: str, kind: type[R]) -> R:
        """Remove a record with its contents; return what it was. Raises as `get`."""
        for _ in range(_TRIES):
            revision, found = await self.find(owner, id_, kind)
            if found is None:
                raise _missing(id_, kind)
            if await self.storage.drop(f"{owner}.{id_}", revision):
                self._count(owner, -len(encode(found)))
                await self.erase(owner, list(found.pieces))
                return found
        raise OverloadedError("others change it all the time; try again", retry_after=1)

    async def erase(self, owner: str, pieces: Sequence[Piece]) -> None:
        """Remove contents. Raises `OverloadedError`."""
        self._count(owner, -sum(piece.size for piece in pieces))
        for piece in pieces:
            self._unnamed.pop(piece.name, None)
        await self.contents.erase(pieces)

    async def sweep(self, orphan_seconds: float) -> list[tuple[str, str]]:
        """Remove what has expired, and contents that nobody names.

        Returns:
            (owner, id) of the background responses that have not ended.
        """
        written = {name for name, (_, _, there) in self._unnamed.items() if there}
        contents = await self.storage.contents()
        now = self._clock()
        used: Counter[str] = Counter()
        named: set[str] = set()
        waiting: list[tuple[str, str]] = []
        expired: list[tuple[str, int, Record]] = []
        self._grown.clear()
        for key, revision, kept in await self.storage.list():
            record = decode(key, kept)
            if record is None:
                continue
            if now >= record.expires_at:
                expired.append((key, revision, record))
                continue
            owner = key.partition(".")[0]
            used[owner] += len(kept)
            for piece in record.pieces:
                named.add(piece.name)
                used[owner] += piece.size
            if isinstance(record, ResponseRecord) and not record.ended:
                waiting.append((owner, record.id))
        # What is being written is in no record yet, and records came while they were listed: those
        # may count twice until the next sweep, but are not missed.
        used += self._grown
        gone = written - contents
        self._unnamed = {
            name: each
            for name, each in self._unnamed.items()
            if name not in named and name not in gone and age_of(name, now) <= orphan_seconds
        }
        for owner, size, _ in self._unnamed.values():
            used[owner] += size
        self._used, self._all = used, used.total()
        for key, revision, record in expired:
            if await self.storage.drop(key, revision):
                await self.contents.erase(list(record.pieces))
        for name in contents - named:
            if age_of(name, now) > orphan_seconds:
                await self.storage.erase(name)
        return waiting

    async def jobs(self) -> list[tuple[str, str, int]]:
        """Return (owner, id, revision of the entry) of background responses under way."""
        found = await self.storage.list(JOBS)
        return [(owner.decode(), key.partition(".")[2], rev) for key, rev, owner in found]

    async def add_job(self, owner: str, id_: str) -> None:
        """Have some frontend run a background response. Raises `OverloadedError`."""
        await self.storage.swap(f"{JOBS}.{id_}", owner.encode(), 0)


def _missing(id_: str, kind: type[Record]) -> NotFoundError:
    what, param = (
        ("response", "response_id")
        if kind is ResponseRecord
        else ("conversation", "conversation_id")
    )
    return NotFoundError(f"{what} {id_[:80]!r} does not exist", param=param)
