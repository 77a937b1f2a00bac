"""JPEG files: their size and their scans, and the file without what no pixel needs.

Source: ITU T.81.
"""

import re
import struct
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from inlay.base.errors import InvalidRequestError
from inlay.base.pace import yield_gil
from inlay.media.geometry import MAX_PIXELS
from inlay.media.malformed import malformed, unpack

_malformed = partial(malformed, "an image", "JPEG")
_unpack = partial(unpack, "an image", "JPEG")

MAX_SCAN_PIXELS = 16 * MAX_PIXELS
"""Pixels of a file times its scans.

A decoder goes through all pixels again for each scan: 0.6 ns a pixel for one of 20 bytes that says
nothing. Encoders write 10 scans, those that search for the smallest file up to 16.
"""

MAX_TABLE_BYTES = 256 * 1024
"""Bytes of a file's tables and of what JFIF and Adobe say of its colours; usual are 1,000."""

_MAX_SEGMENTS = 65536
_AT_A_TIME = 64 * 1024
_SCAN, _END = 0xDA, 0xD9
_STANDALONE = frozenset({0x01, *range(0xD0, 0xD8)})
_FRAMES = frozenset({0xC0, 0xC1, 0xC2})
_OTHER_FRAMES = frozenset({0xC3, *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0)})
_TABLES = frozenset({0xC4, 0xDB, 0xDD, 0xE0, 0xEE})
"""Huffman and quantisation tables, restart intervals, JFIF's and Adobe's words on colours."""

_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
"""A marker among the data of a scan, where others stand for the byte 0xFF or for a restart."""


class JpegHeader(NamedTuple):
    """Size and Exif data of a file.

    Attributes:
        width: in pixels, as stored.
        height: likewise.
        exif: the TIFF in its first Exif segment; empty without one.
    """

    width: int
    height: int
    exif: memoryview


def read_jpeg(view: memoryview) -> JpegHeader:
    """Read the header of a file.

    Raises:
        InvalidRequestError: truncated, contradictory, of a process that is not read, or with more
            scans or tables than a decoder should go through.
    """
    exif = view[:0]
    tables = 0
    size: tuple[int, int] | None = None
    scans = view[:0]
    for marker, body in _segments(view):
        if marker == _SCAN:
            scans = body
        elif marker in _FRAMES:
            if size is not None:
                raise _malformed("it has two frames")
            size = _frame(body)
        elif marker == 0xE1 and not exif and bytes(body[:6]) == b"Exif\x00\x00":
            exif = body[6:]
        elif marker in _TABLES:
            tables += len(body)
    if size is None:
        raise _malformed("no frame stands before its picture")
    if tables > MAX_TABLE_BYTES:
        raise _malformed(f"its tables take {tables} bytes; allowed: {MAX_TABLE_BYTES}")
    width, height = size
    # Each block of 8 x 8 pixels takes at least one bit.
    if -(-width // 8) * -(-height // 8) > 8 * len(scans):
        raise _malformed(f"its data cannot hold {width} x {height} pixels")
    _check_scans(scans, width, height)
    return JpegHeader(width, height, exif)


def jpeg_pixels(view: memoryview) -> bytes:
    """A file that was read, without previews, profiles and comments before its first scan."""
    kept: list[bytes | memoryview] = [b"\xff\xd8"]
    for marker, body in _segments(view):
        if marker == _SCAN:
            kept += (bytes((0xFF, _SCAN)), body)
        elif marker in _TABLES or marker in _FRAMES:
            kept += (struct.pack(">BBH", 0xFF, marker, len(body) + 2), body)
    return b"".join(kept)


def _segments(view: memoryview) -> Iterator[tuple[int, memoryview]]:
    """The marker and body of each segment, up to the first scan: its body is the rest of the file.

    That begins with its length, which the others leave out.
    """
    at = 2
    for _ in range(_MAX_SEGMENTS):
        lead, marker = _unpack("BB", view, at)
        if lead != 0xFF:
            raise _malformed(f"no marker stands at byte {at}")
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        at += 2
        if marker in _STANDALONE:
            continue
        if marker in (0xD8, _END):
            raise _malformed("it ends before its picture")
        if marker in _OTHER_FRAMES:
            raise InvalidRequestError(
                "an image is a lossless, hierarchical or arithmetic-coded JPEG; baseline and "
                "progressive JPEG are read"
            )
        (length,) = _unpack(">H", view, at)
        if length < 2 or at + length > len(view):
            raise _malformed("it is truncated")
        if marker == _SCAN:
            yield marker, view[at:]
            return
        yield marker, view[at + 2 : at + length]
        at += length
    raise _malformed(f"it has more than {_MAX_SEGMENTS} segments before its picture")


def _frame(body: memoryview) -> tuple[int, int]:
    bits, height, width, components = _unpack(">BHHB", body)
    if bits != 8 or components not in (1, 3, 4):
        raise _malformed(f"its frame has {components} components of {bits} bits")
    return width, height


def _check_scans(scans: memoryview, width: int, height: int) -> None:
    """Raise `InvalidRequestError` for too many scans, which follow the first one's marker."""
    most = MAX_SCAN_PIXELS // max(1, width * height)
    count, at = 1, 0
    for _ in range(_MAX_SEGMENTS):
        if count > most:
            raise InvalidRequestError(
                f"an image is a JPEG of {width} x {height} pixels in more than {most} scans; "
                f"allowed: {MAX_SCAN_PIXELS} pixels of all scans together"
            )
        # The length of what was found last, then data up to the next marker.
        (length,) = _unpack(">H", scans, at)
        at = _after_marker(scans, at + length)
        if not at or scans[at - 1] == _END:
            return
        count += scans[at - 1] == _SCAN
    raise _malformed(f"it has more than {_MAX_SEGMENTS} segments among its scans")


def _after_marker(scans: memoryview, at: int) -> int:
    """The place after the next marker; 0 if there is none."""
    while at < len(scans):
        found = _MARKER.search(scans, at, at + _AT_A_TIME + 1)
        if found is not None:
            return found.end()
        at += _AT_A_TIME
        yield_gil()
    return 0
