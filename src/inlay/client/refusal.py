"""A server's error answer as the error of inlay that it stands for."""

import msgspec

from inlay.errors import BY_STATUS, EngineError, InlayError


class _Said(msgspec.Struct):
    """OpenAI's error object; other servers write numbers as codes."""

    message: str
    param: str | None = None
    code: str | int | None = None


class _Answer(msgspec.Struct):
    error: _Said


def refusal(status: int, body: bytes, retry_after: str | None = None) -> InlayError:
    """The error that an answer stands for.

    Args:
        status: HTTP status, 400 or more.
        body: OpenAI's error object, or anything else, of which the beginning is quoted.
        retry_after: the header's value, if there is one.
    """
    kind = BY_STATUS.get(status, EngineError)
    try:
        said = msgspec.json.decode(body, type=_Answer).error
    except msgspec.MsgspecError:
        return kind(f"the server answered {status}: {body[:200]!r}")
    waits = retry_after is not None and retry_after.isascii() and retry_after.isdigit()
    seconds = float(retry_after) if waits and retry_after is not None else None
    code = said.code if isinstance(said.code, str) else None
    return kind(said.message, param=said.param, code=code, retry_after=seconds)
