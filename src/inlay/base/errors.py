"""Errors that inlay raises.

    InlayError
    ├── InvalidRequestError        the request can never succeed as it is              400
    │   ├── EmbeddingsError        bytes that are not an acceptable embeddings tensor  400
    │   └── ContextLengthError     longer than the model can take                      400
    ├── AuthenticationError        no key, or a wrong one                              401
    ├── PermissionDeniedError      a key that may not do this                          403
    ├── NotFoundError              no such model, reference or adapter                 404
    ├── BodyTooLargeError          the body is over the body limit                     413
    ├── UnsupportedMediaTypeError  content type or encoding we do not read             415
    ├── RateLimitedError           the caller's own share is used up                   429
    ├── OverloadedError            the server is full, asleep, draining or its worker is gone  503
    ├── DeadlineExceededError      the request's deadline passed                       504
    └── EngineError                the engine failed; not the caller's doing           500

Each carries the fields of an OpenAI error object (`message`, `type`, `param`, `code`) and its HTTP
status, so the frontend maps errors to responses in one place and a worker can send one over the
plane unchanged.
"""

import re
from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar, Self, TypeAlias

import msgspec

Path: TypeAlias = tuple[str | int, ...]
"""Place in a request: fields by name, items of lists by index."""

_steps = re.compile(r"\[(\d+)\]|([^.\[]+)")
_object = re.compile(r"<([^<>]{1,200}?)(?: object)? at 0x[0-9a-fA-F]+>")
_openssl = re.compile(r"^\[[A-Z0-9_: ]+\] | \(_ssl\.c:\d+\)$")
_bytes = re.compile(r"(?<![^\s(\[=:])b(?='[^']*')")
_ESCAPE_BYTES = 64
"""Bytes before the end of a text in which its last escape is looked for."""
_lone = re.compile(
    rb"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})"
    rb"(?!(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?\Z).{0,5}\Z",
    re.DOTALL,
)
"""A first surrogate near the end of a text, unless the second may have been cut off."""
_short = re.compile(rb"(?<!\\)(?:\\\\)*\\u(?![0-9a-fA-F]*\Z).{1,3}\Z", re.DOTALL)


def without_addresses(text: str) -> str:
    """Return a message with the Python objects in it by their type, not by their address."""
    return _object.sub(r"<\1>", text)


def reason_of(error: BaseException) -> str:
    """Return what a library says of a client's file, without Python's words for file and bytes."""
    return _bytes.sub("", _object.sub("the file", str(error)))


def parser_words(error: Exception, text: bytes | bytearray | None = None) -> str:
    """Return what a JSON parser says of a client's text, without Python's own words.

    msgspec says of an escape that needs more characters than a whole `text` has left that the text
    is cut short.
    """
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "it has text that is not UTF-8"
    said = str(error)
    if text is not None and said == "Input data was truncated":
        start = max(0, len(text) - _ESCAPE_BYTES)
        if found := _lone.search(text, start):
            return f"its {found[1].decode()} is a surrogate without its pair"
        if _short.search(text, start):
            return "it has a \\u without four hexadecimal digits"
    return said


def why_unusable(error: Exception) -> str:
    """Return why a file of whoever runs a command cannot be read or written."""
    match error:
        case IsADirectoryError():
            return "it is a directory, and must be a file"
        case FileExistsError():
            return "it is a file, and must be a directory"
        case UnicodeDecodeError():
            return "it is not UTF-8 text"
    said = getattr(error, "strerror", None) or str(error)
    if "PEM lib" in said:
        return "they must be a certificate and its key in PEM, without a password"
    return " ".join(_openssl.sub("", said).split())


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The OpenAI error object: what clients see under `"error"`."""

    message: Annotated[
        str,
        msgspec.Meta(
            description="what is wrong, and what is allowed.",
            examples=["max_tokens must be 1 or more"],
        ),
    ]
    type: Annotated[
        str, msgspec.Meta(description="kind of the error.", examples=["invalid_request_error"])
    ]
    param: Annotated[
        str | None,
        msgspec.Meta(
            description="place in the request, as `messages[0].content`.", examples=["max_tokens"]
        ),
    ] = None
    code: Annotated[
        str | None,
        msgspec.Meta(
            description="kind of the error in more detail; may be null.",
            examples=["context_length_exceeded"],
        ),
    ] = None


class InlayError(Exception):
    """Base of all errors raised on purpose.

    Attributes:
        status: HTTP status the frontend answers with.
        type: OpenAI error type.
        code: default OpenAI error code, or None.
        param: place in the request, as `messages[0].content`; a message about it begins with it.
        retry_after: seconds a client should wait before it asks again, or None.
        reason: label of the error in metrics, or None.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None
    default_param: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param if param is not None else self.default_param
        self.code = code if code is not None else self.default_code
        self.retry_after = retry_after
        self.reason = reason

    @property
    def path(self) -> Path:
        """`param` in its steps: `tools[0].function` is `("tools", 0, "function")`."""
        steps = _steps.findall(self.param or "")
        return tuple(int(index) if index else name for index, name in steps)

    def at(self, param: str) -> Self:
        """Return the error for another place; a message that begins with the old one names it."""
        message = self.message
        if self.param and message.startswith(self.param):
            message = param + message.removeprefix(self.param)
        return self._copy(message, param)

    def located(self, param: str) -> Self:
        """Return the error of what is at `param`, which its message begins with."""
        return self._copy(f"{param}: {self.message}", param)

    def advising(self, advice: str) -> Self:
        """Return the error with a sentence behind its message."""
        return self._copy(f"{self.message}. {advice}", self.param)

    def _copy(self, message: str, param: str | None) -> Self:
        return type(self)(
            message,
            param=param,
            code=self.code,
            retry_after=self.retry_after,
            reason=self.reason,
        )

    def mapped(self, fields: Callable[[Path], Path]) -> "InlayError":
        """Return the error with its path mapped to another API's fields; itself if it is equal."""
        path = self.path
        there = fields(path)
        return self if there == path else self.at(_shown(there))

    def worded(self, words: Mapping[str, str]) -> "InlayError":
        """Return the error with these words of its message replaced; none that is in quotes."""
        if not words:
            return self
        either = "|".join(map(re.escape, words))
        quoted = r"(?<!\w)(?:'[^']*'|\"[^\"]*\"|`[^`]*`)"
        found = re.compile(rf"{quoted}|(?<![\w.])(?:{either})(?!\w)")
        message = found.sub(lambda match: words.get(match[0], match[0]), self.message)
        return self if message == self.message else self._copy(message, self.param)

    def body(self) -> ErrorBody:
        """The error as OpenAI clients expect it."""
        return ErrorBody(message=self.message, type=self.type, param=self.param, code=self.code)


def _shown(path: Path) -> str:
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return "".join(steps).removeprefix(".")


class InvalidRequestError(InlayError):
    """The request can never succeed as it is."""

    status = 400
    type = "invalid_request_error"


class EmbeddingsError(InvalidRequestError):
    """Bytes that are not an acceptable embeddings tensor; `param` defaults to `prompt_embeds`."""

    default_param = "prompt_embeds"


class ContextLengthError(InvalidRequestError):
    """The prompt, or prompt and output together, are longer than the model can take."""

    default_code = "context_length_exceeded"


class AuthenticationError(InlayError):
    """No API key, or a wrong one."""

    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class PermissionDeniedError(InlayError):
    """A valid key that may not do this."""

    status = 403
    type = "permission_error"


class NotFoundError(InlayError):
    """No such model, reference, adapter or route."""

    status = 404
    type = "invalid_request_error"
    default_code = "not_found"


LEASE_LOST = "lease_lost"
"""Code of the `NotFoundError` of a payload that its worker does not keep, or that is not reached.

Only between workers and routers: no client sees it.
"""


KV_LOST = "kv_lost"
"""Reason of the `OverloadedError` of a decode worker that got no keys and values of its prompt."""


LOST = "lost"
"""Reason of the `OverloadedError` of a request that a worker had: it may be what ended it."""


OUT_OF_MEMORY = "out_of_memory"
"""Reason of the `EngineError` of a request that a worker has no memory for; another may have."""


class BodyTooLargeError(InlayError):
    """The request body is over the body limit."""

    status = 413
    type = "invalid_request_error"


class UnsupportedMediaTypeError(InlayError):
    """A content type or content encoding inlay does not read."""

    status = 415
    type = "invalid_request_error"


class RateLimitedError(InlayError):
    """The caller's own share or rate is used up."""

    status = 429
    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"


class EngineError(InlayError):
    """The engine failed; not the caller's doing."""

    status = 500
    type = "server_error"


class OverloadedError(InlayError):
    """The server is full, asleep or draining, or its worker is gone.

    The same request may work later.
    """

    status = 503
    type = "overloaded_error"


class NoRoomError(OverloadedError):
    """No room for what is to be kept: less has to be there first."""


class DeadlineExceededError(InlayError):
    """The request's deadline passed."""

    status = 504
    type = "timeout_error"


_KINDS = [
    kind for kind in vars().values() if isinstance(kind, type) and issubclass(kind, InlayError)
]
_BY_NAME = {kind.__name__: kind for kind in _KINDS}

BY_STATUS = {kind.status: kind for kind in _KINDS if kind.__base__ is InlayError}
"""The general error of each HTTP status."""


class ErrorFrame(msgspec.Struct, frozen=True, array_like=True):
    """An `InlayError` as it crosses the plane."""

    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None
    reason: str | None = None

    @classmethod
    def of(cls, error: InlayError) -> "ErrorFrame":
        """The wire form of `error`."""
        return cls(
            type(error).__name__,
            error.message,
            error.param,
            error.code,
            error.retry_after,
            error.reason,
        )

    def to_error(self) -> InlayError:
        """The error again; a kind this side does not know becomes an `EngineError`."""
        cls = _BY_NAME.get(self.kind, EngineError)
        return cls(
            self.message,
            param=self.param,
            code=self.code,
            retry_after=self.retry_after,
            reason=self.reason,
        )
