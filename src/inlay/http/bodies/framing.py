"""Framing of `multipart/form-data` (RFC 7578), read as it arrives.

Each piece is searched for the delimiter as it comes; if a delimiter may span two pieces, its
beginning is held back. It is strict, so that a body has one meaning: no preamble, no epilogue, no
white space after a boundary, no transfer encodings.
"""

import re
from enum import Enum, auto
from typing import NamedTuple, Protocol

from inlay.base.errors import InvalidRequestError
from inlay.tensors.tensor import quoted

MULTIPART = "multipart/form-data"

MAX_HEADER_BYTES = 4096
"""Maximum bytes of one part's header lines."""

_MAX_NAME = 128
_boundary = re.compile(r"[0-9A-Za-z'()+_,\-./:=? ]{0,69}[0-9A-Za-z'()+_,\-./:=?]")
_disposition = re.compile(rb"[ \t]*form-data[ \t]*", re.IGNORECASE)
_parameter = re.compile(rb';[ \t]*([0-9A-Za-z*_-]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s";]+))[ \t]*')
_escaped = re.compile(rb"\\(.)", re.DOTALL)
_END_OF_HEADERS = b"\r\n\r\n"


class _Next(Enum):
    """State of the parser: the element that comes next."""

    DATA = auto()
    AFTER_BOUNDARY = auto()
    HEADERS = auto()
    NOTHING = auto()


def refused(what: str) -> InvalidRequestError:
    """Return the error of a body that is no such form."""
    return InvalidRequestError(f"the body is not valid {MULTIPART}: {what}")


class PartHead(NamedTuple):
    """Headers of a part.

    Attributes:
        name: of its field.
        filename: of a file; None for a field that is no file.
        position: bytes of the body before its content.
    """

    name: str
    filename: str | None
    position: int


class Parts(Protocol):
    """Takes the parts of one body; what it raises is raised by `Framing.feed`."""

    def begin(self, head: PartHead) -> None: ...

    def write(self, data: memoryview) -> None:
        """Take the next bytes of its content; their memory is reused."""

    def end(self) -> None: ...

    def finish(self) -> None:
        """Take the end of the body, once its closing boundary has come."""


class Framing:
    """Parser of one body: `feed` each piece, then `close`.

    Args:
        boundary: from the content type.
        parts: takes what is found.

    Attributes:
        size: bytes so far.

    Raises:
        InvalidRequestError: no usable boundary.
    """

    def __init__(self, boundary: str | None, parts: Parts) -> None:
        if boundary is None or _boundary.fullmatch(boundary) is None:
            got = quoted(boundary) if boundary else "missing"
            raise refused(f"its boundary is {got}; one has 1 to 70 characters that RFC 2046 allows")
        self.size = 0
        self._parts = parts
        self._begun = False
        self._delimiter = b"\r\n--" + boundary.encode("ascii")
        self._next = _Next.DATA
        # As if a line had ended before, so that the first boundary is like all others.
        self._pending = b"\r\n"
        # Bytes of `_pending` that end the headers and are not data.
        self._before_data = 0

    def feed(self, piece: bytes | bytearray) -> None:
        """Read the next piece.

        Raises:
            InvalidRequestError: bad framing, an unnamed part, or too long a header.
            InlayError: a part is refused.
        """
        at = 0
        while at < len(piece):
            match self._next:
                case _Next.DATA:
                    at = self._take_data(piece, at)
                case _Next.AFTER_BOUNDARY:
                    at = self._take_after_boundary(piece, at)
                case _Next.HEADERS:
                    at = self._take_headers(piece, at)
                case _Next.NOTHING:
                    at = self._take_nothing(piece, at)
        self.size += len(piece)

    def close(self) -> None:
        """Check that the body is complete. Raises `InvalidRequestError`."""
        if self._next is not _Next.NOTHING:
            raise refused(f"it ends after {self.size} bytes without its closing boundary")
        if self._pending not in (b"", b"\r\n"):
            raise refused("something follows its closing boundary")

    def _take_data(self, piece: bytes | bytearray, at: int) -> int:
        """Take data up to a delimiter; return the position in `piece` after it."""
        delimiter = self._delimiter
        if self._pending:
            # A delimiter has a carriage return only at its start, so the bytes held back cannot
            # begin another one.
            wanted = delimiter[len(self._pending) :]
            got = piece[at : at + len(wanted)]
            if got == wanted:
                self._end_data()
                return at + len(wanted)
            if wanted.startswith(got):
                self._pending += got
                return at + len(got)
            self._write(memoryview(self._pending)[self._before_data :])
            self._pending, self._before_data = b"", 0
        found = piece.find(delimiter, at)
        if found >= 0:
            self._write(memoryview(piece)[at:found])
            self._end_data()
            return found + len(delimiter)
        end = len(piece)
        last = piece.rfind(b"\r", max(at, end - len(delimiter) + 1))
        if last >= 0 and delimiter.startswith(piece[last:]):
            self._pending = bytes(piece[last:])
            self._write(memoryview(piece)[at:last])
        else:
            self._write(memoryview(piece)[at:])
        return end

    def _write(self, data: memoryview) -> None:
        if self._begun:
            self._parts.write(data)
        elif len(data):
            raise refused("it does not begin with its boundary")

    def _end_data(self) -> None:
        if self._before_data:
            # RFC 2046 forbids a boundary line in content, and some parsers read an empty part here.
            raise refused("the content of a part begins with a boundary")
        if self._begun:
            self._parts.end()
        self._pending = b""
        self._next = _Next.AFTER_BOUNDARY

    def _take_after_boundary(self, piece: bytes | bytearray, at: int) -> int:
        used = at + 2 - len(self._pending)
        taken = self._pending + piece[at:used]
        self._pending = b""
        if taken == b"--":
            self._parts.finish()
            self._next = _Next.NOTHING
        elif taken == b"\r\n":
            self._next = _Next.HEADERS
        elif taken in (b"-", b"\r"):
            self._pending = taken
        else:
            raise refused("a boundary is followed by neither a line's end nor --")
        return used

    def _take_headers(self, piece: bytes | bytearray, at: int) -> int:
        before = len(self._pending)
        taken = self._pending + piece[at : at + MAX_HEADER_BYTES + len(_END_OF_HEADERS) - before]
        if taken.startswith(b"\r\n"):
            raise refused("a part has no headers")
        end = taken.find(_END_OF_HEADERS)
        if end < 0:
            # The limit applies wherever the pieces are cut.
            if len(taken) >= MAX_HEADER_BYTES + len(_END_OF_HEADERS):
                raise refused(f"the headers of a part are over {MAX_HEADER_BYTES} bytes")
            self._pending = taken
            return at + len(taken) - before
        # The line end before the headers was taken with their boundary.
        if self._delimiter in b"\r\n" + taken[:end]:
            raise refused("the headers of a part hold a boundary")
        used = at + end + len(_END_OF_HEADERS) - before
        name, filename = _named(taken[:end])
        self._parts.begin(PartHead(name, filename, self.size + used))
        self._begun = True
        # The end of the empty line may also begin a boundary.
        self._pending, self._before_data = b"\r\n", 2
        self._next = _Next.DATA
        return used

    def _take_nothing(self, piece: bytes | bytearray, at: int) -> int:
        # Some clients write a line end after the closing boundary.
        self._pending += piece[at : at + 3]
        if not b"\r\n".startswith(self._pending):
            raise refused("something follows its closing boundary")
        return len(piece)


def _named(headers: bytes) -> tuple[str, str | None]:
    """Return (name, filename) of a part from its header lines. Raises `InvalidRequestError`."""
    found: tuple[str, str | None] | None = None
    for line in headers.split(b"\r\n"):
        key, colon, value = line.partition(b":")
        if not colon or b"\r" in line or b"\n" in line or b"\0" in line:
            raise refused(f"{_shown(line)} is no header line")
        match key.lower():
            case b"content-disposition":
                if found is not None:
                    raise refused("a part has two content-dispositions")
                found = _disposed(value)
            case b"content-transfer-encoding" if value.strip().lower() not in (
                b"binary",
                b"8bit",
                b"7bit",
            ):
                raise refused(
                    f"content-transfer-encoding {_shown(value)} is not read; send files as they are"
                )
    if found is None:
        raise refused("a part has no content-disposition")
    return found


def _disposed(value: bytes) -> tuple[str, str | None]:
    """Return (name, filename) in a content-disposition."""
    start = _disposition.match(value)
    at = -1 if start is None else start.end()
    names: list[bytes] = []
    filename: str | None = None
    while 0 <= at < len(value):
        parameter = _parameter.match(value, at)
        if parameter is None:
            at = -1
            break
        text = parameter[3] if parameter[2] is None else parameter[2]
        match parameter[1].lower():
            case b"name":
                names.append(text)
            case b"filename":
                filename = _escaped.sub(rb"\1", text).decode("utf-8", "replace")
        at = parameter.end()
    if at < 0 or len(names) != 1 or not 0 < len(names[0]) <= _MAX_NAME:
        raise refused(f"{_shown(value)} does not give a part one name of at most {_MAX_NAME} bytes")
    try:
        return names[0].decode("utf-8"), filename
    except UnicodeDecodeError as error:
        raise refused(f"a part's name {_shown(names[0])} is not UTF-8") from error


def _shown(value: bytes) -> str:
    return repr(value.strip()[:80].decode("latin-1"))
