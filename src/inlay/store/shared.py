"""Storage of prompts that all frontends of a fleet share.

A record for each, and its content as a sealed file.
"""

import logging
import os
import sys
import tempfile
from collections.abc import Callable
from typing import BinaryIO, Protocol

import msgspec

from inlay.messages.prompt import Buffer
from inlay.store.entry import Description, StoredPrompt
from inlay.store.file_format import FileFormat
from inlay.store.names import Key

_log = logging.getLogger(__name__)

LATE = 1 / 8
"""Part of its time to live by which the last use that a record knows of may be late.

A use is noted after that long.
"""

_MEMFD = sys.platform == "linux"


class Record(msgspec.Struct, frozen=True, array_like=True):
    """Metadata of a stored prompt in a fleet.

    Attributes:
        content: the name of its content, which nothing else has or had.
        size: bytes of that.
        description: what the tensor is.
        used_at: when it was uploaded, pinned or used last, seconds since the epoch; up to `LATE` of
            the TTL before the last use.
        ttl: seconds it is kept after its last use.
        pinned: it does not expire.
        leaving: it is being deleted: gone for all but those who finish that.
    """

    content: str
    size: int
    description: Description
    used_at: float
    ttl: float
    pinned: bool = False
    leaving: bool = False

    def told(self) -> StoredPrompt:
        """Metadata for its owner."""
        return self.description.told(expires_at=None if self.pinned else self.used_at + self.ttl)

    def is_live(self, now: float) -> bool:
        """True if it may be used at `now`."""
        return not self.leaving and (self.pinned or now < self.used_at + self.ttl * (1 + LATE))

    def used(self, now: float, ttl: float) -> "Record":
        """The same, used at `now`, for a frontend whose TTL is `ttl`."""
        return msgspec.structs.replace(self, used_at=max(now, self.used_at), ttl=ttl)

    def is_late(self, now: float) -> bool:
        """True if a use at `now` should be noted."""
        return now > self.used_at + self.ttl * LATE


encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Record)


def decode(name: str, kept: bytes) -> Record | None:
    """The record that is kept under `name`.

    None, and a line in the log, for what was not made by a frontend for that name.
    """
    try:
        record = _decoder.decode(kept)
        if record.description.key == key_of(name):
            return record
        problem = "it is another prompt's"
    except (msgspec.MsgspecError, ValueError) as error:
        problem = str(error)
    _log.warning("the record of a stored prompt is refused: %s", problem)
    return None


def name_of(key: Key) -> str:
    """Key of a record: the owner's digest and the id."""
    tenant, id_ = key
    return f"{tenant.hex()}.{id_}"


def key_of(name: str) -> Key:
    """The key again. Raises `ValueError` for what is no such name."""
    tenant, separator, id_ = name.partition(".")
    if not separator:
        raise ValueError(f"{name!r} is no stored prompt's name")
    return bytes.fromhex(tenant), id_


class Storage(Protocol):
    """Storage of records, changed by compare-and-set alone, and of contents, written once.

    A key has two parts with a dot between: the owner's digest and the id. All methods raise
    `OverloadedError` where the storage does not do what is asked now, or has no room.
    """

    async def find(self, key: str) -> tuple[int, bytes | None]:
        """(revision, record) of a key; the record is None where there is none."""

    async def swap(self, key: str, record: bytes, revision: int) -> bool:
        """Put a record in the place of the one of `revision`; False when another was first."""

    async def drop(self, key: str, revision: int) -> bool:
        """Remove the record of `revision`; False when another was first."""

    async def list(self, under: str = "*") -> "list[tuple[str, int, bytes]]":
        """(key, revision, record) of every key `under` a tenant, or of all."""

    async def write(self, name: str, file: BinaryIO) -> int:
        """Keep a content under a new name; its bytes."""

    async def read(self, name: str, size: int, file: BinaryIO) -> bool:
        """Copy a content of `size` bytes to a file; False where it is not whole."""

    async def erase(self, name: str) -> None:
        """Remove a content, or what there is of it."""

    async def contents(self) -> set[str]:
        """The names of all contents."""

    async def size(self) -> tuple[int, int]:
        """Bytes of all contents, and how many records there are."""


class Shared(Storage, Protocol):
    """Storage of a fleet: `inlay.transport.nats.prompts.NatsPrompts`."""

    def tell(self, key: str) -> None:
        """Tell the others that a key was removed."""

    async def listen(self, told: Callable[[str], None], back: Callable[[], None]) -> None:
        """Call `told` with removals by others, and `back` when some may have been missed."""


async def listed(shared: Shared, under: str = "*") -> list[tuple[str, int, Record]]:
    """(name, revision, record) of every prompt, or of those `under` a tenant.

    Raises `OverloadedError`.
    """
    found = []
    for name, revision, kept in await shared.list(under):
        record = decode(name, kept)
        if record is not None:
            found.append((name, revision, record))
    return found


def room() -> BinaryIO:
    """An empty file of this process alone: in memory on Linux, else without a name on disk."""
    if _MEMFD:
        return os.fdopen(os.memfd_create("inlay-stored"), "w+b")
    return tempfile.TemporaryFile()


def fill(
    file: BinaryIO, file_format: FileFormat[Description], description: Description, data: Buffer
) -> None:
    """Make an empty `file` a tensor's, and stand at its beginning."""
    file_format.write(file.fileno(), description, data)
    file.seek(0)


def content_of(
    file: BinaryIO, file_format: FileFormat[Description], description: Description
) -> Buffer:
    """The elements of the tensor in `file`.

    Raises:
        DamagedFileError: torn, changed, or that of another prompt.
        LockedFileError: sealed with a key we do not have.
    """
    file.flush()
    header = file_format.read_header(file.fileno())
    file_format.check(header, description)
    return file_format.read_payload(file.fileno(), header)
