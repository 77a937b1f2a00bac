"""Files of embeddings that commands write: where bytes may go, and JSON of what was written."""

import sys
from pathlib import Path
from typing import Any, Protocol

import msgspec

from inlay.cli.command import UsageError
from inlay.client.prompts import Array


class Destination(Protocol):
    """Settings that say where embeddings go and how that is told."""

    @property
    def output(self) -> Path | None:
        """File; None: standard output."""

    @property
    def base64(self) -> bool:
        """True for base64 text, False for bytes."""

    @property
    def output_format(self) -> str:
        """Told as text or json."""


def check_destination(settings: Destination) -> None:
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
