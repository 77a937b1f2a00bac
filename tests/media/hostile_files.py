"""Files of pictures that are cheap to send and dear to decode."""

import struct
import zlib
from io import BytesIO

from PIL import Image


def many_scans(size: tuple[int, int], count: int) -> bytes:
    """A progressive JPEG that repeats its last scan, of 20 bytes."""
    out = BytesIO()
    Image.new("RGB", size).save(out, "JPEG", progressive=True)
    data = out.getvalue()
    scan = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + scan * count + data[-2:]


def run_lengths(size: tuple[int, int], runs: bytes) -> bytes:
    """A BMP of 8 bits a pixel with run lengths."""
    start = 54 + 1024
    info = struct.pack("<IiiHHIIiiII", 40, *size, 1, 8, 1, len(runs), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", start + len(runs), 0, 0, start) + info + bytes(1024) + runs


def png_with(chunks: bytes) -> bytes:
    """A PNG of one pixel with chunks between its header and the pixel."""
    out = BytesIO()
    Image.new("RGB", (1, 1), (1, 2, 3)).save(out, "PNG")
    data = out.getvalue()
    return data[:33] + chunks + data[33:]


def chunk(kind: bytes, body: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I4s", len(body), kind) + body + struct.pack(">I", zlib.crc32(kind + body))


def segment(marker: int, body: bytes) -> bytes:
    """A segment of a JPEG."""
    return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body
