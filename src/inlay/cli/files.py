"""Files that commands read and write."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from inlay.cli.command import FileError, UsageError


@contextmanager
def opening(name: str) -> Iterator[None]:
    """Within it, a file that cannot be used is a `FileError` that calls it `name`."""
    try:
        yield
    except OSError as error:
        raise FileError(f"{name}: {error.strerror}") from error


def read(path: Path, name: str | None = None) -> bytes:
    """All of a file, or of standard input where `path` is -.

    Args:
        path: the file.
        name: what an error calls it; the path unless given.

    Raises:
        FileError: it cannot be read.
    """
    if str(path) == "-":
        return sys.stdin.buffer.read()
    with opening(name or str(path)):
        return path.read_bytes()


def named(path: Path) -> str:
    """Name of the file in errors; standard input where `path` is -."""
    return "standard input" if str(path) == "-" else str(path)


def standard_input() -> str:
    """All of standard input. Raises `UsageError` where it is not UTF-8 text."""
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not UTF-8 text: {error.reason}") from error


def write_bytes(data: bytes, output: Path | None) -> None:
    """Write a result to the file of `--output`, or to standard output.

    Raises:
        FileError: the file cannot be written.
    """
    if output is None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    with opening(f"--output {output}"):
        output.write_bytes(data)
