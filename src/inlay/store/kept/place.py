"""The place of what clients keep: memory, a directory, or the NATS of a fleet."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from inlay.base.errors import InvalidRequestError
from inlay.store.kept.contents import Contents
from inlay.store.kept.directory import DirectoryStorage
from inlay.store.kept.memory import MemoryStorage
from inlay.store.secret import read_key
from inlay.store.shared import Shared, Storage

MEMORY_BYTES = 256 * 1024 * 1024


class KeptPlace:
    """A place as a flag names it, not open yet.

    Args:
        where: "memory", "nats", or a directory.
        flag: that says so: "--batch-store".
        what: name of the storage in a fleet, and of what is kept, for errors: "files".
        max_bytes: of all that is kept.
        spare: further bytes in memory, for what takes the place of something.
        key_file: file of the key that contents are encrypted with, or None.
        open_shared: opens the storage of a name in a fleet; None without a fleet.

    Attributes:
        max_bytes: of all that is kept; in memory at most 256 MiB.
        is_open: True from `open` on.

    Raises:
        InvalidRequestError: there is no fleet, memory is not encrypted, or the key cannot be read.
    """

    def __init__(
        self,
        where: str,
        flag: str,
        what: str,
        *,
        max_bytes: int,
        spare: int = 0,
        key_file: Path | None,
        open_shared: Callable[[str], Awaitable[Shared]] | None,
    ) -> None:
        param = flag.removeprefix("--").replace("-", "_")
        if where == "nats" and open_shared is None:
            raise InvalidRequestError(
                f"{flag} nats is for inlay frontend; inlay serve keeps {what} in memory or in a "
                "directory",
                param=param,
            )
        if key_file is not None and where == "memory":
            raise InvalidRequestError(
                f"{flag}-key-file encrypts {what} outside of memory", param=param
            )
        self.max_bytes = min(max_bytes, MEMORY_BYTES) if where == "memory" else max_bytes
        self.is_open = False
        self._where, self._flag, self._what, self._spare = where, flag, what, spare
        self._key = None if key_file is None else read_key(key_file)
        self._open_shared = open_shared
        self._directory: DirectoryStorage | None = None

    async def open(self) -> tuple[Storage, Contents]:
        """Open it, once; return its records and their contents. Raises as the storage."""
        storage: Storage
        if self._where == "memory":
            storage = MemoryStorage(self.max_bytes + self._spare, f"{self._flag}-bytes")
        elif self._where == "nats" and self._open_shared is not None:
            storage = await self._open_shared(self._what)
        else:
            storage = self._directory = DirectoryStorage(Path(self._where), self._flag)
        self.is_open = True
        return storage, Contents(storage, self._key)

    def close(self) -> None:
        if self._directory is not None:
            self._directory.close()
