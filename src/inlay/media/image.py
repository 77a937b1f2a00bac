"""Formats and sizes of image files, from their content and headers alone.

Nothing is decoded and nothing is allocated by a number from the file: a header costs microseconds,
whatever it claims. Formats are told by content from a list; the name and type that a client gives
are never looked at. What follows the header is checked as far as arithmetic goes: a picture that is
larger than its bytes can hold is refused here, before a worker decodes it.

A decoder's time is bounded here too, before a worker begins: by pixels, by the scans of a JPEG, by
the runs of a BMP and the blocks of a GIF. `pixels_alone` leaves out what a decoder would read
besides pixels: profiles, comments, previews.

Sources: PNG 3rd edition, ITU T.81 (JPEG), RFC 9649 (WebP), GIF89a, Microsoft's BITMAPINFOHEADER,
Exif 2.32.
"""

import struct
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeAlias

from inlay.base.errors import InvalidRequestError
from inlay.media.geometry import MAX_PIXELS
from inlay.media.jpeg import jpeg_pixels, read_jpeg
from inlay.media.malformed import malformed, shown_tag, unpack

_malformed, _unpack = partial(malformed, "an image"), partial(unpack, "an image")

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that are read, by Pillow's names."""

_MAX_CHUNKS = 65536
_DEFLATE_MOST = 1032
"""Bytes that one byte of deflate can become at most."""

MAX_RUN_PIXELS, MAX_RUN_BYTES = 4_000_000, 2_000_000
"""Pixels and bytes of a BMP with run lengths, which Pillow decodes in Python: 70 ns a pixel, 220 ns
a byte."""

_BYTES_OF_A_BLOCK = 64
"""Bytes of a GIF for each of its blocks beyond the first; encoders fill them up to 255."""

_ORIENTATION = 0x0112

_DECODING_BYTES = {"WEBP": 20}
_MOST_DECODING_BYTES = 12
"""Bytes of memory that a pixel takes while its file is decoded to RGB, by format or at most.

Measured with 40 million pixels: WebP 16 to 17, and 19 before strips, as libwebp keeps two canvases;
a progressive JPEG in four colours 12, one with alpha or four colours 8 to 9, all others 7.
"""

FREE_BYTES = 96 << 20
"""Memory that decoding a file of any size may take."""

MEMORY_OF_A_BYTE = 4096
"""Memory beyond `FREE_BYTES` that decoding may take for each byte of a file.

Measured: coloured patterns take 95 to 160 (as WebP 670), a page of text in one bit a pixel 1,285. A
blank page scanned at 600 dpi takes 766 as JPEG; as a PNG it takes 23,700, and is refused.
"""


class ImageHeader(NamedTuple):
    """The header of an image file.

    Attributes:
        format: one of `FORMATS`.
        height: in pixels as it is seen: after `orientation`.
        width: likewise.
        orientation: 1 to 8, by Exif; whoever decodes the picture applies this one and no other.
    """

    format: str
    height: int
    width: int
    orientation: int = 1

    @property
    def decoding_bytes(self) -> int:
        """Bytes of memory that the picture takes while it is decoded."""
        each = _DECODING_BYTES.get(self.format, _MOST_DECODING_BYTES)
        return self.height * self.width * each

    @property
    def decoded_bytes(self) -> int:
        """Bytes of the decoded picture with four channels."""
        return self.height * self.width * 4


_Found: TypeAlias = tuple[int, int, int]  # width and height as stored, orientation


def read_image_header(
    data: "bytes | bytearray | memoryview", *, max_pixels: int = MAX_PIXELS
) -> ImageHeader:
    """The header of an image file; of an animation, that of its first frame.

    Args:
        data: the whole file.
        max_pixels: largest area.

    Raises:
        InvalidRequestError: not an image of a known format, truncated or contradictory, too large,
            or far larger than its file.
    """
    view = memoryview(data).cast("B")
    format_, read = _sniff(view)
    width, height, orientation = read(view)
    if width < 1 or height < 1:
        raise _malformed(format_, f"it is {width} x {height} pixels")
    if width * height > max_pixels:
        raise InvalidRequestError(
            f"an image is {width} x {height} pixels; allowed: {max_pixels} pixels in all"
        )
    if orientation > 4:
        width, height = height, width
    header = ImageHeader(format_, height, width, orientation)
    allowed = max(FREE_BYTES, MEMORY_OF_A_BYTE * len(view))
    if header.decoding_bytes > allowed:
        raise InvalidRequestError(
            f"an image of {len(view)} bytes is {width} x {height} pixels, which take "
            f"{header.decoding_bytes >> 20} MiB to decode; allowed for a file of this size: "
            f"{allowed >> 20} MiB"
        )
    return header


def pixels_alone(data: "bytes | bytearray | memoryview", header: ImageHeader) -> bytes | memoryview:
    """The file with nothing but what its pixels need, where a decoder would read more.

    Args:
        data: the whole file.
        header: as `read_image_header` read it.
    """
    view = memoryview(data).cast("B")
    if _sniff(view)[0] != header.format:
        return view
    strip = {"PNG": _png_pixels, "JPEG": jpeg_pixels}.get(header.format)
    return view if strip is None else strip(view)


def _sniff(view: memoryview) -> tuple[str, Callable[[memoryview], _Found]]:
    head = bytes(view[:512])
    if not head:
        raise InvalidRequestError("an image is empty")
    for magic, format_, read in _READERS:
        if head.startswith(magic) and (format_ != "WEBP" or head[8:12] == b"WEBP"):
            return format_, read
    looks = _name_of_other(head)
    raise InvalidRequestError(
        f"an image {looks}; formats that are read: {', '.join(FORMATS)} (by content)"
    )


_OTHERS = (
    (b"%!PS", "looks like PostScript (EPS)"),
    (b"\xc5\xd0\xd3\xc6", "looks like PostScript (EPS)"),
    (b"%PDF-", "looks like PDF"),
    (b"II*\x00", "looks like TIFF"),
    (b"MM\x00*", "looks like TIFF"),
    (b"II+\x00", "looks like TIFF"),
    (b"MM\x00+", "looks like TIFF"),
    (b"\x00\x00\x00\x0cjP  ", "looks like JPEG 2000"),
    (b"\xff\x4f\xff\x51", "looks like JPEG 2000"),
    (b"\x00\x00\x00\x0cJXL ", "looks like JPEG XL"),
    (b"\xff\x0a", "looks like JPEG XL"),
    (b"\x00\x00\x01\x00", "looks like an icon (ICO)"),
    (b"8BPS", "looks like Photoshop (PSD)"),
    (b"qoif", "looks like QOI"),
    (b"\x76\x2f\x31\x01", "looks like OpenEXR"),
    (b"DDS ", "looks like DDS"),
    (b"\x1f\x8b", "looks like a gzip archive"),
    (b"PK\x03\x04", "looks like a zip archive"),
    (b"\x1aE\xdf\xa3", "looks like a video (Matroska, WebM)"),
    (b"data:", "is a data: URL inside base64"),
)
_BRANDS = {
    b"avif": "AVIF", b"avis": "AVIF", b"heic": "HEIF", b"heix": "HEIF", b"hevc": "HEIF",
    b"hevx": "HEIF", b"heim": "HEIF", b"heis": "HEIF", b"mif1": "HEIF", b"msf1": "HEIF",
}  # fmt: skip


def _name_of_other(head: bytes) -> str:
    """Words about a file of none of the formats that are read."""
    for magic, name in _OTHERS:
        if head.startswith(magic):
            return name
    if head[4:8] == b"ftyp":
        brand = _BRANDS.get(head[8:12])
        return f"looks like {brand}" if brand else "looks like a video (MP4, QuickTime)"
    if head[:4] == b"RIFF":
        return "looks like audio or video in RIFF, not WebP"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<svg", b"<?xml", b"<!doctype svg")) or b"<svg" in text:
        return "looks like SVG or XML"
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return "looks like a web page"
    return f"of no known format begins with {head[:8].hex()}"


def _png(view: memoryview) -> _Found:
    length, kind = _unpack("PNG", ">I4s", view, 8)
    if (length, kind) != (13, b"IHDR"):
        raise _malformed("PNG", "its first chunk is not a header")
    width, height, depth, colour, compression, filters, interlace, check = _unpack(
        "PNG", ">IIBBBBBI", view, 16
    )
    if zlib.crc32(view[12:29]) != check:
        raise _malformed("PNG", "the checksum of its header is wrong")
    channels = _PNG_CHANNELS.get((colour, depth))
    if channels is None or compression or filters or interlace > 1:
        raise _malformed("PNG", f"its header says colour type {colour} with {depth} bits")
    if not (0 < width < 2**31 and 0 < height < 2**31):
        raise _malformed("PNG", f"it is {width} x {height} pixels")
    pixels, orientation = _png_chunks(view)
    # A line has a byte for its filter; interlaced pictures have more lines, never fewer bytes.
    raw = height * (1 + (width * depth * channels + 7) // 8)
    if raw > pixels * _DEFLATE_MOST:
        raise _malformed("PNG", f"{pixels} bytes of data cannot hold {width} x {height} pixels")
    return width, height, orientation


_PNG_CHANNELS = {
    **{(0, depth): 1 for depth in (1, 2, 4, 8, 16)},
    **{(3, depth): 1 for depth in (1, 2, 4, 8)},
    **{(colour, depth): count for colour, count in ((2, 3), (4, 2), (6, 4)) for depth in (8, 16)},
}
"""Channels by (colour type, bits)."""


def _png_chunks(view: memoryview) -> tuple[int, int]:
    """Bytes of compressed pixels, and the orientation, of all chunks after the header."""
    pixels, orientation = 0, 1
    for kind, chunk in _chunks(view):
        if kind == b"IDAT":
            pixels += len(chunk) - 12
        elif kind == b"eXIf":
            orientation = _orientation(chunk[8:-4])
        elif kind == b"IHDR":
            raise _malformed("PNG", "it has two headers")
    return pixels, orientation


def _chunks(view: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """The chunks between the header and the end, each with its kind, whole."""
    at = 33
    for _ in range(_MAX_CHUNKS):
        length, kind = _unpack("PNG", ">I4s", view, at)
        if kind == b"IEND":
            return
        if length > len(view) - at - 12:
            raise _malformed("PNG", "it is truncated")
        yield kind, view[at : at + 12 + length]
        at += 12 + length
    raise _malformed("PNG", f"it has more than {_MAX_CHUNKS} chunks")


def _png_pixels(view: memoryview) -> bytes:
    """The file with its palette, transparency and pixels alone, these in one chunk."""
    tables: dict[bytes, memoryview] = {}
    pixels: list[memoryview] = []
    for kind, chunk in _chunks(view):
        if kind == b"IDAT":
            pixels.append(chunk[8:-4])
        elif pixels:
            break
        elif kind in (b"PLTE", b"tRNS"):
            tables[kind] = chunk
    data = b"".join((b"IDAT", *pixels))
    end = b"\x00\x00\x00\x00IEND\xaeB`\x82"
    size, check = struct.pack(">I", len(data) - 4), struct.pack(">I", zlib.crc32(data))
    return b"".join((view[:33], *tables.values(), size, data, check, end))


def _jpeg(view: memoryview) -> _Found:
    width, height, exif = read_jpeg(view)
    return width, height, _orientation(exif)


def _webp(view: memoryview) -> _Found:
    (length,) = _unpack("WEBP", "<I", view, 4)
    if length + 8 > len(view):
        raise _malformed("WEBP", "it is truncated")
    view = view[: length + 8]
    kind, size = _unpack("WEBP", "<4sI", view, 12)
    if size > len(view) - 20:
        raise _malformed("WEBP", "it is truncated")
    body = view[20 : 20 + size]
    if kind != b"VP8X":
        return (*_webp_picture(kind, body), 1)
    flags, low, high, low2, high2 = _unpack("WEBP", "<B3xHBHB", body, 0)
    canvas = (low | high << 16) + 1, (low2 | high2 << 16) + 1
    animated, at, orientation = bool(flags & 2), 20 + size + size % 2, 1
    picture: tuple[int, int] | None = None
    for _ in range(_MAX_CHUNKS):
        if at + 8 > len(view):
            break
        kind, size = _unpack("WEBP", "<4sI", view, at)
        body = view[at + 8 : at + 8 + size]
        if len(body) < size:
            raise _malformed("WEBP", "it is truncated")
        if kind in (b"VP8 ", b"VP8L") and picture is None:
            picture = _webp_picture(kind, body)
        elif kind == b"ANMF" and animated and picture is None:
            picture = canvas
        elif kind == b"EXIF":
            orientation = _orientation(body[6:] if bytes(body[:6]) == b"Exif\x00\x00" else body)
        at += 8 + size + size % 2
    else:
        raise _malformed("WEBP", f"it has more than {_MAX_CHUNKS} chunks")
    if picture is None:
        raise _malformed("WEBP", "it has no picture")
    if picture != canvas:
        raise _malformed("WEBP", f"its canvas is {canvas} and its picture {picture}")
    return (*canvas, orientation)


def _webp_picture(kind: bytes, body: memoryview) -> tuple[int, int]:
    if kind == b"VP8 ":
        tag, start, width, height = _unpack("WEBP", "<B2x3sHH", body, 0)
        if tag & 1 or start != b"\x9d\x01\x2a":
            raise _malformed("WEBP", "its picture does not begin with a key frame")
        return width & 0x3FFF, height & 0x3FFF
    if kind == b"VP8L":
        signature, bits = _unpack("WEBP", "<BI", body, 0)
        if signature != 0x2F or bits >> 29:
            raise _malformed("WEBP", "its lossless picture has another version")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    raise _malformed("WEBP", f"its first chunk is {shown_tag(kind)}")


def _gif(view: memoryview) -> _Found:
    width, height, flags = _unpack("GIF", "<HHB", view, 6)
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    blocks = GifBlocks(view)
    while True:
        (kind,) = _unpack("GIF", "B", view, at)
        if kind == 0x2C:
            left, top, columns, lines = _unpack("GIF", "<HHHH", view, at + 1)
            if not columns or not lines:
                raise _malformed("GIF", f"its first frame is {columns} x {lines} pixels")
            # A frame beyond the screen enlarges the picture.
            return max(width, left + columns), max(height, top + lines), 1
        if kind != 0x21:
            raise _malformed("GIF", "it has no picture")
        at = blocks.after(at + 2)


class GifBlocks:
    """Steps over the blocks of extensions and frames, of which a file may have so many by its size.

    Args:
        view: the file.
    """

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._most = self._left = _MAX_CHUNKS + len(view) // _BYTES_OF_A_BLOCK

    def after(self, at: int) -> int:
        """The place after the blocks that begin at `at`.

        Raises:
            InvalidRequestError: truncated, or too many blocks.
        """
        size = 1
        while size:
            if not self._left:
                raise _malformed("GIF", f"it has more than {self._most} blocks for its size")
            self._left -= 1
            (size,) = _unpack("GIF", "B", self._view, at)
            at += 1 + size
        return at


def _bmp(view: memoryview) -> _Found:
    offset, header = _unpack("BMP", "<II", view, 10)
    if header == 12:
        width, height, planes, bits = _unpack("BMP", "<HHHH", view, 18)
        compression = 0
    elif 40 <= header <= 256:
        width, height, planes, bits, compression = _unpack("BMP", "<iiHHI", view, 18)
        height = abs(height)
    else:
        raise _malformed("BMP", f"its header is {header} bytes long")
    if bits not in (1, 4, 8, 16, 24, 32) or planes != 1 or compression > 3:
        raise InvalidRequestError(
            f"an image is a BMP with {bits} bits, {planes} planes and compression {compression}; "
            "read are 1 to 32 bits, uncompressed or run-length"
        )
    runs = compression in (1, 2)
    if runs and (width * height > MAX_RUN_PIXELS or len(view) > MAX_RUN_BYTES):
        raise InvalidRequestError(
            f"an image is a BMP with run lengths, {width} x {height} pixels in {len(view)} bytes; "
            f"allowed: {MAX_RUN_PIXELS} pixels in all, {MAX_RUN_BYTES} bytes"
        )
    if not runs and width > 0:
        needed = (width * bits + 31) // 32 * 4 * height
        if needed > len(view) - offset:
            raise _malformed("BMP", f"{len(view)} bytes cannot hold {width} x {height} pixels")
    return width, height, 1


def _orientation(tiff: memoryview) -> int:
    """The orientation in Exif data; 1 where it says none or cannot be read."""
    order = {b"II*\x00": "<", b"MM\x00*": ">"}.get(bytes(tiff[:4]))
    if order is None:
        return 1
    try:
        (at,) = struct.unpack_from(f"{order}I", tiff, 4)
        (count,) = struct.unpack_from(f"{order}H", tiff, at)
        for index in range(count):
            tag, kind, number = struct.unpack_from(f"{order}HHI", tiff, at + 2 + 12 * index)
            if tag == _ORIENTATION and (kind, number) == (3, 1):
                (value,) = struct.unpack_from(f"{order}H", tiff, at + 10 + 12 * index)
                return int(value) if 1 <= value <= 8 else 1
    except struct.error:  # it points beyond its end
        return 1
    return 1


_READERS: tuple[tuple[bytes, str, Callable[[memoryview], _Found]], ...] = (
    (b"\x89PNG\r\n\x1a\n", "PNG", _png),
    (b"\xff\xd8\xff", "JPEG", _jpeg),
    (b"RIFF", "WEBP", _webp),
    (b"GIF87a", "GIF", _gif),
    (b"GIF89a", "GIF", _gif),
    (b"BM", "BMP", _bmp),
)
