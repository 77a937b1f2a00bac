"""Sizes from headers against Pillow's, and hostile files."""

import contextlib
import io
import struct
import warnings
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from inlay.base.errors import InvalidRequestError
from inlay.media.image import FORMATS, read_image_header
from tests.examples import examples
from tests.media.hostile_files import many_scans, run_lengths, segment

ORIENTATION = 0x0112


def encoded(size: tuple[int, int], format_: str, mode: str = "RGB", **options: Any) -> bytes:
    out = io.BytesIO()
    Image.new(mode, size).save(out, format_, **options)
    return out.getvalue()


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I4s", len(body), kind) + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, data: bytes, depth: int = 1, colour: int = 0) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", data), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def oriented(value: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ORIENTATION] = value
    exif[0x010F] = "maker"
    return exif


KINDS: dict[str, dict[str, Any]] = {
    "png": {"format_": "PNG"},
    "png-1": {"format_": "PNG", "mode": "1"},
    "png-16": {"format_": "PNG", "mode": "I;16"},
    "png-palette": {"format_": "PNG", "mode": "P"},
    "png-alpha": {"format_": "PNG", "mode": "RGBA"},
    "jpeg": {"format_": "JPEG"},
    "jpeg-gray": {"format_": "JPEG", "mode": "L"},
    "jpeg-cmyk": {"format_": "JPEG", "mode": "CMYK"},
    "jpeg-progressive": {"format_": "JPEG", "progressive": True},
    "webp": {"format_": "WEBP"},
    "webp-lossless": {"format_": "WEBP", "lossless": True},
    "webp-alpha": {"format_": "WEBP", "mode": "RGBA"},
    "gif": {"format_": "GIF", "mode": "P"},
    "bmp": {"format_": "BMP"},
    "bmp-1": {"format_": "BMP", "mode": "1"},
    "bmp-8": {"format_": "BMP", "mode": "L"},
}
SAMPLES = [
    *(encoded((31, 18), **options) for options in KINDS.values()),
    encoded((31, 18), "WEBP", exif=oriented(6)),
    encoded((31, 18), "PNG", exif=oriented(6)),
    encoded((31, 18), "JPEG", exif=oriented(6)),
]


def animations() -> list[bytes]:
    """A GIF, a WebP and a PNG of three frames."""
    frames = [Image.new("RGB", (24, 17), colour) for colour in ("red", "green", "blue")]
    found = []
    for format_ in ("GIF", "WEBP", "PNG"):
        out = io.BytesIO()
        frames[0].save(out, format_, save_all=True, append_images=frames[1:])
        found.append(out.getvalue())
    return found


def pillow_size(data: bytes) -> tuple[int, int] | None:
    """What Pillow says of a file, or None where it cannot open it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                return image.size
    except Exception:  # it raises many kinds of error for malformed files
        return None


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=examples(25))
@given(st.integers(1, 300), st.integers(1, 300))
def test_the_size_of_a_file_is_pillows(kind: str, width: int, height: int) -> None:
    found = read_image_header(encoded((width, height), **KINDS[kind]))
    assert tuple(found) == (KINDS[kind]["format_"], height, width, 1)
    assert found.decoded_bytes == width * height * 4


@pytest.mark.parametrize("format_", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("value", range(9))
def test_orientation_is_applied_to_the_size_as_pillow_does(format_: str, value: int) -> None:
    data = encoded((40, 20), format_, exif=oriented(value))
    with Image.open(io.BytesIO(data)) as image:
        seen = ImageOps.exif_transpose(image).size
    found = read_image_header(data)
    assert (found.width, found.height) == seen
    assert found.orientation == (value or 1)


def test_an_animation_has_the_size_of_its_first_frame() -> None:
    found = [read_image_header(data)[:3] for data in animations()]
    assert found == [("GIF", 17, 24), ("WEBP", 17, 24), ("PNG", 17, 24)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "looks like SVG"),
        (b"\xef\xbb\xbf\n<?xml version='1.0'?><svg/>", "looks like SVG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "PostScript"),
        (b"%PDF-1.7\n", "PDF"),
        (b"\x00\x00\x00\x18ftypheic", "HEIF"),
        (b"\x00\x00\x00\x18ftypavif", "AVIF"),
        (b"\x00\x00\x00\x18ftypisom", "MP4"),
        (b"II*\x00\x08\x00\x00\x00", "TIFF"),
        (b"RIFF\x24\x00\x00\x00WAVEfmt ", "RIFF, not WebP"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"data:image/png;base64,iVBORw0KGgo=", "data: URL inside base64"),
        (b"hello world", "no known format begins with 68656c6c6f20776f"),
    ],
)
def test_any_other_format_is_refused_by_name(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        read_image_header(data)
    assert data == b"" or "formats that are read: PNG, JPEG, WEBP, GIF, BMP" in str(caught.value)


BITS = zlib.compress(bytes(9000 * 1126), 9)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (png(9000, 9000, BITS), "9000 x 9000 pixels; allowed: 40000000"),
        (png(20000, 20000, bytes(60_000)), "20000 x 20000 pixels; allowed"),
        (png(6000, 6000, b"x" * 40), "40 bytes of data cannot hold 6000 x 6000"),
        (png(0, 5, b"x"), "0 x 5"),
        (png(2**31, 1, b"x"), "2147483648 x 1"),
        (png(5, 5, b"x", depth=3), "colour type 0 with 3 bits"),
        (encoded((31, 18), "PNG")[:-20], "truncated"),
        (encoded((31, 18), "JPEG")[:150], "truncated"),
        (encoded((31, 18), "BMP")[:-40], "cannot hold"),
        (encoded((31, 18), "WEBP")[:-4], "truncated"),
        (b"\x89PNG\r\n\x1a\n", "truncated"),
        (b"\xff\xd8\xff\xd9", "ends before its picture"),
        (b"\xff\xd8\xff\xc9\x00\x0b\x08", "arithmetic"),
        (b"GIF89a\x01\x00\x01\x00\x00\x00\x00;", "no picture"),
        (b"BM" + bytes(40), "its header is 0 bytes long"),
    ],
)
def test_bombs_truncations_and_lies_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        read_image_header(data)


def test_scans_of_a_jpeg_are_bounded_by_its_pixels() -> None:
    for size, most in (((2800, 2800), 81), ((6000, 6000), 17)):
        assert read_image_header(many_scans(size, most - 10)).width == size[0]
        with pytest.raises(InvalidRequestError, match=f"in more than {most} scans"):
            read_image_header(many_scans(size, most - 9))
    # A baseline file of several scans is as dear; what follows its end is another picture's.
    baseline = many_scans((2800, 2800), 200).replace(b"\xff\xc2", b"\xff\xc0")
    with pytest.raises(InvalidRequestError, match="scans"):
        read_image_header(baseline)
    assert read_image_header(many_scans((2800, 2800), 50) * 2).width == 2800
    # Nor does an end in a comment among the scans hide those behind it.
    data = many_scans((2800, 2800), 200)
    first = data.index(b"\xff\xda")
    second = data.index(b"\xff\xda", first + 2)
    hidden = data[:second] + segment(0xFE, b"\xff\xd9") + data[second:]
    with pytest.raises(InvalidRequestError, match="scans"):
        read_image_header(hidden)


def test_a_picture_of_any_size_may_have_as_many_scans_as_encoders_write() -> None:
    for size in ((6324, 6324), (8, 8)):
        read_image_header(encoded(size, "JPEG", progressive=True))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (run_lengths((2896, 2896), b"\1\5\0\0" * 2896), "allowed: 4000000 pixels"),
        (run_lengths((1, 1), b"\0\0" * 1_000_000), "allowed: 4000000 pixels in all, 2000000 bytes"),
        (
            b"GIF89a\x01\x00\x01\x00\x00\x00\x00" + b"!\xfe" + b"\x01a" * 100_000 + b"\x00,",
            r"more than 6866\d blocks for its size",
        ),
        (b"\xff\xd8" + segment(0xC4, bytes(60_000)) * 5, "tables take 300560 bytes"),
    ],
)
def test_what_is_small_and_dear_to_decode_is_refused(data: bytes, message: str) -> None:
    if data[:2] == b"\xff\xd8":
        data += encoded((8, 8), "JPEG")[2:]
    with pytest.raises(InvalidRequestError, match=message):
        read_image_header(data)


def test_the_checksum_of_a_header_is_checked() -> None:
    data = bytearray(encoded((31, 18), "PNG"))
    data[18] ^= 1
    with pytest.raises(InvalidRequestError, match="checksum"):
        read_image_header(data)


def test_a_file_that_contradicts_itself_is_refused() -> None:
    webp = bytearray(encoded((31, 18), "WEBP", exif=oriented(6)))
    webp[24] ^= 4  # the width of the canvas, not of the picture
    with pytest.raises(InvalidRequestError, match="its canvas is"):
        read_image_header(webp)
    jpeg = encoded((31, 18), "JPEG")
    frame = jpeg.index(b"\xff\xc0")
    twice = jpeg[:frame] + jpeg[frame : frame + 19] + jpeg[frame:]
    with pytest.raises(InvalidRequestError, match="two frames"):
        read_image_header(twice)
    small = bytearray(jpeg)
    small[frame + 5 : frame + 9] = b"\x17\x70\x17\x70"
    with pytest.raises(InvalidRequestError, match="cannot hold 6000 x 6000"):
        read_image_header(small)


@settings(deadline=None, max_examples=examples(300))
@given(st.binary(max_size=200), st.sampled_from([sample[:12] for sample in SAMPLES] + [b""]))
def test_no_bytes_raise_anything_but_a_refusal(tail: bytes, head: bytes) -> None:
    with contextlib.suppress(InvalidRequestError):
        read_image_header(head + tail)


@settings(deadline=None, max_examples=examples(1000))
@given(st.data())
def test_a_mutated_file_has_pillows_size_or_is_refused(data: st.DataObject) -> None:
    mutated = bytearray(data.draw(st.sampled_from(SAMPLES)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(mutated) - 1, 120)))
        mutated[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del mutated[data.draw(st.integers(0, len(mutated))) :]
    try:
        found = read_image_header(mutated)
    except InvalidRequestError:
        return
    size = pillow_size(bytes(mutated))
    seen = (found.height, found.width) if found.orientation > 4 else (found.width, found.height)
    assert size is None or size == seen
