"""References that are kept: what a model's own code computed, so that others need not run it.

In the user's cache; a worker of a fleet first looks in its key-value store.
"""

import logging
import os
from pathlib import Path
from typing import Protocol

from inlay.base.user_cache import keep, user_cache

_logger = logging.getLogger(__name__)

MOST_BYTES = 8 << 20
"""Of one reference."""

_MOST_FILES = 64
"""The last so many are kept."""


class References(Protocol):
    """A place where references are kept by key. It blocks, and raises nothing."""

    def find(self, key: str) -> bytes | None:
        """Return the nearest that is kept under `key`; None if there is none."""

    def keep(self, key: str, data: bytes) -> None:
        """Keep `data` for later starts."""

    def agreed(self, key: str, own: bytes | None = None, *, replace: bool = False) -> bytes | None:
        """Return what all who share a key are held to; `own` if nothing is kept, and from then on.

        Args:
            key: of the reference.
            own: made here, if one was.
            replace: all are held to `own` from now on.
        """


class LocalReferences:
    """References in the user's cache."""

    def find(self, key: str) -> bytes | None:
        try:
            path = _path(key)
            status = path.stat()
            if status.st_size > MOST_BYTES or status.st_uid != os.getuid():
                return None
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _logger.info("the self-check of an earlier start is not used: %s", error)
            return None

    def keep(self, key: str, data: bytes) -> None:
        """As `References.keep`, if the cache can be written."""
        try:
            path = _path(key)
            keep(path, data)
            kept = sorted(path.parent.iterdir(), key=lambda file: file.stat().st_mtime)
            for old in kept[:-_MOST_FILES]:
                old.unlink(missing_ok=True)
        except OSError as error:
            _logger.info(
                "the self-check is not kept for later starts, which take longer: %s", error
            )

    def agreed(self, key: str, own: bytes | None = None, *, replace: bool = False) -> bytes | None:
        """As `References.agreed`; nobody else is held to it, so the last one counts."""
        if own is None:
            return self.find(key)
        self.keep(key, own)
        return own


_used: References = LocalReferences()


def use(references: References) -> None:
    """Have this process, which has one engine, keep its references there."""
    global _used
    _used = references


def references() -> References:
    """Return where this process keeps references; in the user's cache unless it was told."""
    return _used


def _path(key: str) -> Path:
    return user_cache("self-check") / f"{key}.msgpack"
