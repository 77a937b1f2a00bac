"""The user's cache: files that are made again where they are lost."""

import os
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
