"""Files that commands read and write."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from inlay.base.errors import why_unusable
from inlay.cli.command import FileError, UsageError
from inlay.client.prompts import Array
from inlay_tools.settings import ConvertSettings, EncodeSettings

MAX_SENT_BYTES = 1 << 30
"""Bytes of a file that is read to be sent; a server's own limits are lower."""


@contextmanager
def opening(name: str) -> Iterator[None]:
    """Within it, a file that cannot be used is a `FileError` that calls it `name`."""
    try:
        yield
    except OSError as error:
        raise FileError(f"{name}: {why_unusable(error)}") from error


def read(path: Path, name: str | None = None) -> bytes:
    """All of a file, or of standard input where `path` is -.

    Raises:
        FileError: it cannot be read.
    """
    if str(path) == "-":
        return sys.stdin.buffer.read()
    with opening(name or str(path)):
        return path.read_bytes()


def read_to_send(path: Path) -> bytes:
    """All of a file, or of standard input where `path` is -, for a server.

    Raises:
        FileError: it cannot be read, is empty, or is too large for any server.
    """
    if str(path) != "-":
        with opening(str(path)):
            size = path.stat().st_size
        if size > MAX_SENT_BYTES:
            raise FileError(f"{path}: {size} bytes; up to {MAX_SENT_BYTES} can be sent")
    data = read(path)
    if not data:
        raise FileError(f"{named(path)}: it is empty")
    return data


def named(path: Path) -> str:
    """Name of the file in errors; standard input where `path` is -."""
    return "standard input" if str(path) == "-" else str(path)


def standard_input() -> str:
    """All of standard input. Raises `UsageError` where it is not UTF-8 text."""
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not UTF-8 text: {error.reason}") from error


def write_bytes(data: bytes, output: Path | None, flag: str = "--output") -> None:
    """Write a result to the file that `flag` names, or to standard output.

    Raises:
        FileError: the file cannot be written.
    """
    if output is None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    with opening(f"{flag} {output}"):
        output.write_bytes(data)


def check_destination(settings: ConvertSettings | EncodeSettings) -> None:
    """Raise `UsageError` where bytes would go to a terminal, or two things to standard output."""
    if settings.output is not None:
        return
    if settings.output_format == "json":
        raise UsageError("--output-format json needs --output FILE: the embeddings go there")
    if not settings.base64 and sys.stdout.isatty():
        raise UsageError("bytes are not for a terminal: give --output FILE or --base64")


def as_json(file: Path, format: str, rows: Array, size: int, **more: Any) -> str:
    """A line of JSON about a file of embeddings that was written."""
    facts = {"file": str(file), "format": format, "dtype": str(rows.dtype)}
    said = facts | {"shape": list(rows.shape), "bytes": size} | more
    return msgspec.json.encode(said).decode() + "\n"
