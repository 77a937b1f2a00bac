"""Stores that are opened, closed and opened again on one directory."""

from pathlib import Path

import pytest

from inlay.messages.digest import Secret
from inlay.store import PromptStore
from inlay.store.entry import cost
from tests.store.making import HIDDEN, TTL, Clock

SECRET = Secret(bytes(range(32)))
KEY = bytes(range(32, 64))
ONE = cost(16 * HIDDEN * 4)
MANY = 64 * ONE
SEALED_OR_NOT = pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])


class Opened:
    """Stores on one directory, one after the other."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self.directory = directory
        self.clock = clock
        self.last: PromptStore | None = None

    def __call__(
        self,
        *,
        memory: int = MANY,
        disk: int = MANY,
        secret: Secret = SECRET,
        key: bytes | None = None,
        max_entries: int = 100,
    ) -> PromptStore:
        if self.last is not None:
            self.last.close()
        self.last = None
        self.last = PromptStore(
            secret,
            memory_bytes=memory,
            disk_bytes=disk,
            directory=self.directory,
            ttl=TTL,
            max_entries=max_entries,
            encryption_key=key,
            clock=self.clock,
        )
        return self.last


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.prompt"))


def on_disk(directory: Path) -> int:
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in files(directory))
