"""Files that are read again when they change: keys, certificates, adapters."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from inlay.base.errors import InlayError

_log = logging.getLogger(__name__)

POLL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Stamp:
    """File metadata that changes when the file changes."""

    device: int
    inode: int
    size: int
    modified: int
    changed: int

    @classmethod
    def of(cls, path: Path) -> "Stamp | None":
        """Return the stamp of a file, or None if it cannot be read."""
        try:
            found = path.stat()
        except OSError:
            return None
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class WatchedFiles:
    """Files that belong together, and what reads them.

    Args:
        name: of what they hold, for the log and the metric; a plural.
        paths: of the files; without any, nothing is ever read again.
        read: reads them all and puts them into use; what it raises leaves the old ones in use. It
            runs in a thread.

    Attributes:
        failures: readings that failed.
        failing: True if the last one did.
    """

    def __init__(self, name: str, paths: Sequence[Path], read: Callable[[], object]) -> None:
        self.name = name
        self.paths = tuple(paths)
        self.failures = 0
        self.failing = False
        self._read = read
        self._stamps = self._seen()

    def _seen(self) -> tuple[Stamp | None, ...]:
        return tuple(map(Stamp.of, self.paths))

    async def reload(self) -> None:
        """Read the files again; if they cannot be used, the log says why."""
        if not self.paths:
            return
        # Taken before reading: a change meanwhile is then seen at the next look.
        self._stamps = self._seen()
        try:
            await asyncio.to_thread(self._read)
        except (InlayError, OSError) as error:
            self.failures += 1
            self.failing = True
            _log.error("the %s were not reloaded, the old ones stay: %s", self.name, error)
        else:
            self.failing = False

    async def watch(self, every: float = POLL_SECONDS) -> None:
        """Reload the files whenever one has changed, until cancelled."""
        while self.paths:
            await asyncio.sleep(every)
            if self._seen() != self._stamps:
                await self.reload()
