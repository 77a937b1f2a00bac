"""Types of ASGI, and what the headers of a request say about its body."""

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, NamedTuple, TypeAlias

from inlay.errors import UnsupportedMediaTypeError
from inlay.http.errors import TransferCodingError

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Headers: TypeAlias = Iterable[tuple[bytes, bytes]]


def header(headers: Headers, name: bytes) -> bytes | None:
    """Return the value of the first header `name` (lower case), or None."""
    for key, value in headers:
        if key == name:
            return value
    return None


class ContentType(NamedTuple):
    """Media type of a body.

    Attributes:
        kind: lower case, without parameters; "application/json" if the header is absent.
        parameters: by name in lower case.
    """

    kind: str
    parameters: dict[str, str]


JSON = "application/json"
OCTETS = "application/octet-stream"
IMAGES = "image/"
"""Beginning of the media types of images."""


def content_type_of(headers: Headers) -> ContentType:
    """Return the media type of a body.

    Raises:
        UnsupportedMediaTypeError: the body is compressed.
    """
    encoding = header(headers, b"content-encoding")
    if encoding is not None and encoding.strip().lower() not in (b"", b"identity"):
        raise UnsupportedMediaTypeError(
            f"content-encoding {encoding.decode('latin-1')!r} is not supported; send the body as "
            "it is (identity)"
        )
    value = (header(headers, b"content-type") or b"").decode("latin-1")
    kind, *rest = value.split(";")
    kind = kind.strip().lower() or JSON
    pairs = (item.partition("=") for item in rest)
    parameters = {name.strip().lower(): text.strip().strip('"') for name, _, text in pairs}
    return ContentType(JSON if kind.endswith("+json") else kind, parameters)


def check_transfer(headers: Headers) -> None:
    """Raise `TransferCodingError` for a transfer coding other than chunked (RFC 9112, 6.1)."""
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if codings and [coding.strip().lower() for coding in codings] != [b"chunked"]:
        got = b", ".join(codings)[:80].decode("latin-1")
        raise TransferCodingError(
            f"transfer-encoding {got!r} is not supported; send the body as it is, or chunked"
        )


def check_content_type(media: ContentType, *allowed: str) -> None:
    """Raise `UnsupportedMediaTypeError` unless `media` is one of `allowed`."""
    if media.kind not in allowed:
        raise UnsupportedMediaTypeError(
            f"content-type {media.kind!r} is not supported; send {' or '.join(allowed)}"
        )


def declared_length(headers: Headers) -> int | None:
    """Return `Content-Length`, or None if the body is chunked."""
    value = header(headers, b"content-length")
    return int(value) if value is not None and value.isdigit() else None
