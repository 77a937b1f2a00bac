"""data: URLs (RFC 2397) in base64. Their media type is ignored: content decides.

Base64 is read as browsers read it there (WHATWG Fetch and Infra): white space, escapes and lacking
padding mean nothing. URL-safe letters are read too.
"""

import binascii
import re
from urllib.parse import unquote

import pybase64

from inlay.base.errors import InvalidRequestError
from inlay.media.frames import pack_frames
from inlay.media.sampling import FPS

_MAX_HEAD = 256
_FRAMES = "data:video/jpeg"
_MAX_FRAMES = 4096
_base64 = re.compile(r"; *base64 *$", re.IGNORECASE)
_other = re.compile(r"[^A-Za-z0-9+/=_ \t\n\f\r-]")
_STANDARD, _SPACES = bytes.maketrans(b"-_", b"+/"), b" \t\n\f\r"
_STEP = 1 << 18
"""Characters that are read at a time, where they are not plain base64."""


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
    if _base64.search(head[:comma]) is None:
        raise InvalidRequestError(f"a data: URL must be in base64, got {head[:comma][:80]!r}")
    return comma + 1


def decode_data_url(url: str, *, max_bytes: int) -> bytes | bytearray:
    """The bytes of a data: URL.

    Raises:
        InvalidRequestError: not one in base64, or larger than `max_bytes`.
    """
    start = data_url_body(url)
    found = _decoded(url[start:], "a data: URL", max_bytes)
    if len(found) > max_bytes:
        raise InvalidRequestError(
            f"a data: URL holds {len(found)} bytes; allowed: {max_bytes} (--max-media-bytes)"
        )
    return found


def _decoded(text: str, what: str, max_bytes: int) -> bytes | bytearray:
    """The bytes of base64.

    Args:
        text: base64, in any of the forms above.
        what: that holds it, for errors.
        max_bytes: allowed.

    Raises:
        InvalidRequestError: no base64, and where not, or some bytes more.
    """
    if len(text) // 4 * 3 <= max_bytes + 2:
        try:
            return pybase64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            pass
    return _forgiven(text, what, max_bytes)


def _forgiven(text: str, what: str, max_bytes: int) -> bytearray:
    found, left, at, count = bytearray(), b"", 0, 0
    while at < len(text):
        end = min(at + _STEP, len(text))
        escape = text.find("%", end - 2, end) if end < len(text) else -1
        piece = text[at : end if escape < 0 else escape]
        at += len(piece)
        if "%" in piece:
            piece = unquote(piece, "latin-1")
        other = _other.search(piece)
        if other is not None:
            raise _invalid(what, f"{other[0]!r} is character {count + other.start()} of its data")
        count += len(piece)
        letters = left + piece.encode("ascii").translate(_STANDARD, _SPACES)
        body = letters.rstrip(b"=")
        if b"=" in body:
            raise _invalid(what, "'=' stands before the end of its data")
        whole = len(body) & ~3
        found += pybase64.b64decode(body[:whole])
        left = letters[whole:]
        if len(found) > max_bytes:
            raise InvalidRequestError(
                f"{what} holds about {len(text) // 4 * 3} bytes; allowed: {max_bytes} "
                "(--max-media-bytes)"
            )
    last = left.rstrip(b"=")
    if len(last) == 1:
        raise _invalid(what, f"its {count} characters end within a byte")
    if len(left) - len(last) > 2:
        raise _invalid(what, "more than two '=' are at its end")
    found += pybase64.b64decode(last + b"=" * (-len(last) % 4))
    return found


def _invalid(what: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{what} does not hold valid base64: {why}")


def as_data_url(data: str, kind: str) -> str:
    """The data: URL of base64 of a file; clients that send one where base64 belongs mean it."""
    return data if data[:5].lower() == "data:" else f"data:{kind};base64,{data}"


def is_frames(url: str) -> bool:
    """True for a data: URL of ready-made frames: `data:video/jpeg;base64,FRAME,FRAME,...`."""
    return url[: len(_FRAMES)].lower() == _FRAMES


def decode_frames_url(url: str, *, max_bytes: int, only: memoryview | None = None) -> bytes:
    """The frames of a data: URL, as `inlay.media.frames.pack_frames` joins them.

    `only` is the frame, where there is one and it was decoded already. The type may have a
    parameter `fps`, the frames a second: `data:video/jpeg;fps=1;base64,...`.

    Raises:
        InvalidRequestError: not base64, an `fps` that is no number, too many frames or bytes.
    """
    start = data_url_body(url)
    fps = FPS
    for parameter in url[: start - 1].lower().split(";")[1:-1]:
        name, _, value = parameter.partition("=")
        try:
            fps = float(value) if name.strip() == "fps" else fps
        except ValueError as error:
            raise InvalidRequestError(f"fps of a video is a number, got {value[:40]!r}") from error
    if only is not None:
        return pack_frames([only], fps)
    if url.count(",", start) >= _MAX_FRAMES:
        raise InvalidRequestError(
            f"a video has {url.count(',', start) + 1} frames; allowed: {_MAX_FRAMES}"
        )
    frames: list[memoryview] = []
    left = max_bytes
    for index, text in enumerate(url[start:].split(",")):
        frames.append(memoryview(_decoded(text, f"frame {index} of a video", left)))
        left = max(0, left - len(frames[-1]))
    return pack_frames(frames, fps)
