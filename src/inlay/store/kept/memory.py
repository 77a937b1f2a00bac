"""Storage in this process's memory."""

from itertools import count
from typing import BinaryIO

from inlay.base.errors import NoRoomError


class MemoryStorage:
    """`Storage` that ends with the process.

    Args:
        max_bytes: of contents and records.
        flag: sets it, for errors.
    """

    def __init__(self, max_bytes: int, flag: str = "--batch-store-bytes") -> None:
        self._flag = flag
        self._max = max_bytes
        self._records: dict[str, tuple[int, bytes]] = {}
        self._contents: dict[str, bytes] = {}
        self._bytes = 0
        self._revisions = count(1)

    async def find(self, key: str) -> tuple[int, bytes | None]:
        return self._records.get(key, (0, None))

    async def swap(self, key: str, record: bytes, revision: int) -> bool:
        found, before = self._records.get(key, (0, b""))
        if found != revision:
            return False
        self._take(len(record) - len(before))
        self._records[key] = next(self._revisions), record
        return True

    async def drop(self, key: str, revision: int) -> bool:
        found, before = self._records.get(key, (0, b""))
        if not found or found != revision:
            return False
        self._bytes -= len(before)
        del self._records[key]
        return True

    async def list(self, under: str = "*") -> "list[tuple[str, int, bytes]]":
        return [
            (key, revision, record)
            for key, (revision, record) in self._records.items()
            if under in ("*", key.partition(".")[0])
        ]

    async def write(self, name: str, file: BinaryIO) -> int:
        data = file.read()
        self._take(len(data))
        self._contents[name] = data
        return len(data)

    def _take(self, num_bytes: int) -> None:
        if num_bytes > 0 and self._bytes + num_bytes > self._max:
            raise NoRoomError(
                f"it holds {self._bytes} bytes; {num_bytes} more would pass the limit of "
                f"{self._max} ({self._flag})",
                retry_after=60,
            )
        self._bytes += num_bytes

    async def read(self, name: str, size: int, file: BinaryIO) -> bool:
        data = self._contents.get(name)
        if data is None or len(data) != size:
            return False
        file.write(data)
        return True

    async def erase(self, name: str) -> None:
        self._bytes -= len(self._contents.pop(name, b""))

    async def contents(self) -> set[str]:
        return set(self._contents)

    async def size(self) -> tuple[int, int]:
        return self._bytes, len(self._records)
