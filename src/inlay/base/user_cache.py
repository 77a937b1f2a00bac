"""The user's cache: files that are made again where they are lost."""

import os
import tempfile
from pathlib import Path


def user_cache(name: str) -> Path:
    """Return a directory of inlay in it, which may not be there.

    Raises:
        OSError: the user has no home directory, as in containers.
    """
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise OSError(str(error)) from error
    return Path(cache) / "inlay" / name


def keep(path: Path, data: bytes) -> None:
    """Write a file of the cache; others see all of it or none.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)
