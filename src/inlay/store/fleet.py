"""Stored prompts that every frontend of a fleet serves: shared storage, and a local cache."""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import msgspec

from inlay.base import liveness
from inlay.base.errors import BodyTooLargeError, NoRoomError, NotFoundError, OverloadedError
from inlay.base.single_flight import SingleFlight, shielded
from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer, Rows
from inlay.store.entry import (
    Content,
    Description,
    Entry,
    FileKind,
    Kind,
    StoredPrompt,
    StoreStats,
    Target,
    cost,
)
from inlay.store.file_format import DamagedFileError, FileFormat, LockedFileError
from inlay.store.index import LONGEST_WAIT, TENANT_FLAG
from inlay.store.names import ID_PATTERN, Key, Names
from inlay.store.prompts import Threads, nothing
from inlay.store.reaper import PERIOD_SECONDS, Reaper
from inlay.store.sealing import FileSealer
from inlay.store.shared import (
    Record,
    Shared,
    content_of,
    decode,
    encode,
    fill,
    key_of,
    name_of,
    room,
)
from inlay.store.space import FleetLimits, SharedSpace, TenantQuotas
from inlay.store.store import PromptStore, kind_of, missing

_log = logging.getLogger(__name__)
_id = re.compile(ID_PATTERN)

_TRIES = 16
"""Attempts at a change that loses against concurrent ones."""

T = TypeVar("T")


class FleetStore:
    """`inlay.store.prompts.Prompts` over what a fleet shares.

    Whether a prompt is there, and to whom, is asked of `shared` at every use: one small question.
    So what one frontend deletes no other serves from the moment on at which the deletion was
    answered, and none serves what it cannot ask about. The content of an id never changes, as the
    id is made of it: it is fetched once and kept by `local` for as long as that likes.

    Args:
        secret: the namespace's.
        shared: what all frontends share.
        local: this frontend's own tiers; closed with this. Its bounds are those of a cache.
        limits: of what is shared.
        encryption_key: 32 bytes that contents are sealed with, the same at all frontends; None
            leaves them readable in NATS.
        clock: seconds since the epoch, at all frontends about the same.
    """

    def __init__(
        self,
        secret: Secret,
        shared: Shared,
        local: PromptStore,
        limits: FleetLimits,
        *,
        encryption_key: bytes | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._names = Names(secret)
        self._format = FileFormat(
            self._names, None if encryption_key is None else FileSealer(encryption_key), Description
        )
        self._shared = shared
        self._local = local
        self._limits = limits
        self._clock = clock
        self._threads = Threads()
        self._reaper = Reaper(shared, secrets.token_hex(8), clock, liveness.now)
        self._reap_at = 0.0
        self._shares = TenantQuotas(
            shared, limits.max_per_tenant_bytes, min(limits.ttl, LONGEST_WAIT), clock
        )
        self._space = SharedSpace(shared, limits, self._reaper, clock)
        self._fetching: SingleFlight[Key, Entry] = SingleFlight()
        self._later_tasks: set[asyncio.Task[object]] = set()
        self._misses = self._fetches = self._shared_bytes = 0

    async def start(self) -> None:
        """Begin to listen to what others delete, and forget what they have.

        Raises `OverloadedError`.
        """
        await self._shared.listen(self._told, self._back)
        self._back()

    # Upload

    async def put(
        self, tenant: str, data: Buffer, content: Content, *, hold: Callable[[int], None] = nothing
    ) -> StoredPrompt:
        kind = kind_of(content)
        id_ = await self._threads.run(self._names.id, tenant, data, kind)
        key = self._names.key(tenant, id_)
        description = Description.of(key, content)
        self._check_size(description)
        written: Record | None = None
        taken = False
        offered: asyncio.Task[bool] | None = None
        kept: Record | None = None
        try:
            for _ in range(_TRIES):
                revision, found = await self._find(key)
                now = self._clock()
                live = found is not None and found.is_live(now)
                if found is not None and live:
                    new = found.used(now, self._limits.ttl)
                else:
                    if written is None:
                        await self._shares.take(description)
                        taken = True
                        written = await self._written(description, content.data, hold)
                    new = written.used(now, self._limits.ttl)
                swap = self._shared.swap(name_of(key), encode(new), revision)
                if written is not None and new.content == written.content:
                    # Not cancelled with its caller: a content may be erased only where it is
                    # known whether a record names it.
                    offered = asyncio.create_task(swap)
                    done = await shielded(offered)
                else:
                    done = await swap
                if done:
                    kept = new
                    if found is not None and not live:
                        self._later(self._shared.erase(found.content))
                    break
                if written is not None and new.content == written.content:
                    # It may have been kept without an answer, and deleted, and its content erased:
                    # that is never offered again.
                    self._later(self._give_up(written, offered))
                    written, offered, taken = None, None, False
            else:
                raise _contended()
        finally:
            if written is not None and (kept is None or kept.content != written.content):
                self._later(self._give_up(written, offered))
            elif taken:
                self._shares.give_back(description)
        await self._keep(description, content.data)
        return kept.told()

    async def _give_up(self, written: Record, offered: "asyncio.Task[bool] | None") -> None:
        """Erase a content unless a record names it; the reaper handles what is unknown."""
        try:
            if offered is not None and await offered:
                return
        finally:
            self._shares.give_back(written.description)
        if offered is not None:
            _, found = await self._find(written.description.key)
            if found is not None and found.content == written.content:
                return
        await self._shared.erase(written.content)

    def _check_size(self, description: Description) -> None:
        size, share = cost(description.num_bytes), self._limits.max_per_tenant_bytes
        largest = self._limits.max_bytes if share is None else min(self._limits.max_bytes, share)
        if max(size, self._format.file_size(description.num_bytes)) > largest:
            raise BodyTooLargeError(
                f"prompt_embeds of {description.num_bytes} bytes take {size} in the store, which "
                f"may hold {self._limits.max_bytes} (--prompt-store-nats-bytes)"
                + ("" if share is None else f", and {share} for one caller ({TENANT_FLAG})")
            )

    async def _written(
        self, description: Description, data: Buffer, hold: Callable[[int], None]
    ) -> Record:
        """The record of a content that has been written, not published yet."""
        size = self._format.file_size(description.num_bytes)
        name = secrets.token_hex(16)
        async with self._space.taken(size):
            try:
                hold(size)
                with room() as file:
                    await self._threads.run(fill, file, self._format, description, data)
                    await self._shared.write(name, file)
            except BaseException:
                self._later(self._shared.erase(name))
                raise
        return Record(name, size, description, self._clock(), self._limits.ttl)

    # Use

    async def get(self, tenant: str, id_: str) -> StoredPrompt:
        return (await self._live(tenant, id_))[2].told()

    async def rows(
        self,
        tenant: str,
        id_: str,
        target: Target,
        *,
        look: Callable[[StoredPrompt], None],
        hold: Callable[[int], None] = nothing,
    ) -> tuple[Rows, ...]:
        local = self._local
        key, made = await self._used(
            (tenant, id_, "embeds"),
            look,
            hold,
            ready=lambda: local.ready(tenant, id_, target),
            load=lambda: local.rows(tenant, id_, target),
            made=lambda entry: local.made(entry, target),
        )
        return tuple(
            msgspec.structs.replace(rows, data=_named(key, rows.data, f"{rows.dtype}.{index}"))
            for index, rows in enumerate(made)
        )

    async def file(
        self,
        tenant: str,
        id_: str,
        kind: FileKind = "image",
        *,
        look: Callable[[StoredPrompt], None],
        hold: Callable[[int], None] = nothing,
    ) -> Buffer:
        local = self._local
        key, data = await self._used(
            (tenant, id_, kind),
            look,
            hold,
            ready=lambda: local.ready_file(tenant, id_, kind),
            load=lambda: local.file(tenant, id_, kind),
            made=local.file_of,
        )
        return _named(key, data, "file")

    async def _used(
        self,
        wanted: tuple[str, str, Kind],
        look: Callable[[StoredPrompt], None],
        hold: Callable[[int], None],
        *,
        ready: Callable[[], T | None],
        load: Callable[[], T],
        made: Callable[[Entry], T],
    ) -> tuple[Key, T]:
        """The key of a prompt and what is made of it, by the cache where that has it.

        Args:
            wanted: tenant, id and kind.
            look: as in `rows`.
            hold: likewise.
            ready: answers from the cache at once, or None.
            load: answers from the cache, in a thread.
            made: answers from an entry, in a thread.
        """
        tenant, id_, kind = wanted
        key, revision, record = await self._live(tenant, id_)
        record.description.check_kind(kind)
        look(record.told())
        now = self._clock()
        if record.is_late(now):
            self._later(self._note(key, revision, record.used(now, self._limits.ttl)))
        held = 0
        try:
            if self._local.holds(tenant, id_):
                found = ready()
                if found is not None:
                    return key, found
                held = record.description.num_bytes
                hold(held)
                return key, await self._threads.run(load)
        except NotFoundError:
            # It left the cache a moment ago, for others or for good: who is right is in the record.
            pass
        # The content, and its elements.
        hold(record.size + record.description.num_bytes - held)
        entry = await self._fetching.run(key, partial(self._fetch, key))
        return key, await self._threads.run(made, entry)

    async def _note(self, key: Key, revision: int, record: Record) -> None:
        # Where another has changed it, that was a use too, or the end.
        await self._shared.swap(name_of(key), encode(record), revision)

    async def _fetch(self, key: Key) -> Entry:
        for _ in range(_TRIES):
            revision, record = await self._find(key)
            if record is None or not record.is_live(self._clock()):
                break
            with room() as file:
                problem = "its content is gone"
                if await self._shared.read(record.content, record.size, file):
                    try:
                        data = await self._threads.run(
                            content_of, file, self._format, record.description
                        )
                    except DamagedFileError as error:
                        problem = str(error)
                    except LockedFileError as error:
                        _log.error(
                            "the stored prompt %s cannot be read: it is %s", record.content, error
                        )
                        raise OverloadedError(
                            "the stored prompt cannot be read here: it was encrypted with another "
                            "key",
                            retry_after=60,
                        ) from error
                    else:
                        self._fetches += 1
                        return await self._keep(record.description, data)
            # Where it was changed meanwhile, all is well or another's doing: look again.
            if await self._reaper.remove(name_of(key), revision, record):
                _log.warning(
                    "the stored prompt %s is refused and removed: %s", record.content, problem
                )
                break
        raise self._missing(key[1])

    # Pins, deletion, expiry

    async def touch(self, tenant: str, id_: str) -> StoredPrompt:
        key, revision, record = await self._live(tenant, id_)
        used = record.used(self._clock(), self._limits.ttl)
        await self._note(key, revision, used)
        return used.told()

    async def pin(self, tenant: str, id_: str, pinned: bool) -> StoredPrompt:
        for _ in range(_TRIES):
            key, revision, record = await self._live(tenant, id_)
            used = record.used(self._clock(), self._limits.ttl)
            new = msgspec.structs.replace(used, pinned=pinned)
            if await self._shared.swap(name_of(key), encode(new), revision):
                return new.told()
        raise _contended()

    async def delete(self, tenant: str, id_: str) -> None:
        """As `inlay.store.prompts.Prompts.delete`. When it fails, it may be done again."""
        key = self._key(tenant, id_)
        content: str | None = None
        for _ in range(_TRIES):
            revision, record = await self._find(key)
            if record is None or (content is not None and record.content != content):
                break
            if not record.leaving:
                if not record.is_live(self._clock()):
                    break
                leaving = msgspec.structs.replace(record, leaving=True)
                try:
                    if await self._shared.swap(name_of(key), encode(leaving), revision):
                        content = record.content
                except NoRoomError:
                    await self._shared.erase(record.content)  # the mark takes room, this gives it
                continue
            # Marked first: what an interruption leaves is not used, and ends by asking again.
            content = record.content
            try:
                await self._shared.erase(content)
                if await self._shared.drop(name_of(key), revision):
                    break
            except NoRoomError as error:
                # It is used no more; the reaper removes it once the disk has room.
                _log.warning("a deleted prompt keeps its bytes for now: %s", error.message)
                break
        else:
            raise _contended()
        await self._threads.run(self._local.discard, key)
        if content is None:
            raise self._missing(id_)
        self._shared.tell(name_of(key))

    async def sweep(self) -> None:
        self._local.sweep()
        now = time.monotonic()
        try:
            self._shared_bytes, _ = await self._shared.size()
            if now >= self._reap_at:
                self._reap_at = now + PERIOD_SECONDS
                if await self._reaper.turn():
                    await self._reaper.reap()
        except OverloadedError as error:
            _log.warning("expired prompts are not removed: %s", error.message)

    # Finding

    def _key(self, tenant: str, id_: str) -> Key:
        if not _id.fullmatch(id_):
            raise self._missing(id_)
        return self._names.key(tenant, id_)

    async def _find(self, key: Key) -> tuple[int, Record | None]:
        name = name_of(key)
        revision, kept = await self._shared.find(name)
        return revision, None if kept is None else decode(name, kept)

    async def _live(self, tenant: str, id_: str) -> tuple[Key, int, Record]:
        key = self._key(tenant, id_)
        revision, record = await self._find(key)
        if record is None or not record.is_live(self._clock()):
            raise self._missing(id_)
        return key, revision, record

    def _missing(self, id_: str) -> NotFoundError:
        self._misses += 1
        return missing(id_)

    # The cache

    def _told(self, name: str) -> None:
        try:
            key = key_of(name)
        except ValueError:
            _log.warning("NATS reports a deleted prompt with an invalid name")
            return
        self._later(self._threads.run(self._local.discard, key))

    def _back(self) -> None:
        self._later(self._compare())

    async def _compare(self) -> None:
        """Forget cached prompts that are no longer in the fleet's storage.

        Messages of deletions may have been missed.
        """
        for key in self._local.names():
            await self._verify(key)

    async def _verify(self, key: Key) -> None:
        """Forget a prompt that is gone."""
        _, record = await self._find(key)
        if record is None or not record.is_live(self._clock()):
            await self._threads.run(self._local.discard, key)

    async def _keep(self, description: Description, data: Buffer) -> Entry:
        """Have a prompt in the cache, unless it was deleted while it came."""
        entry = await self._threads.run(self._local.keep, description, data)
        self._later(self._verify(description.key))
        return entry

    def _later(self, request: Coroutine[Any, Any, object]) -> None:
        """Run in the background; on failure the reaper does it, or the next use."""
        task = asyncio.create_task(request)
        self._later_tasks.add(task)
        task.add_done_callback(self._done_later)

    def _done_later(self, task: "asyncio.Task[object]") -> None:
        self._later_tasks.discard(task)
        problem = None if task.cancelled() else task.exception()
        if problem is not None:
            _log.warning("a background task of stored prompts failed: %s", problem)

    def stats(self) -> StoreStats:
        """As `inlay.store.prompts.Prompts.stats`: of this frontend, but for `shared_bytes`."""
        return msgspec.structs.replace(
            self._local.stats(),
            misses=self._misses,
            evictions=self._space.evictions,
            expirations=self._reaper.expired,
            fetches=self._fetches,
            shared_bytes=self._shared_bytes,
        )

    def close(self) -> None:
        self._fetching.cancel()
        for task in self._later_tasks:
            task.cancel()
        self._threads.close()
        self._local.close()


def _named(key: Key, data: Buffer, part: str) -> Buffer:
    """The same, so that workers can keep it: a part of an id is always the same.

    A tensor cast to a dtype is such a part, and the file of an image.
    """
    return Buffer(data.view, f"{name_of(key)}/{part}")


def _contended() -> OverloadedError:
    return OverloadedError("the stored prompt is being changed by others", retry_after=1)
