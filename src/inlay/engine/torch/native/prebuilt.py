"""Kernels compiled beforehand, for images without a compiler.

    python -m inlay.engine.torch.native.prebuilt [LEVEL ...]

compiles them for each level of x86-64 that they make use of into a directory of this environment
(`LIBRARIES`). Where there is no compiler, the highest level that this CPU has is loaded.
"""

import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from inlay.engine.torch.native.sources import SOURCES, compile_for, cpu_features

_logger = logging.getLogger(__name__)

LIBRARIES = Path(sys.prefix) / "lib" / "inlay-kernels"

_V3 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm"])
_V4 = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
_V4_BF16 = _V4 | {"avx512_bf16", "avx512_vnni"}

_AMX = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")
_BF16 = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")

LEVELS: Mapping[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "v4-amx": ((*_BF16, *_AMX), _V4_BF16 | {"amx_tile", "amx_bf16", "amx_int8"}),
    "v4-bf16": (_BF16, _V4_BF16),
    "v4": (("-march=x86-64-v4",), _V4),
    "v3": (("-march=x86-64-v3",), _V3),
}
"""Name to the compiler's flags and the features of /proc/cpuinfo they need; highest first."""


def find(name: str, features: frozenset[str], directory: Path = LIBRARIES) -> Path | None:
    """The library of `name`.cpp of the highest level within `features`; None if there is none."""
    paths = (
        directory / f"{name}-{level}.so"
        for level, (_, needed) in LEVELS.items()
        if needed <= features
    )
    return next((path for path in paths if path.is_file()), None)


def build(levels: list[str], directory: Path = LIBRARIES) -> list[Path]:
    """Compile all sources for `levels`; return the libraries.

    Raises:
        RuntimeError: there is no compiler, or this is no x86-64.
        subprocess.SubprocessError: it refused a source.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None or platform.machine() not in ("x86_64", "AMD64"):
        raise RuntimeError("kernels are compiled beforehand with g++ on x86-64 alone")
    directory.mkdir(parents=True, exist_ok=True)

    def compiled(source: Path, level: str) -> Path:
        path = directory / f"{source.stem}-{level}.so"
        compile_for(compiler, source, path, LEVELS[level][0])
        # Another user runs it.
        path.chmod(0o755)
        return path

    # A container may have fewer cores than the host, and each takes up to 1 GB.
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as compilers:
        made = [
            compilers.submit(compiled, source, level)
            for source in sorted(SOURCES.glob("*.cpp"))
            for level in levels
        ]
    return [each.result() for each in made]


def main() -> None:
    """Compile the levels that are named, or all."""
    words = sys.argv[1:] or list(LEVELS)
    levels = [highest() if word == "native" else word for word in words]
    for path in build(levels):
        _logger.warning("made %s", path)


def highest() -> str:
    """The highest level that this CPU has.

    Raises:
        RuntimeError: it has none of them.
    """
    features = cpu_features()
    for level, (_, needed) in LEVELS.items():
        if needed <= features:
            return level
    raise RuntimeError("this CPU has none of the levels")


if __name__ == "__main__":
    try:
        main()
    except subprocess.SubprocessError as error:
        # Of a compiler that took too long it is bytes, or nothing.
        said = getattr(error, "stderr", None) or ""
        sys.exit(f"{error}\n{said if isinstance(said, str) else said.decode(errors='replace')}")
