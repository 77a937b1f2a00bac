"""Stored prompts in NATS.

What is known of each in key-value storage, their contents in an object store.

Nothing here knows what a record or a content is. A record is changed by compare-and-set alone:
whoever read an older one is told that another was first. A content is written once, under a name
nobody else has, and never changed. So of members that do the same at the same time one wins, and no
reader sees a part of anything.

Contents lie as NATS' object store lays them out, and its tools list them. They are written and read
by the client's streams and not by its own object store, which waits for ever for an object that is
removed meanwhile, copies an object once for each of its chunks, and leaves chunks behind that
nobody can find when it is cut off while writing.
"""

import asyncio
import logging
from base64 import urlsafe_b64encode
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from typing import BinaryIO, TypeVar

import msgspec
import nats.errors
import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import Header, ObjectStoreConfig
from nats.js.kv import KV_OP, KV_PURGE, MSG_ROLLUP_SUBJECT, KeyValue

from inlay.base import liveness
from inlay.base.errors import NoRoomError, OverloadedError
from inlay.transport.nats.cards import bucket, storage
from inlay.transport.nats.client import cancellable
from inlay.transport.nats.connection import NatsConnection
from inlay.transport.nats.member import Member
from inlay.transport.nats.subjects import PROMPTS

T = TypeVar("T")

WAIT_SECONDS = 15.0
"""Seconds that NATS may be away before a call fails."""
CHUNK_BYTES = 512 * 1024
_SPARE_BYTES = 4096
"""Bytes of a message that are not its payload, at most."""
_AGAIN_SECONDS = 0.2
_MARKER_SECONDS = 60
"""Seconds for which a removed record leaves a mark, for those who read it before."""
_LIST_SECONDS = 60.0
_EMPTY_TRIES = 3
_NO_ROOM = frozenset({10002, 10023, 10028, 10047, 10077, 10122})
"""Error codes of JetStream when a bound on bytes is reached."""
_FULL_DISK = "no space left on device"

_log = logging.getLogger(__name__)


class _Options(msgspec.Struct):
    max_chunk_size: int


class _Object(msgspec.Struct, kw_only=True):
    """An object's record in the object store of NATS, as JSON."""

    name: str
    bucket: str
    nuid: str
    size: int
    chunks: int
    digest: str
    mtime: str
    options: _Options


class NatsPrompts:
    """A namespace's records and contents. Times of silence up to `WAIT_SECONDS` are waited out.

    Every method but those that return at once raises `OverloadedError` when NATS does not do what
    is asked within that time.
    """

    def __init__(
        self, control: NatsConnection, bulk: NatsConnection, records: KeyValue, name: str, told: str
    ) -> None:
        self._control = control
        self._bulk = bulk
        self._records = records
        self._name = name
        self._told = told
        self._stream = f"OBJ_{name}"

    @classmethod
    async def open(cls, member: Member, kind: str = PROMPTS) -> "NatsPrompts":
        """Those of a kind in the namespace that `member` has joined, made where there are none.

        Raises:
            InvalidRequestError: NATS does not let us, or has too few servers for the replicas.
            OverloadedError: it does not answer.
        """
        name, replicas = member.subjects.kept(kind), member.replicas

        async def made() -> KeyValue:
            records = await bucket(member.control, name, replicas=replicas, seconds=None)
            await storage(member.control, name, objects)
            return records

        async def objects(jetstream: JetStreamContext) -> None:
            try:
                await jetstream.object_store(name)
            except nats.js.errors.NotFoundError:
                await jetstream.create_object_store(name, ObjectStoreConfig(replicas=replicas))

        records = await made()
        member.keep(made)
        # Contents go over a connection of their own: they must not delay heartbeats.
        bulk = await member.connect("bulk")
        return cls(member.control, bulk, records, name, member.subjects.deleted(kind))

    # Records

    async def find(self, key: str) -> tuple[int, bytes | None]:
        """(revision, record) of a key.

        The record is None where there is none, and the revision what `swap` then wants.
        """

        async def find() -> tuple[int, bytes | None]:
            try:
                entry = await self._records.get(key)
            except nats.js.errors.KeyNotFoundError as error:
                return (0 if error.entry is None else error.entry.revision or 0), None
            return entry.revision or 0, entry.value or b""

        return await self._patient(find, "show what is stored")

    async def swap(self, key: str, record: bytes, revision: int) -> bool:
        """Put a record in the place of the one of `revision`.

        False, and no change, when another was first.
        """

        async def swap() -> bool:
            try:
                await self._records.update(key, record, last=revision)
            except nats.js.errors.KeyWrongLastSequenceError:
                return False
            return True

        if await self._patient(swap, "keep what is stored"):
            return True
        # An attempt whose answer was lost has put it there.
        return (await self.find(key))[1] == record

    async def drop(self, key: str, revision: int) -> bool:
        """Remove the record of `revision`; False, and no change, when another was first."""
        # As the client's own purge, which cannot be told a revision.
        headers = {
            KV_OP: KV_PURGE,
            Header.ROLLUP: MSG_ROLLUP_SUBJECT,
            Header.EXPECTED_LAST_SUBJECT_SEQUENCE: str(revision),
        }

        async def drop() -> bool:
            try:
                await self._control.jetstream.publish(
                    f"$KV.{self._name}.{key}", headers=headers, msg_ttl=_MARKER_SECONDS
                )
            except nats.js.errors.BadRequestError as error:
                if error.err_code not in (10071, 10164):  # wrong last sequence
                    raise
                return False
            return True

        if await self._patient(drop, "remove what is stored"):
            return True
        return (await self.find(key))[1] is None

    async def list(self, under: str = "*") -> "list[tuple[str, int, bytes]]":
        """(key, revision, record) of every key that is `under` and one part more."""

        @cancellable
        async def list_() -> "list[tuple[str, int, bytes]]":
            watcher = await self._records.watch(f"{under}.*", ignore_deletes=True)
            found = []
            try:
                async with liveness.timeout(_LIST_SECONDS):
                    async for entry in watcher:
                        if entry is None:
                            break
                        found.append((entry.key, entry.revision or 0, entry.value or b""))
            finally:
                with suppress(nats.errors.Error):
                    await watcher.stop()  # type: ignore[no-untyped-call]
            return found

        # nats-py takes records that the server has sent, and that it has not read yet, for none at
        # all. An empty answer is asked for again.
        for _ in range(_EMPTY_TRIES):
            found = await self._patient(list_, "list what is stored")
            if found:
                break
        return found

    # Contents

    async def write(self, name: str, file: BinaryIO) -> int:
        """Keep what is in `file`, from where it is read, as the content `name`; its bytes.

        What was written when this raises stays until it is erased.

        Raises:
            OverloadedError: also where NATS has no room.
        """
        limit = min(CHUNK_BYTES, self._bulk.max_payload - _SPARE_BYTES)
        digest, size, count = sha256(), 0, 0
        while chunk := file.read(limit):
            digest.update(chunk)
            # The server takes each number once, so an attempt whose answer was lost may be
            # repeated.
            await self._publish(self._chunks(name), chunk, {Header.MSG_ID: f"{name}.{count}"})
            size, count = size + len(chunk), count + 1
        meta = _Object(
            name=name,
            bucket=self._name,
            nuid=name,
            size=size,
            chunks=count,
            digest="SHA-256=" + urlsafe_b64encode(digest.digest()).decode(),
            mtime=datetime.now(UTC).isoformat(),
            options=_Options(limit),
        )
        await self._publish(
            self._meta(name), msgspec.json.encode(meta), {Header.ROLLUP: MSG_ROLLUP_SUBJECT}
        )
        return size

    async def _publish(self, subject: str, payload: bytes, headers: dict[str, str]) -> None:
        await self._patient(
            lambda: self._bulk.jetstream.publish(
                subject, payload, stream=self._stream, headers=dict(headers)
            ),
            "keep what is stored",
        )

    async def read(self, name: str, size: int, file: BinaryIO) -> bool:
        """Write the content `name`, of `size` bytes, to `file`.

        False when it is not there, or not whole.
        """
        sequence = 1
        while size > 0:
            chunk = await self._patient(
                lambda after=sequence: self._next(name, after),  # type: ignore[misc]
                "show what is stored",
            )
            if chunk is None:
                return False
            sequence, data = chunk
            file.write(data)
            size, sequence = size - len(data), sequence + 1
        return size == 0

    async def _next(self, name: str, sequence: int) -> tuple[int, bytes] | None:
        jetstream, subject = self._bulk.jetstream, self._chunks(name)
        try:
            found = await jetstream.get_msg(self._stream, sequence, subject, direct=True, next=True)
        except nats.js.errors.NotFoundError:
            # Any server of a cluster may have answered, also one that is behind: the leader knows.
            try:
                found = await jetstream.get_msg(self._stream, sequence, subject, next=True)
            except nats.js.errors.NotFoundError:
                return None
        return found.seq or 0, found.data or b""

    async def erase(self, name: str) -> None:
        """Remove the content `name`, or what there is of it, from the server's storage."""

        async def erase() -> None:
            for subject in (self._meta(name), self._chunks(name)):
                await self._control.jetstream.purge_stream(self._stream, subject=subject)

        await self._patient(erase, "remove what is stored")

    async def contents(self) -> set[str]:
        """The names of all contents, those of which only a part is there included."""

        async def contents() -> set[str]:
            info = await self._control.jetstream.stream_info(
                self._stream, subjects_filter=self._chunks(">")
            )
            return {subject.rpartition(".")[2] for subject in info.state.subjects or ()}

        return await self._patient(contents, "list what is stored")

    async def size(self) -> tuple[int, int]:
        """Bytes of all contents, and how many records there are."""

        async def size() -> tuple[int, int]:
            jetstream = self._control.jetstream
            contents = await jetstream.stream_info(self._stream)
            records = await jetstream.stream_info(f"KV_{self._name}")
            return contents.state.bytes, records.state.messages

        return await self._patient(size, "say how much it keeps")

    def _chunks(self, name: str) -> str:
        return f"$O.{self._name}.C.{name}"

    def _meta(self, name: str) -> str:
        return f"$O.{self._name}.M.{urlsafe_b64encode(name.encode()).decode()}"

    # What members tell each other

    def tell(self, key: str) -> None:
        """Tell the other members that a key was removed. Returns at once."""
        self._control.publish(self._told, key.encode())

    async def listen(self, told: Callable[[str], None], back: Callable[[], None]) -> None:
        """Call `told` with each key that a member removed, and `back` after a lost connection.

        What was told meanwhile is not told again.
        """
        await self._control.subscribe(
            self._told, lambda message: told(message.data.decode("ascii", "replace"))
        )
        self._control.on_reconnect(back)

    async def _patient(self, act: Callable[[], Awaitable[T]], what: str) -> T:
        """Try until it is done, or NATS has been away for too long."""
        until = liveness.now() + WAIT_SECONDS
        while True:
            try:
                return await act()
            except nats.js.errors.APIError as error:
                if _FULL_DISK in (error.description or ""):
                    raise NoRoomError(
                        "the disk of the NATS server is full: it needs room, and a restart",
                        retry_after=60,
                    ) from error
                if error.err_code in _NO_ROOM:
                    raise NoRoomError(
                        f"the NATS server has no room for more: {error.description}",
                        retry_after=60,
                    ) from error
                problem: Exception = error
            except (nats.errors.Error, TimeoutError) as error:
                problem = error
            if liveness.now() >= until:
                _log.warning("NATS does not %s: %s", what, problem)
                raise OverloadedError(
                    f"NATS does not {what} at the moment", retry_after=1
                ) from problem
            await asyncio.sleep(_AGAIN_SECONDS)
