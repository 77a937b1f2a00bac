"""Content-addressed disk cache of fetched adapters.

Entries are complete or absent, and the total size is bounded.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_INCOMING, _LEAVING, _LOCK = "incoming-", "leaving-", "lock"
_STALE = 24 * 3600.0


class AdapterLease(NamedTuple):
    """A directory that is not evicted until the lease is closed.

    Attributes:
        directory: directory of the adapter.
        lock: open file that holds the lock, or -1 for none.
    """

    directory: Path
    lock: int = -1

    def close(self) -> None:
        """Release the lease."""
        if self.lock >= 0:
            os.close(self.lock)


class AdapterCache:
    """Directories named by their content, in a parent that several processes may share.

    Args:
        directory: created if missing; None for a temporary one, removed by `close`.
        max_bytes: total size of entries without a lease; the least recently used are evicted.
    """

    def __init__(self, directory: Path | None, max_bytes: int) -> None:
        self._own = directory is None
        self._path = directory
        self._max_bytes = max_bytes

    @property
    def _root(self) -> Path:
        if self._path is None:
            self._path = Path(tempfile.mkdtemp(prefix="inlay-adapters-"))
        self._path.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self._path

    @contextmanager
    def incoming(self) -> Iterator[Path]:
        """Yield a new directory to fetch into; remove it afterwards if it was not added."""
        path = Path(tempfile.mkdtemp(prefix=_INCOMING, dir=self._root))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def find(self, name: str) -> AdapterLease | None:
        """Lease the entry `name`; None if it does not exist."""
        path = self._root / name
        try:
            lock = os.open(path / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        fcntl.flock(lock, fcntl.LOCK_SH)
        try:
            kept = (path / _LOCK).stat().st_ino == os.fstat(lock).st_ino
        except FileNotFoundError:
            kept = False
        if not kept:  # evicted before the lock was taken
            os.close(lock)
            return None
        os.utime(path)
        return AdapterLease(path, lock)

    def add(self, incoming: Path, name: str) -> AdapterLease:
        """Add a fetched directory as an entry; return a lease of it, or of an equal earlier one."""
        (incoming / _LOCK).touch()
        with suppress(OSError):
            # Fails if the entry exists: rename does not replace a non-empty directory.
            incoming.rename(self._root / name)
        lease = self.find(name)
        if lease is None:
            raise OSError(f"{self._root / name} could not be created")
        self._evict()
        return lease

    def _evict(self) -> None:
        entries: list[tuple[float, int, Path]] = []
        for path in self._root.iterdir():
            with suppress(OSError):
                modified = path.stat().st_mtime
                if path.name.startswith((_INCOMING, _LEAVING)):
                    if time.time() - modified > _STALE:
                        shutil.rmtree(path, ignore_errors=True)
                    continue
                entries.append(
                    (modified, sum(file.stat().st_size for file in path.iterdir()), path)
                )
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self._max_bytes:
                return
            if self._remove(path):
                total -= size

    def _remove(self, path: Path) -> bool:
        """Remove an entry without leases. Returns True if it was removed."""
        try:
            lock = os.open(path / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leaving = path.with_name(f"{_LEAVING}{path.name}-{os.getpid()}-{time.monotonic_ns()}")
            path.rename(leaving)
        except OSError:
            return False
        else:
            shutil.rmtree(leaving, ignore_errors=True)
            return True
        finally:
            os.close(lock)

    def close(self) -> None:
        """Remove the directory if it is temporary."""
        if self._own and self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
