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

_logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent

_NATIVE = ("-march=native",)
_FLAGS: tuple[str, ...] = (
    "-O3", "-std=c++17", "-Wno-psabi", "-fopenmp", "-shared", "-fPIC",
    # Sums may be reordered for vectorisation; NaN and infinity keep their meaning.
    "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math",
    "-freciprocal-math",
)  # fmt: skip

if platform.machine() in ("x86_64", "AMD64"):
    _FLAGS = (*_FLAGS, "-mprefer-vector-width=512")

_COMPILE_SECONDS = 120.0


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
        # RuntimeError: a user without a home directory, as in containers.
        except (OSError, RuntimeError) as error:
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
    from inlay.engine.torch.native.prebuilt import find

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
    from inlay.engine.torch.native.prebuilt import find

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
    directory = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inlay" / "kernels"
    )
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{directory} belongs to, or may be written by, someone else")
    return directory


def _identity(compiler: str, source: Path) -> str:
    """Identify the library: source, flags, compiler and the CPU's instruction sets."""
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, check=True, timeout=_COMPILE_SECONDS
    )
    digest = hashlib.sha256()
    for path in (source, *sorted(SOURCES.glob("*.h"))):
        digest.update(path.read_bytes())
    for part in (
        " ".join((*_NATIVE, *_FLAGS)),
        version.stdout.decode(errors="replace"),
        platform.machine(),
        _instructions(),
    ):
        digest.update(b"\0" + part.encode())
    return digest.hexdigest()[:24]


def _instructions() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line for line in lines if line.startswith(("flags", "Features"))), platform.processor()
    )


def cpu_features() -> frozenset[str]:
    """This CPU's instruction sets, by the names of /proc/cpuinfo."""
    return frozenset(_instructions().partition(":")[2].split())


def compile_for(compiler: str, source: Path, path: Path, machine: tuple[str, ...]) -> None:
    """Compile for the machine that the flags `machine` name.

    The file is made beside `path` and renamed: other processes never see a partial one.

    Raises:
        subprocess.SubprocessError: the compiler refused the source, or took too long.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    try:
        subprocess.run(
            [compiler, *machine, *_FLAGS, str(source), "-o", name],
            capture_output=True, text=True, check=True, timeout=_COMPILE_SECONDS,
            env={**os.environ, "TMPDIR": str(path.parent)},
        )  # fmt: skip
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)
