"""Videos: ready-made frames one after the other, animated GIF and WebP, and MP4 and WebM.

A container is told by its content and sized from its headers alone, as images are. MP4 and WebM
are for workers that can decode them (`inlay.engine.videos`); `containers` reads their headers.

Ready-made frames come as `data:video/jpeg;base64,FRAME,FRAME,...` (vLLM's form, any of the formats
of images), and stand in one piece of memory: `pack_frames`.
"""

import struct
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from inlay.base import extras
from inlay.base.errors import InvalidRequestError
from inlay.media.containers import Container, read_container
from inlay.media.image import GifBlocks, read_image_header
from inlay.media.malformed import malformed
from inlay.media.sampling import FPS, Sampling, sampled

_malformed = partial(malformed, "a video")

FORMATS = ("GIF", "WEBP")
"""Animations that are read, beside ready-made frames."""

_MAGIC = b"\x93FRAMES\n"
_HEAD = struct.Struct("<8sId")
_SIZE = struct.Struct("<I")
_MAX_IN_FILE = 65536
_MIN_FPS, _MAX_FPS = 0.01, 240.0

_PIXELS_OF_IMAGES = 10
"""Pixels of all decoded frames, as a multiple of those of one image."""

_PIXELS_OF_FILES = 100
"""The same of MP4 and WebM, whose frames are decoded apart, one at a time."""

_PARTS_OF_IMAGES = 4
"""Frames of MP4 and WebM are smaller than an image may be by this factor: a decoder keeps many."""

CANNOT_DECODE = (
    f"this model's workers decode no MP4 and no WebM: they need `{extras.install('video')}`, on "
    "Linux; or send ready-made frames (data:video/jpeg;base64,FRAME,FRAME,...)"
)

_DELAY = 0.1
"""Seconds of a frame that says it takes none, as browsers show it."""


class VideoHeader(NamedTuple):
    """The header of a video, and which of its frames are seen.

    Attributes:
        format: "FRAMES", one of `FORMATS`, "MP4" or "WEBM".
        height: of a frame, in pixels, as it is seen.
        width: likewise.
        indices: of the sampled frames, in order.
        seconds: time of each of them.
        fps: sampled frames a second.
        container: what the header of an MP4 or WebM says.
    """

    format: str
    height: int
    width: int
    indices: tuple[int, ...]
    seconds: tuple[float, ...]
    fps: float
    container: Container | None = None


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
        raise _malformed("list of frames", "it is truncated")
    found = []
    for index in range(count):
        (size,) = _unpack(_SIZE, data, _HEAD.size + index * _SIZE.size)
        found.append(data[at : at + size])
        at += size
    if at != len(data):
        raise _malformed("list of frames", f"its frames take {at} bytes of {len(data)}")
    return found


def read_video_header(
    data: "bytes | bytearray | memoryview",
    *,
    max_frames: int,
    max_pixels: int,
    sampling: Sampling = "spread",
    containers: bool = False,
) -> VideoHeader:
    """The header of a video.

    Args:
        data: the whole file.
        max_frames: most frames that are seen; as many are sampled, and more ready-made ones are
            refused.
        max_pixels: largest area of a frame, and of MP4 and WebM four times that of one; all decoded
            frames together may have ten times that, and a hundred times of MP4 and WebM.
        sampling: of MP4 and WebM; animations are always "spread".
        containers: MP4 and WebM are read.

    Raises:
        InvalidRequestError: no video that is read, truncated or contradictory, or too large.
    """
    view = memoryview(data).cast("B")
    most = _PIXELS_OF_IMAGES * max_pixels
    container = read_container(view)
    if container is not None:
        if not containers:
            raise InvalidRequestError(f"a video is a file of {container.format}; {CANNOT_DECODE}")
        found = _from_file(container, sampling, max_frames, max_pixels // _PARTS_OF_IMAGES)
        decoded, most = found.indices[-1] + 1, _PIXELS_OF_FILES * max_pixels
    elif bytes(view[:8]) == _MAGIC:
        found, decoded = _ready(view, max_frames, max_pixels)
    else:
        image = _first_frame(view, max_pixels)
        shape = image.height, image.width
        delays = _gif(view, shape) if image.format == "GIF" else _webp(view)
        rate = len(delays) / sum(delays)
        indices, times, fps = _chosen(len(delays), rate, "spread", max_frames)
        found = VideoHeader(image.format, *shape, indices, times, fps)
        decoded = indices[-1] + 1
    if decoded * found.height * found.width > most:
        raise InvalidRequestError(
            f"a video is {decoded} frames of {found.width} x {found.height} pixels; allowed: "
            f"{most} pixels in all"
        )
    return found


def _from_file(
    container: Container, sampling: Sampling, max_frames: int, max_pixels: int
) -> VideoHeader:
    size = container.height, container.width
    if not 1 <= size[0] * size[1] <= max_pixels:
        raise InvalidRequestError(
            f"a video has frames of {size[1]} x {size[0]} pixels; allowed: 1 to {max_pixels} "
            f"pixels a frame of {container.format}"
        )
    if not _MIN_FPS <= container.fps <= _MAX_FPS:
        raise _malformed(container.format, f"it has {container.fps:g} frames a second")
    seen = size[::-1] if container.orientation > 4 else size
    indices, times, fps = _chosen(container.frames, container.fps, sampling, max_frames)
    return VideoHeader(container.format, *seen, indices, times, fps, container)


def _chosen(
    total: int, fps: float, sampling: Sampling, max_frames: int
) -> tuple[tuple[int, ...], tuple[float, ...], float]:
    """Indices and times of the frames that are seen, and their number a second."""
    indices = sampled(total, fps, sampling, max_frames)
    return indices, tuple(index / fps for index in indices), len(indices) / total * fps


def _ready(view: memoryview, max_frames: int, max_pixels: int) -> tuple[VideoHeader, int]:
    _, count, fps = _unpack(_HEAD, view, 0)
    if not 1 <= count <= max_frames:
        raise InvalidRequestError(f"a video has {count} frames; allowed: 1 to {max_frames}")
    if not _MIN_FPS <= fps <= _MAX_FPS:
        raise _malformed("list of frames", f"it has {fps:g} frames a second")
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
            f"a video is ready-made frames (data:video/jpeg;base64,FRAME,FRAME,...), an animated "
            f"{' or '.join(FORMATS)}, MP4 or WebM: {error.message}"
        ) from None
    if image.format not in FORMATS:
        raise InvalidRequestError(
            f"a video is ready-made frames (data:video/jpeg;base64,FRAME,FRAME,...), an animated "
            f"{' or '.join(FORMATS)}, MP4 or WebM, not one {image.format}"
        )
    return image


def _gif(view: memoryview, size: tuple[int, int]) -> list[float]:
    """Seconds that each frame is shown, none of them larger than `size`."""
    blocks = GifBlocks(view)
    (flags,) = _unpack(struct.Struct("B"), view, 10)
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    found: list[int] = []
    delay = 0
    while True:
        (kind,) = _unpack(struct.Struct("B"), view, at)
        if kind == 0x3B and found:
            return [hundredths / 100 or _DELAY for hundredths in found]
        if kind == 0x21:
            label, length, _, hundredths = _unpack(struct.Struct("<BBBH"), view, at + 1)
            if (label, length) == (0xF9, 4):
                delay = hundredths
            at = blocks.after(at + 2)
        elif kind == 0x2C:
            left, top, width, height, flags = _unpack(struct.Struct("<HHHHB"), view, at + 1)
            if top + height > size[0] or left + width > size[1]:
                raise _malformed(
                    "GIF",
                    f"frame {len(found)} reaches to {left + width} x {top + height} pixels of "
                    f"{size[1]} x {size[0]}",
                )
            at += 10 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
            at = blocks.after(at + 1)
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
