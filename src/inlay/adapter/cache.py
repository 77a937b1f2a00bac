"""Adapters that were fetched, kept on disk by what they are.

Whole or not at all, and within a number of bytes.
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


class Lease(NamedTuple):
    """A directory that stays where it is until the lease is closed.

    Attributes:
        directory: of an adapter.
        lock: open file that holds it, or -1 where nothing does.
    """

    directory: Path
    lock: int = -1

    def close(self) -> None:
        """Let go of it."""
        if self.lock >= 0:
            os.close(self.lock)


class AdapterCache:
    """Directories named by their content, below one that several processes may share.

    Args:
        directory: made if need be; None for one of its own, which goes with `close`.
        max_bytes: of all entries nobody holds a lease of; the least recently used go first.
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
        """A new directory to fetch into; what is left of it afterwards goes."""
        path = Path(tempfile.mkdtemp(prefix=_INCOMING, dir=self._root))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def find(self, name: str) -> Lease | None:
        """A lease of the entry `name`, or None."""
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
        if not kept:  # it went before it could be held
            os.close(lock)
            return None
        os.utime(path)
        return Lease(path, lock)

    def add(self, incoming: Path, name: str) -> Lease:
        """Make an entry of what was fetched; a lease of it, or of the same that came first."""
        (incoming / _LOCK).touch()
        with suppress(OSError):
            # Fails where there is one already: a directory is not renamed onto one with files.
            incoming.rename(self._root / name)
        lease = self.find(name)
        if lease is None:
            raise OSError(f"{self._root / name} could not be made")
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
        """Whether the entry went; it stays while anybody holds a lease."""
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
        """Remove a directory of its own."""
        if self._own and self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)


__all__ = ["AdapterCache", "Lease"]
