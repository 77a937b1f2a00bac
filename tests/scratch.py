"""Directories for what tests make once a process."""

import atexit
import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_LOCK = ".lock"


def scratch(kind: str) -> Path:
    """A new directory that goes when this process ends or, where it is killed, when another one asks for a directory."""
    for old in Path(tempfile.gettempdir()).glob("inlay-scratch-*"):
        _remove_if_left(old)
    directory = Path(tempfile.mkdtemp(prefix=f"inlay-scratch-{kind}-"))
    # Held as long as this process lives, and not to be found before it is held.
    lock = os.open(directory / "lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (directory / "lock").rename(directory / _LOCK)
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def _remove_if_left(directory: Path) -> None:
    with suppress(OSError):  # it is in use, or somebody else removes it
        lock = os.open(directory / _LOCK, os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory)
        finally:
            os.close(lock)
