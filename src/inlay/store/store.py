"""The store of uploaded prompt embeddings: sent once, used many times."""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from inlay.base.errors import (
    BodyTooLargeError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RateLimitedError,
)
from inlay.base.single_flight import ThreadSingleFlight
from inlay.messages.digest import Secret, row_digests
from inlay.messages.prompt import Buffer, Rows
from inlay.store.directory import Directory
from inlay.store.disk import DiskTier
from inlay.store.entry import (
    Content,
    Description,
    Entry,
    FileKind,
    Kind,
    StoredPrompt,
    StoreStats,
    Target,
    views,
)
from inlay.store.file_format import FileFormat
from inlay.store.index import StoreIndex, StoreLimits
from inlay.store.names import Key, Names
from inlay.store.sealing import FileSealer
from inlay.store.tiers import StoreTiers
from inlay.tensors import Tensor, prompts_of, to_rows
from inlay.tensors.tensor import quoted


class PromptStore:
    """Uploaded prompt embeddings by id, each for the tenant that uploaded it.

    Thread-safe; what may touch a file or pass over a tensor (`put`, `rows`, `pin`, `delete`,
    `close`) belongs in a worker thread, while `ready`, `digests`, `get`, `sweep` and `stats` return
    at once and may be called from an event loop.

    Memory is the first tier. With a directory every upload is also written there in the background,
    so that it outlives the process; when memory is short, what is written leaves it. Without one,
    the least recently used goes. An id is found by its owner alone: to another tenant it is exactly
    as absent as one that was never given.

    Args:
        secret: the namespace's. Files written under another are refused, so one that is to survive
            a restart must too.
        memory_bytes: bound of tensors, digests and casts in memory.
        ttl: seconds a prompt is kept after its last use, unless pinned.
        disk_bytes: bound of the files; needed with a directory, and only then.
        directory: where the files are; made with mode 0700 when missing, used by one store at a
            time.
        max_per_tenant_bytes: bound of one tenant's prompts in any tier.
        max_entries: bound of prompts in any tier.
        encryption_key: 32 bytes; files are then sealed with AES-256-GCM. Plain files from before
            stay readable.
        clock: seconds since the epoch.

    Raises:
        InvalidRequestError: a directory that cannot be made, is open to others or in use; a bad
            key; a bad bound.
    """

    def __init__(
        self,
        secret: Secret,
        *,
        memory_bytes: int,
        ttl: float,
        disk_bytes: int = 0,
        directory: Path | None = None,
        max_per_tenant_bytes: int | None = None,
        max_entries: int = 65536,
        encryption_key: bytes | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if memory_bytes < 0 or disk_bytes < 0 or not ttl > 0 or max_entries < 1:
            raise InvalidRequestError(
                "a store needs bounds of at least 0 bytes, a TTL over 0 and at least one entry; "
                f"got memory {memory_bytes}, "
                f"disk {disk_bytes}, TTL {ttl}, entries {max_entries}"
            )
        if (directory is None) != (disk_bytes == 0):
            raise InvalidRequestError(
                f"a store's directory and its bound go together; got {directory} and {disk_bytes} "
                "bytes"
            )
        self._secret = secret
        self._names = Names(secret)
        self._clock = clock
        self._ttl = ttl
        self._lock = threading.Lock()
        self._uploads: ThreadSingleFlight[Key, Entry] = ThreadSingleFlight()
        self._uses: ThreadSingleFlight[tuple[Entry, Target], tuple[Rows, ...]] = (
            ThreadSingleFlight()
        )
        self._files: ThreadSingleFlight[Entry, Buffer] = ThreadSingleFlight()
        self._closed = False
        self._hits = self._loads = self._misses = 0
        self._index = StoreIndex(
            StoreLimits(
                memory_bytes=memory_bytes,
                disk_bytes=disk_bytes,
                ttl=ttl,
                max_per_tenant_bytes=max_per_tenant_bytes,
                max_entries=max_entries,
            )
        )
        self._disk: DiskTier | None = None
        sealer = None if encryption_key is None else FileSealer(encryption_key)
        if directory is not None:
            files = Directory(directory, FileFormat(self._names, sealer, Description))
            self._disk = DiskTier(files, self._index, self._lock, clock())
        self._tiers = StoreTiers(self._index, self._disk, self._lock)

    # Upload

    def put(
        self, tenant: str, data: Buffer, content: Content, *, adopt: bool = False
    ) -> StoredPrompt:
        """Store a content; the same bytes again only start the TTL again.

        Args:
            tenant: the owner.
            data: the file it was read from; with the tenant they make the id.
            content: what `inlay.tensors.read` found in them, or the image or the vectors that they
                are. Its elements are copied, so `data` may be used again.
            adopt: `data` will never change, so elements that fill its memory but for a page need no
                copy.

        Raises:
            EmbeddingsError: not two- or three-dimensional.
            BodyTooLargeError: larger than the store, or than one tenant's quota.
            RateLimitedError: the tenant's quota is used up.
            OverloadedError: no room can be made, or the disk failed where memory has no room.
        """
        kind = kind_of(content)
        key = self._names.key(tenant, self._names.id(tenant, data, kind))
        description = Description.of(key, content)
        return self._uploads.run(key, partial(self._put, description, content.data, adopt)).told(
            self._ttl
        )

    def keep(self, description: Description, data: Buffer) -> Entry:
        """Keep a copy of a prompt stored elsewhere, if there is room; `made` takes the result.

        Args:
            description: of the tensor.
            data: its elements, which will never change.
        """
        try:
            return self._uploads.run(description.key, partial(self._put, description, data, True))
        except (BodyTooLargeError, RateLimitedError, OverloadedError):
            # Used by the current callers, and not kept for later ones.
            entry = Entry(description, self._clock())
            entry.data, entry.gone = data, True
            return entry

    def _put(self, description: Description, data: Buffer, adopt: bool) -> Entry:
        with self._lock:
            self._check_open()
            now = self._clock()
            self._index.expire(now)
            entry = self._index.find(description.key, now)
            if entry is not None:
                self._touch(entry, now)
                return entry
            self._index.admit(description.tenant, description.num_bytes)
        try:
            entry = Entry(description, now)
            self._tiers.admit(entry, data, adopt)
        except BaseException:
            with self._lock:
                self._index.dismiss(description.tenant, description.num_bytes)
            raise
        finally:
            if self._disk is not None:
                self._disk.tidy()
        return entry

    # Use

    def rows(self, tenant: str, id_: str, target: Target) -> tuple[Rows, ...]:
        """The prompts of `id_` as rows for a model, with their digests; starts the TTL again.

        Checks, casts and digests are made at the first use for a model, and remembered.

        Args:
            tenant: who asks.
            id_: as `put` returned it.
            target: the model.

        Returns:
            One item a prompt: one unless a batch was uploaded.

        Raises:
            NotFoundError: no such id, or not this tenant's, or expired.
            EmbeddingsError: as `inlay.tensors.to_rows`.
            OverloadedError: its file cannot be read now.
        """
        with self._lock:
            entry = self._lookup(tenant, id_, "embeds")
            self._touch(entry, self._clock())
            made = entry.recall(target)
            if made is not None:
                self._hits += 1
                return made
        return self.made(entry, target)

    def made(self, entry: Entry, target: Target) -> tuple[Rows, ...]:
        """The rows of what `keep` returned, as `rows` does for what was put."""
        return self._uses.run((entry, target), partial(self._prepare, entry, target))

    def file(self, tenant: str, id_: str, kind: FileKind = "image") -> Buffer:
        """The file of `id_`; starts the TTL again.

        Raises:
            InvalidRequestError: a content of another kind.
            NotFoundError: as `rows`.
            OverloadedError: its file cannot be read now.
        """
        with self._lock:
            entry = self._lookup(tenant, id_, kind)
            self._touch(entry, self._clock())
        return self.file_of(entry)

    def file_of(self, entry: Entry) -> Buffer:
        """The file of what `keep` returned, as `file` does for what was put."""
        with self._lock:
            if entry.data is not None:
                self._hits += 1
                return entry.data
        return self._files.run(entry, partial(self._load, entry))

    def holds(self, tenant: str, id_: str) -> bool:
        """True if a prompt is in any tier. Does not extend its TTL."""
        with self._lock:
            return self._index.find(self._names.key(tenant, id_), self._clock()) is not None

    def names(self) -> list[Key]:
        with self._lock:
            return [entry.key for entry in self._index.entries]

    def ready_file(self, tenant: str, id_: str, kind: FileKind = "image") -> Buffer | None:
        """As `file`, where no file has to be read. Else None, and nothing is touched.

        Raises:
            InvalidRequestError, NotFoundError: as `file`.
        """
        with self._lock:
            entry = self._lookup(tenant, id_, kind)
            if entry.data is not None:
                self._hits += 1
                self._touch(entry, self._clock())
            return entry.data

    def ready(self, tenant: str, id_: str, target: Target) -> tuple[Rows, ...] | None:
        """As `rows`, where that takes neither a file nor a pass over the elements.

        Else None, and nothing is touched.

        Raises:
            NotFoundError: as `rows`.
        """
        with self._lock:
            entry = self._lookup(tenant, id_, "embeds")
            made = entry.recall(target)
            if made is not None:
                self._hits += 1
                self._touch(entry, self._clock())
            return made

    def digests(self, tenant: str, id_: str, target: Target) -> tuple[bytes, ...] | None:
        """Row digests for a model, one item a prompt, if known from an earlier use for it.

        They are kept when the elements have left memory, and are all that a router, or a worker
        that holds the rows or their keys and values, has to know. Starts the TTL again if they are
        returned.

        Raises:
            NotFoundError: as `rows`.
        """
        with self._lock:
            entry = self._lookup(tenant, id_)
            digests = entry.digests.get(target.dtype) if entry.has_passed(target) else None
            if digests is not None:
                self._touch(entry, self._clock())
            return digests

    def get(self, tenant: str, id_: str) -> StoredPrompt:
        """Metadata of a stored prompt; does not extend its TTL. Raises as `rows`."""
        with self._lock:
            return self._lookup(tenant, id_).told(self._ttl)

    def touch(self, tenant: str, id_: str) -> StoredPrompt:
        """Start the TTL of a stored prompt again; its metadata. Raises as `rows`."""
        with self._lock:
            entry = self._lookup(tenant, id_)
            self._touch(entry, self._clock())
            return entry.told(self._ttl)

    def _lookup(self, tenant: str, id_: str, kind: Kind | None = None) -> Entry:
        self._check_open()
        entry = self._index.find(self._names.key(tenant, id_), self._clock())
        if entry is None:
            raise self._missing(id_)
        if kind is not None:
            entry.description.check_kind(kind)
        return entry

    def _missing(self, id_: str) -> NotFoundError:
        self._misses += 1
        if self._disk is not None:
            self._disk.tidy()
        return missing(id_)

    def _touch(self, entry: Entry, now: float) -> None:
        self._index.touch(entry, now)
        if self._disk is not None:
            self._disk.note_use(entry)

    def _prepare(self, entry: Entry, target: Target) -> tuple[Rows, ...]:
        description = entry.description
        with self._lock:
            data = entry.data
            digests = entry.digests.get(target.dtype)
            known = entry.has_passed(target) and target.dtype == description.dtype
        if data is None:
            data = self._load(entry)
        if known and digests is not None:
            made = views(description, data, digests)
        else:
            plain = [
                to_rows(
                    prompt,
                    hidden_size=target.hidden_size,
                    dtype=target.dtype,
                    max_abs=target.max_abs,
                    table_id=target.table_id,
                )
                for prompt in description.prompts(data)
            ]
            if digests is None:
                digests = tuple(row_digests(rows, self._secret) for rows in plain)
            made = tuple(
                msgspec.structs.replace(rows, digests=digest)
                for rows, digest in zip(plain, digests, strict=True)
            )
        with self._lock:
            self._index.remember(entry, target, data, digests, made)
        return made

    def _load(self, entry: Entry) -> Buffer:
        data = self._tiers.load(entry)
        with self._lock:
            if data is None:
                raise self._missing(entry.description.id)
            self._loads += 1
        return data

    # Pins, deletion, expiry

    def pin(self, tenant: str, id_: str, pinned: bool) -> StoredPrompt:
        """Keep a prompt until it is unpinned or deleted, or stop to; starts the TTL again.

        Raises:
            NotFoundError: as `rows`.
        """
        with self._lock:
            entry = self._lookup(tenant, id_)
            self._index.set_pinned(entry, pinned, self._clock())
            told = entry.told(self._ttl)
        if self._disk is not None:
            self._disk.save_pin(entry)
        return told

    def delete(self, tenant: str, id_: str) -> None:
        """Remove a prompt from every tier; when this returns no file holds it.

        Raises:
            NotFoundError: as `rows`.
            OverloadedError: its file cannot be removed; the prompt is still there.
        """
        with self._lock:
            entry = self._lookup(tenant, id_)
        self._remove(entry)

    def discard(self, key: Key) -> None:
        """`delete`, by key, of a prompt that need not be there."""
        with self._lock:
            entry = self._index.find(key, self._clock())
        if entry is not None:
            self._remove(entry)

    def _remove(self, entry: Entry) -> None:
        if self._disk is not None:
            self._disk.delete(entry)
            return
        with self._lock:
            self._index.remove(entry)

    def sweep(self) -> int:
        """Remove what has expired, and try again to write what could not be.

        To be called from time to time.

        Returns:
            How many expired.
        """
        with self._lock:
            self._check_open()
            count = self._index.expire(self._clock())
            if self._disk is not None:
                for entry in self._index.retry_saving():
                    self._disk.save_later(entry)
                self._disk.tidy()
        return count

    def stats(self) -> StoreStats:
        """The counters now."""
        disk = self._disk
        with self._lock:
            return StoreStats(
                count=len(self._index),
                pinned=self._index.num_pinned,
                memory_bytes=self._index.memory_used,
                disk_bytes=self._index.disk_used,
                hits=self._hits,
                loads=self._loads,
                misses=self._misses,
                evictions=self._index.evictions,
                expirations=self._index.expirations,
                spills=disk.written if disk else 0,
                refused_files=disk.refused if disk else 0,
                locked_files=disk.locked if disk else 0,
                disk_errors=disk.errors if disk else 0,
            )

    def flush(self) -> None:
        """Return when all that was put so far is written, or has turned out not to be writable."""
        if self._disk is not None:
            self._disk.flush()

    def close(self) -> None:
        """Write what is not written yet and note the last uses; then the store can do no more."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._disk is not None:
            self._disk.close()

    def _check_open(self) -> None:
        if self._closed:
            raise OverloadedError("the store of prompt_embeds is closed")


def kind_of(content: Content) -> Kind:
    """The kind of a content that may be stored.

    Raises:
        EmbeddingsError: a tensor that is not two- or three-dimensional.
    """
    if isinstance(content, Tensor):
        prompts_of(content)
        return "embeds"
    return content.kind


def missing(id_: str) -> NotFoundError:
    """The error of an id that its asker does not find, whatever the reason."""
    return NotFoundError(f"prompt_embeds {quoted(id_)} not found")
