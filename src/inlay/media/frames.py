"""Videos that are frames: ready-made ones one after the other, and animated GIF and WebP.

A container is told by its content and sized from its headers alone, as images are. Containers of
compressed video (MP4, WebM) are not read: their decoders are large, and a client has the frames.

Ready-made frames come as `data:video/jpeg;base64,FRAME,FRAME,...` (vLLM's form, any of the formats
of images), and stand in one piece of memory: `pack_frames`.
"""

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from inlay.errors import InvalidRequestError
from inlay.media.image import after_blocks, read_image_header

FORMATS = ("GIF", "WEBP")
"""Animations that are read, beside ready-made frames."""

FPS = 2.0
"""Frames a second that animations are sampled at, and that ready-made frames are taken to have."""

_MAGIC = b"\x93FRAMES\n"
_HEAD = struct.Struct("<8sId")
_SIZE = struct.Struct("<I")
_MAX_IN_FILE = 65536
_MIN_SAMPLED = 4
_MIN_FPS, _MAX_FPS = 0.01, 240.0

_PIXELS_OF_IMAGES = 10
"""Pixels of all decoded frames, as a multiple of those of one image."""

_DELAY = 0.1
"""Seconds of a frame that says it takes none, as browsers show it."""


class VideoHeader(NamedTuple):
    """The header of a video, and which of its frames are seen.

    Attributes:
        format: "FRAMES", or one of `FORMATS`.
        height: of a frame, in pixels, as it is seen.
        width: likewise.
        indices: of the sampled frames, in order.
        seconds: time of each of them.
        fps: sampled frames a second.
    """

    format: str
    height: int
    width: int
    indices: tuple[int, ...]
    seconds: tuple[float, ...]
    fps: float


def pack_frames(frames: Sequence["bytes | memoryview"], fps: float = FPS) -> bytes:
    """Ready-made frames, each an image file, as one video.

    Raises:
        InvalidRequestError: a rate out of range.
    """
    if not _MIN_FPS <= fps <= _MAX_FPS:
        raise InvalidRequestError(
            f"a video has {fps:g} frames a second; allowed: {_MIN_FPS:g} to {_MAX_FPS:g}"
        )
    sizes = b"".join(_SIZE.pack(len(frame)) for frame in frames)
    return b"".join((_HEAD.pack(_MAGIC, len(frames), fps), sizes, *frames))


def unpack_frames(data: memoryview) -> list[memoryview]:
    """The files of ready-made frames.

    Raises:
        InvalidRequestError: truncated or contradictory.
    """
    _, count, _ = _unpack(_HEAD, data, 0)
    at = _HEAD.size + count * _SIZE.size
    if at > len(data):
        raise _malformed("frames", "it is truncated")
    found = []
    for index in range(count):
        (size,) = _unpack(_SIZE, data, _HEAD.size + index * _SIZE.size)
        found.append(data[at : at + size])
        at += size
    if at != len(data):
        raise _malformed("frames", f"its frames take {at} bytes of {len(data)}")
    return found


def read_video_header(
    data: "bytes | bytearray | memoryview", *, max_frames: int, max_pixels: int
) -> VideoHeader:
    """The header of a video.

    Args:
        data: the whole file.
        max_frames: most frames that are seen; of an animation as many are sampled, and more
            ready-made ones are refused.
        max_pixels: largest area of a frame; all decoded frames together may have ten times that.

    Raises:
        InvalidRequestError: no video that is read, truncated or contradictory, or too large.
    """
    view = memoryview(data).cast("B")
    if bytes(view[:8]) == _MAGIC:
        found, decoded = _ready(view, max_frames, max_pixels)
    else:
        image = _first_frame(view, max_pixels)
        delays = (_gif if image.format == "GIF" else _webp)(view)
        indices, fps = _sampled(delays, max_frames)
        seconds = tuple(index * sum(delays) / len(delays) for index in indices)
        found = VideoHeader(image.format, image.height, image.width, indices, seconds, fps)
        decoded = indices[-1] + 1
    most = _PIXELS_OF_IMAGES * max_pixels
    if decoded * found.height * found.width > most:
        raise InvalidRequestError(
            f"a video is {decoded} frames of {found.width} x {found.height} pixels; allowed: "
            f"{most} pixels in all"
        )
    return found


def _ready(view: memoryview, max_frames: int, max_pixels: int) -> tuple[VideoHeader, int]:
    _, count, fps = _unpack(_HEAD, view, 0)
    if not 1 <= count <= max_frames:
        raise InvalidRequestError(f"a video has {count} frames; allowed: 1 to {max_frames}")
    if not _MIN_FPS <= fps <= _MAX_FPS:
        raise _malformed("frames", f"it has {fps:g} frames a second")
    sizes = []
    for index, frame in enumerate(unpack_frames(view)):
        try:
            header = read_image_header(frame, max_pixels=max_pixels)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"frame {index} of a video: {error.message}") from None
        sizes.append((header.height, header.width))
        if sizes[-1] != sizes[0]:
            raise InvalidRequestError(
                f"the frames of a video must have one size; frame 0 is {sizes[0][1]} x "
                f"{sizes[0][0]} pixels and frame {index} is {header.width} x {header.height}"
            )
    seconds = tuple(index / fps for index in range(count))
    return VideoHeader("FRAMES", *sizes[0], tuple(range(count)), seconds, fps), count


def _first_frame(view: memoryview, max_pixels: int) -> Any:
    try:
        image = read_image_header(view, max_pixels=max_pixels)
    except InvalidRequestError as error:
        raise InvalidRequestError(
            f"a video is ready-made frames (data:video/jpeg;base64,FRAME,FRAME,...) or an animated "
            f"{' or '.join(FORMATS)}: {error.message}"
        ) from None
    if image.format not in FORMATS:
        raise InvalidRequestError(
            f"a video is ready-made frames (data:video/jpeg;base64,FRAME,FRAME,...) or an animated "
            f"{' or '.join(FORMATS)}, not one {image.format}"
        )
    return image


def _sampled(delays: Sequence[float], max_frames: int) -> tuple[tuple[int, ...], float]:
    """Indices of the frames that are seen, evenly spread, and their number a second."""
    total, length = len(delays), sum(delays)
    count = min(max(int(length * FPS), _MIN_SAMPLED), max_frames, total)
    if count == 1:
        return (0,), 1 / length
    indices = tuple(round(index * (total - 1) / (count - 1)) for index in range(count))
    return indices, count / length


def _gif(view: memoryview) -> list[float]:
    """Seconds that each frame is shown."""
    (flags,) = _unpack(struct.Struct("B"), view, 10)
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    found: list[int] = []
    delay = 0
    while True:
        (kind,) = _unpack(struct.Struct("B"), view, at)
        if kind == 0x3B and found:
            return [hundredths / 100 or _DELAY for hundredths in found]
        if kind == 0x21:
            label, size, _, hundredths = _unpack(struct.Struct("<BBBH"), view, at + 1)
            if (label, size) == (0xF9, 4):
                delay = hundredths
            at = after_blocks(view, at + 2)
        elif kind == 0x2C:
            (flags,) = _unpack(struct.Struct("B"), view, at + 9)
            at += 10 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
            at = after_blocks(view, at + 1)
            found.append(delay)
            delay = 0
            if len(found) > _MAX_IN_FILE:
                raise _malformed("GIF", f"it has more than {_MAX_IN_FILE} frames")
        else:
            raise _malformed("GIF", f"a block of kind {kind} stands at byte {at}")


def _webp(view: memoryview) -> list[float]:
    """Seconds that each frame is shown."""
    (length,) = _unpack(_SIZE, view, 4)
    end, at = length + 8, 12
    found: list[float] = []
    while at + 8 <= end:
        kind, size = _unpack(struct.Struct("<4sI"), view, at)
        if kind == b"ANMF":
            low, high = _unpack(struct.Struct("<HB"), view, at + 8 + 12)
            found.append((low | high << 16) / 1000 or _DELAY)
            if len(found) > _MAX_IN_FILE:
                raise _malformed("WEBP", f"it has more than {_MAX_IN_FILE} frames")
        at += 8 + size + size % 2
    return found or [_DELAY]


def _unpack(layout: struct.Struct, view: memoryview, at: int) -> tuple[Any, ...]:
    try:
        return layout.unpack_from(view, at)
    except struct.error as error:
        raise InvalidRequestError("a video is truncated") from error


def _malformed(format_: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"a video is malformed ({format_}): {why}")
