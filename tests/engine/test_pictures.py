"""Files to pictures: what the tables of hostile and odd files say."""

import os
import zlib
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from inlay.base.errors import InvalidRequestError
from inlay.engine.pictures import decode, rgb_array
from inlay.media.image import pixels_alone, read_image_header
from tests.media.hostile_files import chunk, png_with, segment
from tests.serving import peak_growth

RGB = np.random.default_rng(1).integers(0, 256, (10, 14, 3), dtype=np.uint8)


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def decoded(data: bytes) -> np.ndarray[Any, Any]:
    image = decode(memoryview(data), read_image_header(data))
    assert image.mode == "RGB"
    return np.asarray(image)


@pytest.mark.parametrize(
    ("kind", "options"), [("PNG", {}), ("BMP", {}), ("WEBP", {"lossless": True})]
)
def test_lossless_files_come_out_as_they_were(kind: str, options: dict[str, Any]) -> None:
    assert np.array_equal(decoded(saved(Image.fromarray(RGB), kind, **options)), RGB)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_as_it_is_seen_and_has_the_size_of_its_header(
    kind: str, orientation: int
) -> None:
    smooth = np.zeros((32, 48, 3), np.uint8)
    smooth[:16, :24], smooth[:16, 24:], smooth[16:, :24] = 255, 170, 85
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(Image.fromarray(smooth), kind, exif=exif)
    turns: dict[int, Callable[[Any], Any]] = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, 3),
        7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
        8: lambda a: np.rot90(a),
    }
    expected = turns[orientation](smooth)
    header = read_image_header(data)
    found = decoded(data)
    assert found.shape == expected.shape == (header.height, header.width, 3)
    assert np.abs(found[8::16, 8::16].astype(int) - expected[8::16, 8::16]).max() < 20


def test_sixteen_bits_are_scaled_and_not_clipped() -> None:
    levels = np.linspace(0, 65535, 256, dtype=np.uint16).reshape(16, 16)
    found = decoded(saved(Image.fromarray(levels)))
    assert (found.min(), found.max()) == (0, 255)
    assert np.array_equal(found[..., 0], (levels // 257).astype(np.uint8))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white(mode: str) -> None:
    image = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    image.paste((0, 0, 0, 255), (0, 0, 4, 8))
    found = decoded(saved(image.convert(mode)))
    assert found[:, :4].max() == 0
    assert found[:, 4:].min() == 255


KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "one bit": ("1", "PNG", {}),
    "grey of 16 bits": ("I;16", "PNG", {}),
    "colour": ("RGB", "PNG", {}),
    "alpha": ("RGBA", "PNG", {}),
    "palette": ("P", "GIF", {}),
    "jpeg": ("RGB", "JPEG", {}),
    "print, progressive": ("CMYK", "JPEG", {"progressive": True, "subsampling": 0}),
    "turned": ("RGB", "JPEG", {"exif": True}),
    "webp": ("RGB", "WEBP", {"lossless": True}),
    "webp with alpha": ("RGBA", "WEBP", {}),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_decoding_takes_no_more_memory_than_the_header_says(kind: str) -> None:
    mode, format_, options = KINDS[kind]
    if options.get("exif"):
        exif = Image.Exif()
        exif[0x0112] = 6
        options = {"exif": exif}
    colour = (0, 0, 0, 90) if mode == "RGBA" else 0
    data = saved(Image.new(mode, (2200, 2200), colour), format_, **options)
    header = read_image_header(data)
    with peak_growth(os.getpid()) as grown:
        assert rgb_array(decode(memoryview(data), header)).shape == (2200, 2200, 3)
    assert grown[0] < header.decoding_bytes + (12 << 20)  # strips, and what Pillow always takes


def test_the_first_frame_of_an_animation_is_taken() -> None:
    frames = [Image.new("RGB", (9, 7), colour) for colour in ("blue", "red", "green")]
    for kind, options in (("GIF", {}), ("WEBP", {"lossless": True})):
        data = saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert np.array_equal(decoded(data)[0, 0], (0, 0, 255))


def test_four_colours_of_print_become_three() -> None:
    found = decoded(saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"))
    assert found[0, 0, 0] > 200
    assert found[0, 0, 1] < 60


def cut(data: bytes) -> bytes:
    """A PNG with a sound header whose pixels are zeros."""
    start = data.index(b"IDAT")
    return data[: start + 4] + bytes(len(data) - start - 16) + data[-12:]


def test_a_damaged_file_is_the_clients_error() -> None:
    data = cut(saved(Image.fromarray(RGB)))
    with pytest.raises(InvalidRequestError, match="an image cannot be decoded: "):
        decode(memoryview(data), read_image_header(data))


PROFILE = zlib.compress(bytes(1 << 20))
"""A megabyte in a kilobyte: Pillow would inflate each."""


@pytest.mark.parametrize(
    "extra",
    [
        chunk(b"iCCP", b"a\0\0" + PROFILE) * 50,
        chunk(b"zTXt", b"a\0\0" + PROFILE) * 80,
        chunk(b"iTXt", b"a\0\1\0\0\0" + PROFILE) * 80,
        chunk(b"abCd", b"") * 1000,
        chunk(b"eXIf", b"none"),
    ],
    ids=["profiles", "texts", "other texts", "empty chunks", "no Exif"],
)
def test_only_the_pixels_of_a_png_are_read(extra: bytes) -> None:
    data = png_with(extra)
    assert decoded(data).tolist() == [[[1, 2, 3]]]
    assert pixels_alone(data, read_image_header(data)) == png_with(b"")


def test_only_the_pixels_of_a_jpeg_are_read() -> None:
    plain = saved(Image.new("RGB", (8, 8), (10, 200, 30)), "JPEG")
    more = segment(0xE1, b"Exif\0\0" + bytes(60_000)) * 20 + segment(0xED, b"Photoshop 3.0\0") * 20
    data = plain[:2] + more + plain[2:]
    assert np.array_equal(decoded(data), decoded(plain))
    assert pixels_alone(data, read_image_header(data)) == plain


def test_colours_and_transparency_stay_where_nothing_else_does() -> None:
    palette = Image.fromarray(RGB).quantize(16)
    palette.info["transparency"] = 3
    for image, kind in (
        (palette, "PNG"),
        (Image.fromarray(RGB).convert("CMYK"), "JPEG"),
        (Image.fromarray(RGB).convert("L"), "JPEG"),
        (Image.fromarray(RGB).convert("LA"), "PNG"),
    ):
        data = saved(image, kind)
        header = read_image_header(data)
        with (
            Image.open(BytesIO(data)) as whole,
            Image.open(BytesIO(pixels_alone(data, header))) as bare,
        ):
            assert np.array_equal(
                np.asarray(whole.convert("RGBA")), np.asarray(bare.convert("RGBA"))
            )


def test_a_file_that_is_not_what_its_header_said_is_refused() -> None:
    data = saved(Image.fromarray(RGB))
    other = saved(Image.fromarray(RGB[:4]))
    with pytest.raises(InvalidRequestError, match="header of 14 x 4 pixels and is 14 x 10"):
        decode(memoryview(data), read_image_header(other))
    jpeg = read_image_header(saved(Image.fromarray(RGB), "JPEG"))
    with pytest.raises(InvalidRequestError, match="its format is not what it says"):
        decode(memoryview(data), jpeg)
