"""Videos that are frames: headers of animations as Pillow has them, and what is refused."""

import io
import struct
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

from inlay.base.errors import InvalidRequestError
from inlay.engine.pictures import decode_frames
from inlay.media.frames import pack_frames, read_video_header, unpack_frames

MAX_PIXELS = 1 << 16


def pictures(count: int, height: int = 20, width: int = 30) -> list[Image.Image]:
    random = np.random.default_rng(count)
    return [
        Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
        for _ in range(count)
    ]


def file_of(image: Image.Image, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


def animation(kind: str, count: int, milliseconds: int = 250) -> bytes:
    out = io.BytesIO()
    first, *rest = pictures(count)
    options = {"lossless": True} if kind == "WEBP" else {}
    first.save(
        out, kind, save_all=True, append_images=rest, duration=milliseconds, loop=0, **options
    )
    return out.getvalue()


READY = pack_frames([file_of(each) for each in pictures(3)], 1.5)
SAMPLES = [READY, animation("GIF", 5), animation("WEBP", 5), animation("GIF", 1)]


def header(data: bytes, frames: int = 64) -> object:
    return read_video_header(data, max_frames=frames, max_pixels=MAX_PIXELS)


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
@pytest.mark.parametrize("count", [1, 2, 5, 9, 30])
def test_an_animation_has_pillows_frames_and_times(kind: str, count: int) -> None:
    data = animation(kind, count)
    found = read_video_header(data, max_frames=12, max_pixels=MAX_PIXELS)
    with Image.open(io.BytesIO(data)) as image:
        assert getattr(image, "n_frames", 1) == count
    assert (found.format, found.height, found.width) == (kind, 20, 30)
    assert len(found.indices) == min(max(int(count / 4 * 2), 4), count, 12)
    assert found.indices[0] == 0
    assert found.indices[-1] == count - 1
    if count > 1:
        assert found.seconds == tuple(index * 0.25 for index in found.indices)
    assert all(one < other for one, other in pairwise(found.indices))
    decoded = list(decode_frames(memoryview(data), found))
    if kind == "WEBP":
        wanted = [pictures(count)[index] for index in found.indices]
        assert [one.tobytes() for one in decoded] == [one.tobytes() for one in wanted]
    assert {one.size for one in decoded} == {(30, 20)}


def test_ready_made_frames_are_what_was_packed() -> None:
    found = read_video_header(READY, max_frames=3, max_pixels=MAX_PIXELS)
    assert list(found.indices) == [0, 1, 2]
    assert found.fps == 1.5
    assert list(found.seconds) == [0, 1 / 1.5, 2 / 1.5]
    decoded = decode_frames(memoryview(READY), found)
    assert [one.tobytes() for one in decoded] == [one.tobytes() for one in pictures(3)]


def lying(count: int) -> bytes:
    return struct.pack("<8sId", b"\x93FRAMES\n", count, 2.0) + bytes(40)


BAD = {
    "empty": (b"", "is empty"),
    "mp4": (b"\0\0\0\x10ftypisom" + bytes(8), "malformed MP4"),
    "still": (file_of(pictures(1)[0]), "not one PNG"),
    "too many": (pack_frames([b""] * 65), "65 frames; allowed: 1 to 64"),
    "none": (pack_frames([]), "0 frames"),
    "a count that lies": (lying(60), "truncated"),
    "a huge count": (lying(2**32 - 1), "4294967295 frames"),
    "no head": (b"\x93FRAMES\n\1", "truncated"),
    "bytes behind": (READY + b"a", "its frames take"),
    "cut": (READY[:-1], "its frames take"),
    "no frame": (pack_frames([b"abc"]), "frame 0 of a video: an image of no known format"),
    "sizes": (
        pack_frames([file_of(pictures(1)[0]), file_of(pictures(1, 30, 20)[0])]),
        "must have one size",
    ),
    "cut gif": (animation("GIF", 5)[:-1], "truncated"),
    "odd gif": (animation("GIF", 5)[:-1] + b"\x99", "a block of kind 153"),
    "a frame beyond the first": (
        animation("GIF", 1)[:-1] + b"," + struct.pack("<HHHHB", 1, 0, 30, 20, 0), "to 31 x 20 pixels"
    ),
    "a hundred thousand blocks": (
        animation("GIF", 1)[:-1] + b"!\xfe" + b"\x01a" * 100_000 + b"\0;", "blocks for its size"
    ),
    "a rate of NaN": (
        struct.pack("<8sId", b"\x93FRAMES\n", 1, float("nan")) + bytes(9), "frames a second"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_video_is_refused(name: str) -> None:
    data, message = BAD[name]
    with pytest.raises(InvalidRequestError, match=message):
        header(data)


def test_frames_that_take_too_much_together_are_refused() -> None:
    big = file_of(Image.new("RGB", (250, 250)))
    header(pack_frames([big] * 10))
    with pytest.raises(InvalidRequestError, match="11 frames of 250 x 250"):
        header(pack_frames([big] * 11))


def test_a_rate_out_of_range_is_refused() -> None:
    for fps in (0.0, -1.0, 1e9, float("nan"), float("inf")):
        with pytest.raises(InvalidRequestError, match="frames a second"):
            pack_frames([b"a"], fps)


def test_a_packed_video_is_unpacked_in_place() -> None:
    assert [bytes(each) for each in unpack_frames(memoryview(pack_frames([b"a", b"", b"bc"])))] == [
        b"a", b"", b"bc",
    ]  # fmt: skip
