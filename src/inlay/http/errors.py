"""Errors as HTTP responses.

The one place where an `InlayError`, or an error of the JSON parser, becomes a status and a body.

Four errors belong to HTTP alone and never cross the transport: `BodyTimeoutError` (408),
`MethodNotAllowedError` (405), `TransferCodingError` (501) and `ClientGone`, which gets no answer.
"""

import math
import re
from collections.abc import Callable
from functools import lru_cache
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from inlay.base.errors import (
    AuthenticationError,
    EngineError,
    ErrorBody,
    InlayError,
    InvalidRequestError,
    parser_words,
    without_addresses,
)
from inlay.messages.fields import field

MAX_TEXT = 2000
"""Maximum characters of an error's message, and of its param."""

HOW_TO_SEND = (
    "send base64 of a tensor file, or name what was sent with ref or part (see docs/api.md)"
)
"""Advice in the error for embeddings that are sent in another form."""

_tensor_data = re.compile(r"(?:.*\.)?data|prompt_embeds(?:\[[^\]]*\])*")
_PART = (
    "a part is an object with type 'text' and text, with type 'token_ids' and token_ids, with type "
    "'prompt_embeds' and one of data, ref and part, or media as in a chat"
)
_part_of_prompt = re.compile(r"prompt(?:\[[^\]]*\])+(?:\.type)?")
_encoder = msgspec.json.Encoder()
_path = re.compile(r"^(?P<what>.*) - at `(?:key in )?\$\.?(?P<path>[^`]*)`$", re.DOTALL)


class ErrorResponse(msgspec.Struct, frozen=True):
    """Every error of OpenAI's API and the admin routes, as a body and as an SSE event."""

    error: Annotated[ErrorBody, field("the error.")]


class ErrorForm(NamedTuple):
    """Form of an API's errors.

    Attributes:
        type: type of the body.
        make: returns the body for an error and the request id.
        id_header: header of every answer that has the request id, beside `x-request-id`.
    """

    type: type[msgspec.Struct]
    make: Callable[[InlayError, str], msgspec.Struct]
    id_header: bytes | None = None


class BodyTimeoutError(InlayError):
    """The body arrived too slowly."""

    status = 408
    type = "timeout_error"


class TransferCodingError(InlayError):
    """The body has a transfer coding other than chunked."""

    status = 501
    type = "invalid_request_error"


class MethodNotAllowedError(InlayError):
    """The route exists, but not for this method.

    Attributes:
        allowed: methods of the route.
    """

    status: ClassVar[int] = 405
    type = "invalid_request_error"

    def __init__(self, method: str, path: str, allowed: frozenset[str]) -> None:
        super().__init__(
            f"{path} takes {', '.join(sorted(allowed))}, got {method}", code="method_not_allowed"
        )
        self.allowed = allowed


class ClientGone(Exception):
    """The client has closed the connection; there is nobody to answer."""


def shown(error: InlayError) -> ErrorBody:
    """Return an error as clients see it.

    A long message is cut, or a large quoted body would be sent back whole. No address of an object
    in the server's memory is told, whatever a library wrote into its message.
    """
    body = error.body()
    message = without_addresses(_cut(body.message))
    return msgspec.structs.replace(body, message=message, param=body.param and _cut(body.param))


OPENAI = ErrorForm(ErrorResponse, lambda error, _: ErrorResponse(shown(error)))
"""OpenAI's: `{"error": {...}}`."""


def error_json(error: InlayError, form: ErrorForm = OPENAI, request_id: str = "") -> bytes:
    """Return an error's body as JSON."""
    return _encoder.encode(form.make(error, request_id))


def _cut(text: str) -> str:
    return (
        text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2]} ... {text[-MAX_TEXT // 2 :]}"
    )


def error_headers(error: InlayError) -> list[tuple[bytes, bytes]]:
    """Return the headers of an error: `Retry-After`, `Allow`, `WWW-Authenticate`."""
    headers: list[tuple[bytes, bytes]] = []
    if error.retry_after is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after))).encode()))
    if isinstance(error, MethodNotAllowedError):
        headers.append((b"allow", ", ".join(sorted(error.allowed)).encode()))
    if isinstance(error, AuthenticationError):
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def internal_error(request_id: str) -> EngineError:
    """Return the error for a fault in the server; it names the request id that the log has."""
    return EngineError(f"Internal error; the server's log has it under request id {request_id}.")


def from_parser(
    error: Exception, request: Any = None, body: bytes | bytearray | None = None
) -> InvalidRequestError:
    """Return an error of the JSON parser as a 400, with the field as `param`.

    Args:
        error: of the parser.
        request: type of the request; its fields say which values they may have.
        body: that was parsed.
    """
    if isinstance(error, RecursionError):
        return InvalidRequestError("The body is nested too deeply.")
    text = parser_words(error, body)
    match = _path.match(text)
    if match is not None:
        path = match["path"]
        what = match["what"][:1].lower() + match["what"][1:]
        how = f": {HOW_TO_SEND}" if _tensor_data.fullmatch(path) else ""
        if _part_of_prompt.fullmatch(path):
            how = f": {_PART}"
        allowed = _allowed_at(request, path)
        if allowed:
            how = f"; allowed: {', '.join(allowed)}"
        return InvalidRequestError(f"{path or 'the body'}: {what}{how}", param=path or None)
    if isinstance(error, msgspec.ValidationError):
        missing = re.search(r"required field `([^`]+)`", text)
        return InvalidRequestError(f"Invalid request body: {text}", param=missing and missing[1])
    return InvalidRequestError(f"The body is not valid JSON: {text}")


@lru_cache
def _allowed_at(type_: Any, path: str) -> tuple[str, ...]:
    """Return the values that the field at a path may have, where its type lists them."""
    for name in path.split("."):
        structs = [one for one in _members(type_) if isinstance(one, type(msgspec.Struct))]
        hints = [get_type_hints(one) for one in structs]
        type_ = next((each[name] for each in hints if name in each), None)
    return tuple(str(value) for one in _members(type_) for value in _literals(one))


def _members(type_: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the one."""
    return get_args(type_) if get_origin(type_) in (Union, UnionType) else (type_,)


def _literals(type_: Any) -> tuple[Any, ...]:
    return get_args(type_) if get_origin(type_) is Literal else ()
