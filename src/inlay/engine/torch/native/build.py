"""Compile kernels once for this CPU, and keep the library in the user's cache directory.

A C interface and `ctypes`, not a torch extension: it compiles in two seconds where torch's headers
alone take half a minute, and a call costs two microseconds where the dispatcher costs five.
OpenMP's library is the one torch has loaded, so both share one thread pool.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from inlay.base.user_cache import user_cache
from inlay.engine.torch.native import sources
from inlay.engine.torch.native.sources import SOURCES, compile_for, cpu_features

_logger = logging.getLogger(__name__)

_NATIVE = ("-march=native",)


def load(name: str) -> ctypes.CDLL | None:
    """Return the compiled kernels of `name`.cpp; None, with a log line, if there are none.

    `CXX` names the compiler; without it `g++`, `clang++` and `c++` are tried.
    """
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)
    if compiler is None:
        return _load_prebuilt(name)
    source = SOURCES / f"{name}.cpp"
    try:
        try:
            path = _directory() / f"{name}-{_identity(compiler, source)}.so"
            if not path.is_file():
                _logger.info("compiling %s for this processor, once: some seconds", source.name)
                compile_for(compiler, source, path, _NATIVE)
            return ctypes.CDLL(str(path))
        except OSError as error:
            return _load_for_now(compiler, source, str(error))
    except (OSError, subprocess.SubprocessError) as error:
        detail = error.stderr[-2000:] if isinstance(error, subprocess.CalledProcessError) else ""
        _logger.warning("native kernels are not used: %s %s", error, detail)
        return None


def _load_for_now(compiler: str, source: Path, because: str) -> ctypes.CDLL:
    """Return kernels of a library that is gone once it is loaded.

    Raises:
        OSError: there is no directory for it at all.
        subprocess.SubprocessError: as `compile_for`.
    """
    from inlay.engine.torch.native.prebuilt import find  # which is also run as a program

    prebuilt = find(source.stem, cpu_features())
    if prebuilt is not None:
        return ctypes.CDLL(str(prebuilt))
    _say_each_start(because)
    with tempfile.TemporaryDirectory(prefix="inlay-kernels-") as made:
        path = Path(made) / f"{source.stem}.so"
        compile_for(compiler, source, path, _NATIVE)
        return ctypes.CDLL(str(path))


@cache
def _say_each_start(because: str) -> None:
    """Say it once a process, however many libraries there are."""
    _logger.warning(
        "kernels are compiled at each start, which takes a while, as they cannot be kept (%s): "
        "set XDG_CACHE_HOME to a directory that this user owns and can write",
        because,
    )


def _load_prebuilt(name: str) -> ctypes.CDLL | None:
    from inlay.engine.torch.native.prebuilt import find  # which is also run as a program

    path = find(name, cpu_features())
    if path is None:
        _logger.info(
            "there is no C++ compiler: what %s would do, torch's own operators do slower", name
        )
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        _logger.warning("native kernels are not used: %s", error)
        return None


def _directory() -> Path:
    """Return the cache directory, owned by this user: its files are loaded as code.

    Raises:
        OSError: it cannot be created, or others may write to it.
    """
    directory = user_cache("kernels")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{directory} belongs to, or may be written by, someone else")
    return directory


def _identity(compiler: str, source: Path) -> str:
    """Identify the library: source, flags, compiler and the CPU's instruction sets."""
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, check=True, timeout=sources.COMPILE_SECONDS
    )
    digest = hashlib.sha256()
    for path in (source, *sorted(SOURCES.glob("*.h"))):
        digest.update(path.read_bytes())
    for part in (
        " ".join((*_NATIVE, *sources.FLAGS)),
        version.stdout.decode(errors="replace"),
        platform.machine(),
        sources.instructions(),
    ):
        digest.update(b"\0" + part.encode())
    return digest.hexdigest()[:24]
