"""Files of request bodies: one JSON object a line."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from inlay.cli.bench.workload import MAX_PREPARED_BYTES, Body
from inlay.cli.command import FileError
from inlay.cli.files import read


class _Known(msgspec.Struct):
    model: str | msgspec.UnsetType = msgspec.UNSET
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt_embeds: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def read_bodies(path: Path) -> Sequence[bytes]:
    """The lines of a file.

    Raises:
        FileError: it cannot be read, is empty, too large, or a line is no body of a request.
    """
    if str(path) != "-" and path.is_file() and path.stat().st_size > MAX_PREPARED_BYTES:
        raise FileError(
            f"{path}: {path.stat().st_size} bytes; up to {MAX_PREPARED_BYTES} are held ready"
        )
    lines = [line for line in read(path).splitlines() if line.strip()]
    if not lines:
        raise FileError(f"{path}: holds no requests")
    for number, line in enumerate(lines, 1):
        try:
            known = msgspec.json.decode(line, type=_Known)
        except msgspec.MsgspecError as error:
            raise FileError(f"{path}, line {number}: no body of a request: {error}") from error
        if known.messages is msgspec.UNSET and known.prompt is known.prompt_embeds:
            raise FileError(
                f"{path}, line {number}: has neither messages, prompt nor prompt_embeds"
            )
    return lines


def prepared(line: bytes, model: str, *, always: bool) -> Body:
    """A line as it is sent: as a stream with usage.

    Args:
        line: a body.
        model: asked for where the body names none.
        always: ask for it in any case.
    """
    fields: dict[str, msgspec.Raw | object] = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    if always or "model" not in fields:
        fields["model"] = model
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    path = "/chat/completions" if "messages" in fields else "/completions"
    return Body(path, msgspec.json.encode(fields))
