"""Pictures from files that strangers sent."""

import struct
from collections.abc import Iterator
from io import BytesIO

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from inlay.base.errors import InvalidRequestError, reason_of
from inlay.base.pace import check_wanted
from inlay.engine.videos import decode_container
from inlay.media.frames import VideoHeader, unpack_frames
from inlay.media.image import ImageHeader, pixels_alone, read_image_header

_BROKEN = (
    EOFError,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
    OSError,
    OverflowError,
    SyntaxError,
    UnidentifiedImageError,
    ValueError,
    struct.error,
)
"""Errors of Pillow for files that are not what they say."""

_WHITE = (255, 255, 255, 255)
_LEVELS = 257
"""Factor from 8 to 16 bits."""

_STRIP = 1 << 20
"""Pixels that are converted at a time: copies of a large picture would be most of its memory."""

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Turns by Exif's orientation."""


def decode(data: memoryview, header: ImageHeader) -> Image.Image:
    """Decode the first frame as 8-bit RGB, turned by its orientation, on white where transparent.

    Raises:
        InvalidRequestError: the file is damaged, or not what its header says.
    """
    try:
        file = BytesIO(pixels_alone(data, header))
        with Image.open(file, formats=(header.format,)) as image:
            turned = header.orientation > 4
            size = (header.height, header.width) if turned else (header.width, header.height)
            if image.size != size:
                raise InvalidRequestError(
                    f"an image has a header of {size[0]} x {size[1]} pixels and is {image.size[0]} "
                    f"x {image.size[1]}"
                )
            found = _in_rgb(image)
    except _BROKEN as error:
        raise _broken(error) from error
    turn = _TURNS.get(header.orientation)
    return found if turn is None else found.transpose(turn)


def decode_frames(data: memoryview, header: VideoHeader) -> Iterator[Image.Image]:
    """Decode the sampled frames of a video as `decode` does, one after the other.

    Ends between frames, as `check_wanted` says.

    Raises:
        InvalidRequestError: the file is damaged, or not what its header says.
    """
    if header.format == "FRAMES":
        files = unpack_frames(data)
        for index in header.indices:
            check_wanted()
            yield decode(files[index], read_image_header(files[index]))
        return
    if header.container is not None:
        turn = _TURNS.get(header.container.orientation)
        for frame in decode_container(data, header):
            yield frame if turn is None else frame.transpose(turn)
        return
    try:
        with Image.open(BytesIO(data), formats=(header.format,)) as image:
            if image.size != (header.width, header.height):
                raise InvalidRequestError(
                    f"a video has a header of {header.width} x {header.height} pixels and is "
                    f"{image.size[0]} x {image.size[1]}"
                )
            for index in header.indices:
                # Frames between those that are seen are decoded one by one.
                while image.tell() < index:
                    check_wanted()
                    image.seek(image.tell() + 1)
                frame = _in_rgb(image)
                # The next frame is decoded into the same image.
                yield frame.copy() if frame is image else frame
    except _BROKEN as error:
        raise InvalidRequestError(f"a video cannot be decoded: {reason_of(error)}") from error


def rgb_array(image: Image.Image) -> npt.NDArray[np.uint8]:
    """Return the pixels of an RGB image, [height, width, 3], copied a strip at a time."""
    found = np.empty((image.height, image.width, 3), np.uint8)
    for top, strip in _strips(image):
        found[top : top + strip.height] = np.asarray(strip)
    return found


def _in_rgb(image: Image.Image) -> Image.Image:
    image.load()
    if image.mode == "RGB" and not image.has_transparency_data:  # `convert` would copy it
        return image
    found = Image.new("RGB", image.size)
    for top, strip in _strips(image):
        found.paste(_strip_in_rgb(strip), (0, top))
    return found


def _strips(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Cut an image into strips of whole lines; the first line of each, and its pixels."""
    step = max(1, _STRIP // image.width)
    for top in range(0, image.height, step):
        yield top, image.crop((0, top, image.width, min(top + step, image.height)))


def _strip_in_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits; Pillow would clip them
        levels = np.asarray(image)
        if levels.dtype.itemsize > 2:
            levels = levels.clip(0, 65535).astype(np.uint16)
        return Image.fromarray((levels // _LEVELS).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, _WHITE), rgba).convert("RGB")
    return image.convert("RGB")


def _broken(error: Exception) -> InvalidRequestError:
    if isinstance(error, UnidentifiedImageError):
        return InvalidRequestError("an image cannot be decoded: its format is not what it says")
    return InvalidRequestError(f"an image cannot be decoded: {reason_of(error)}")
