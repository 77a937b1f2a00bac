"""data: URLs (RFC 2397) in base64. Their media type is ignored: content decides."""

import binascii

import pybase64

from inlay.errors import InvalidRequestError
from inlay.media.frames import pack_frames
from inlay.media.sampling import FPS

_MAX_HEAD = 256
_FRAMES = "data:video/jpeg"
_MAX_FRAMES = 4096


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
    if (len(url) - start) // 4 * 3 > max_bytes + 2:
        raise InvalidRequestError(
            f"a data: URL holds about {(len(url) - start) // 4 * 3} bytes; allowed: {max_bytes}"
        )
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
    frames = []
    for index, text in enumerate(url[start:].split(",")):
        try:
            frames.append(pybase64.b64decode(text, validate=True))
        except (binascii.Error, ValueError) as error:
            raise InvalidRequestError(f"frame {index} of a video is not valid base64") from error
    return pack_frames(frames, fps)
