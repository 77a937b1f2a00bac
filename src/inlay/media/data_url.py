"""data: URLs (RFC 2397) in base64. Their media type is ignored: content decides."""

import binascii

import pybase64

from inlay.errors import InvalidRequestError

_MAX_HEAD = 256


def data_url_body(url: str) -> int:
    """The index at which the base64 of a data: URL begins.

    Raises:
        InvalidRequestError: not a data: URL in base64.
    """
    head = url[: _MAX_HEAD + 6]
    comma = head.find(",")
    if head[:5].lower() != "data:" or comma < 0:
        raise InvalidRequestError(
            "a data: URL is data:TYPE;base64,DATA with a type of at most "
            f"{_MAX_HEAD} characters, got {head[:40]!r}"
        )
    if not head[:comma].lower().endswith(";base64"):
        raise InvalidRequestError(f"a data: URL must be in base64, got {head[:comma][:80]!r}")
    return comma + 1


def decode_data_url(url: str, *, max_bytes: int) -> bytes:
    """The bytes of a data: URL.

    Raises:
        InvalidRequestError: not one in base64, or larger than `max_bytes`.
    """
    start = data_url_body(url)
    if (len(url) - start) // 4 * 3 > max_bytes + 2:
        raise InvalidRequestError(
            f"a data: URL holds about {(len(url) - start) // 4 * 3} bytes; allowed: {max_bytes}"
        )
    try:
        found = pybase64.b64decode(url[start:], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError("a data: URL does not hold valid base64") from error
    if len(found) > max_bytes:
        raise InvalidRequestError(f"a data: URL holds {len(found)} bytes; allowed: {max_bytes}")
    return found


__all__ = ["data_url_body", "decode_data_url"]
