"""Storage in a directory, which may be that of several processes of one machine."""

import errno
import fcntl
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

from inlay.base.errors import InvalidRequestError, NoRoomError, why_unusable
from inlay.store.prompts import Threads

_revision = struct.Struct("<Q")
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})

T = TypeVar("T")


class DirectoryStorage:
    """`Storage` of files, each written beside its place and then renamed, with mode 0600.

    One lock file orders the changes of records; contents need none, as each is written once.

    Args:
        root: made with mode 0700 where it is missing.
        flag: names it, for errors.

    Raises:
        InvalidRequestError: it cannot be made or written, or others may read it.
    """

    def __init__(self, root: Path, flag: str) -> None:
        self._flag = flag
        self._records, self._contents = root / "records", root / "contents"
        try:
            for folder in (root, self._records, self._contents):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = root / "lock"
            self._lock.touch(mode=0o600)
        except OSError as error:
            raise InvalidRequestError(
                f"{flag} {root} cannot be used: {why_unusable(error)}"
            ) from error
        if root.stat().st_mode & 0o077:
            raise InvalidRequestError(
                f"{flag} {root} may be read by others: chmod 700 keeps it to its owner"
            )
        self._threads = Threads()

    def close(self) -> None:
        """End its threads."""
        self._threads.close()

    async def find(self, key: str) -> tuple[int, bytes | None]:
        return await self._done(lambda: _read_record(self._records / key))

    async def swap(self, key: str, record: bytes, revision: int) -> bool:
        def swap() -> bool:
            path = self._records / key
            with self._alone():
                found, _ = _read_record(path)
                if found != revision:
                    return False
                # One that was dropped and made again has another revision.
                new = max(found + 1, time.time_ns())
                _write(path, lambda file: file.write(_revision.pack(new) + record))
            return True

        return await self._done(swap)

    async def drop(self, key: str, revision: int) -> bool:
        def drop() -> bool:
            path = self._records / key
            with self._alone():
                found, _ = _read_record(path)
                if not found or found != revision:
                    return False
                path.unlink()
            return True

        return await self._done(drop)

    async def list(self, under: str = "*") -> "list[tuple[str, int, bytes]]":
        def list_() -> "list[tuple[str, int, bytes]]":
            found = []
            for path in self._records.glob(f"{under}.*"):
                revision, record = _read_record(path)
                if record is not None and not path.name.startswith("~"):
                    found.append((path.name, revision, record))
            return found

        return await self._done(list_)

    async def write(self, name: str, file: BinaryIO) -> int:
        def write() -> int:
            _write(self._contents / name, lambda out: shutil.copyfileobj(file, out))
            return file.tell()

        return await self._done(write)

    async def read(self, name: str, size: int, file: BinaryIO) -> bool:
        def read() -> bool:
            try:
                with (self._contents / name).open("rb") as found:
                    if os.fstat(found.fileno()).st_size != size:
                        return False
                    shutil.copyfileobj(found, file)
            except FileNotFoundError:
                return False
            return True

        return await self._done(read)

    async def erase(self, name: str) -> None:
        await self._done(lambda: (self._contents / name).unlink(missing_ok=True))

    async def contents(self) -> set[str]:
        """As `Storage.contents`; what a process that died left unfinished is among them."""
        return await self._done(lambda: {path.name for path in self._contents.iterdir()})

    async def size(self) -> tuple[int, int]:
        def size() -> tuple[int, int]:
            with os.scandir(self._contents) as found:
                total = sum(entry.stat().st_size for entry in found)
            return total, sum(1 for _ in self._records.iterdir())

        return await self._done(size)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        # A description of its own: the lock of one is not that of another thread.
        lock = os.open(self._lock, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    async def _done(self, act: Callable[[], T]) -> T:
        try:
            return await self._threads.run(act)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise NoRoomError(
                f"the disk of {self._flag} has no room left", retry_after=60
            ) from error


def _read_record(path: Path) -> tuple[int, bytes | None]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0, None
    return _revision.unpack_from(data)[0], data[_revision.size :]


def _write(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    beside = path.with_name(f"~{path.name}~{os.urandom(4).hex()}")
    try:
        with open(beside, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
