"""Sources of the kernels, how they are compiled, and what this CPU can run."""

import os
import platform
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent

FLAGS: tuple[str, ...] = (
    "-O3", "-std=c++17", "-Wno-psabi", "-fopenmp", "-shared", "-fPIC",
    # Sums may be reordered for vectorisation; NaN and infinity keep their meaning.
    "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math",
    "-freciprocal-math",
)  # fmt: skip

if platform.machine() in ("x86_64", "AMD64"):
    FLAGS = (*FLAGS, "-mprefer-vector-width=512")

COMPILE_SECONDS = 120.0


def instructions() -> str:
    """This CPU's line of /proc/cpuinfo that names its instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line for line in lines if line.startswith(("flags", "Features"))), platform.processor()
    )


def cpu_features() -> frozenset[str]:
    """This CPU's instruction sets, by the names of /proc/cpuinfo."""
    return frozenset(instructions().partition(":")[2].split())


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
            [compiler, *machine, *FLAGS, str(source), "-o", name],
            capture_output=True, text=True, check=True, timeout=COMPILE_SECONDS,
            env={**os.environ, "TMPDIR": str(path.parent)},
        )  # fmt: skip
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)
