"""Streaming parser of `multipart/form-data` (RFC 7578).

A body is a request in JSON, then the tensor files it names. Every byte of a file is written once,
to the memory its tensor is read from. Each piece is searched for the delimiter as it arrives; if a
delimiter may span two pieces, its beginning is held back. Framing is strict, so that it has one
meaning: no preamble, no epilogue, no white space after a boundary, no transfer encodings.
"""

import re
from enum import Enum, auto

from inlay.base.errors import BodyTooLargeError, InvalidRequestError
from inlay.http.bodies.memory import Memory, Room, private
from inlay.messages.prompt import Buffer
from inlay.tensors import ReadLimits, check_size
from inlay.tensors.tensor import quoted

MULTIPART = "multipart/form-data"

REQUEST = "request"
"""Name of the first part."""

MAX_REQUEST_BYTES = 1024 * 1024
MAX_HEADER_BYTES = 4096
"""Maximum bytes of one part's header lines."""

MAX_FILES = 128
"""Maximum files in one body."""

_MAX_NAME = 128
_boundary = re.compile(r"[0-9A-Za-z'()+_,\-./:=? ]{0,69}[0-9A-Za-z'()+_,\-./:=?]")
_disposition = re.compile(rb"[ \t]*form-data[ \t]*", re.IGNORECASE)
_parameter = re.compile(rb';[ \t]*([0-9A-Za-z*_-]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s";]+))[ \t]*')
_END_OF_HEADERS = b"\r\n\r\n"


class _Next(Enum):
    """State of the parser: the element that comes next."""

    DATA = auto()
    AFTER_BOUNDARY = auto()
    HEADERS = auto()
    NOTHING = auto()


def _refused(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"the body is not valid {MULTIPART}: {what}")


class Form:
    """Parser of one body: `feed` each piece, then `close`.

    Args:
        boundary: from the content type.
        declared: bytes of the body, if known.
        limits: of each file.
        room: gives memory for files, if the body's size is known.

    Attributes:
        request: the first part, once complete.
        parts: complete files, by name.
        size: bytes so far.

    Raises:
        InvalidRequestError: no usable boundary.
    """

    def __init__(
        self, boundary: str | None, declared: int | None, limits: ReadLimits, room: Room = private
    ) -> None:
        if boundary is None or _boundary.fullmatch(boundary) is None:
            got = quoted(boundary) if boundary else "missing"
            raise _refused(
                f"its boundary is {got}; one has 1 to 70 characters that RFC 2046 allows"
            )
        self.request = b""
        self.parts: dict[str, Buffer] = {}
        self.size = 0
        self._declared = declared
        self._limits = limits
        self._room = room
        self._delimiter = b"\r\n--" + boundary.encode("ascii")
        self._next = _Next.DATA
        # As if a line had ended before, so that the first boundary is like all others.
        self._pending = b"\r\n"
        # Bytes of `_pending` that end the headers and are not data.
        self._before_data = 0
        self._name: str | None = None
        self._data = Memory()

    def feed(self, piece: bytes | bytearray) -> None:
        """Read the next piece.

        Raises:
            InvalidRequestError: bad framing; a missing, double or unnamed part; too many parts, or
                too long a header.
            BodyTooLargeError: the request is over its limit.
            EmbeddingsError: a file is over the limit.
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
            raise _refused(f"it ends after {self.size} bytes without its closing boundary")
        if self._pending not in (b"", b"\r\n"):
            raise _refused("something follows its closing boundary")

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
        if self._name is None:
            if len(data):
                raise _refused("it does not begin with its boundary")
            return
        size = len(self._data) + len(data)
        if self._name == REQUEST:
            if size > MAX_REQUEST_BYTES:
                raise BodyTooLargeError(
                    f"part {REQUEST!r} is over the limit of {MAX_REQUEST_BYTES} bytes",
                    param=REQUEST,
                )
        elif size > self._limits.max_bytes:
            check_size(size, limits=self._limits)
        self._data.write(data)

    def _end_data(self) -> None:
        if self._before_data:
            # RFC 2046 forbids a boundary line in content, and some parsers read an empty part here.
            raise _refused("the content of a part begins with a boundary")
        if self._name == REQUEST:
            self.request = bytes(self._data.buffer().view)
        elif self._name is not None:
            self.parts[self._name] = self._data.buffer()
        self._pending = b""
        self._next = _Next.AFTER_BOUNDARY

    def _take_after_boundary(self, piece: bytes | bytearray, at: int) -> int:
        used = at + 2 - len(self._pending)
        taken = self._pending + piece[at:used]
        self._pending = b""
        if taken == b"--":
            if self._name is None:
                raise _refused(f"it has no part named {REQUEST!r}")
            self._next = _Next.NOTHING
        elif taken == b"\r\n":
            self._next = _Next.HEADERS
        elif taken in (b"-", b"\r"):
            self._pending = taken
        else:
            raise _refused("a boundary is followed by neither a line's end nor --")
        return used

    def _take_headers(self, piece: bytes | bytearray, at: int) -> int:
        before = len(self._pending)
        taken = self._pending + piece[at : at + MAX_HEADER_BYTES + len(_END_OF_HEADERS) - before]
        if taken.startswith(b"\r\n"):
            raise _refused("a part has no headers")
        end = taken.find(_END_OF_HEADERS)
        if end < 0:
            # The limit applies wherever the pieces are cut.
            if len(taken) >= MAX_HEADER_BYTES + len(_END_OF_HEADERS):
                raise _refused(f"the headers of a part are over {MAX_HEADER_BYTES} bytes")
            self._pending = taken
            return at + len(taken) - before
        # The line end before the headers was taken with their boundary.
        if self._delimiter in b"\r\n" + taken[:end]:
            raise _refused("the headers of a part hold a boundary")
        used = at + end + len(_END_OF_HEADERS) - before
        self._begin(_name_of(taken[:end]), self.size + used)
        return used

    def _begin(self, name: str, position: int) -> None:
        if self._name is None:
            if name != REQUEST:
                raise _refused(
                    f"its first part is {quoted(name)}; it must be {REQUEST!r}, the request as JSON"
                )
            limit = MAX_REQUEST_BYTES
        else:
            if name == REQUEST or name in self.parts:
                raise InvalidRequestError(
                    f"the body has two parts named {quoted(name)}", param=name
                )
            if len(self.parts) >= MAX_FILES:
                raise InvalidRequestError(f"the body has more than {MAX_FILES} files")
            limit = self._limits.max_bytes
        # The rest of the body bounds the part; unused memory is never written to.
        left = None if self._declared is None else max(self._declared - position, 0)
        room = private if name == REQUEST else self._room
        self._data = Memory(None if left is None else min(left, limit), room)
        self._name = name
        # The end of the empty line may also begin a boundary.
        self._pending, self._before_data = b"\r\n", 2
        self._next = _Next.DATA

    def _take_nothing(self, piece: bytes | bytearray, at: int) -> int:
        # Some clients write a line end after the closing boundary.
        self._pending += piece[at : at + 3]
        if not b"\r\n".startswith(self._pending):
            raise _refused("something follows its closing boundary")
        return len(piece)


def _name_of(headers: bytes) -> str:
    """Return the name of a part from its header lines. Raises `InvalidRequestError`."""
    found: str | None = None
    for line in headers.split(b"\r\n"):
        key, colon, value = line.partition(b":")
        if not colon or b"\r" in line or b"\n" in line or b"\0" in line:
            raise _refused(f"{_shown(line)} is no header line")
        match key.lower():
            case b"content-disposition":
                if found is not None:
                    raise _refused("a part has two content-dispositions")
                found = _disposed(value)
            case b"content-transfer-encoding" if value.strip().lower() not in (
                b"binary",
                b"8bit",
                b"7bit",
            ):
                raise _refused(
                    f"content-transfer-encoding {_shown(value)} is not read; send files as they are"
                )
    if found is None:
        raise _refused("a part has no content-disposition")
    return found


def _disposed(value: bytes) -> str:
    """Return the name in a content-disposition."""
    start = _disposition.match(value)
    at = -1 if start is None else start.end()
    names: list[bytes] = []
    while 0 <= at < len(value):
        parameter = _parameter.match(value, at)
        if parameter is None:
            at = -1
            break
        if parameter[1].lower() == b"name":
            names.append(parameter[3] if parameter[2] is None else parameter[2])
        at = parameter.end()
    if at < 0 or len(names) != 1 or not 0 < len(names[0]) <= _MAX_NAME:
        raise _refused(
            f"{_shown(value)} does not give a part one name of at most {_MAX_NAME} bytes"
        )
    try:
        return names[0].decode("utf-8")
    except UnicodeDecodeError as error:
        raise _refused(f"a part's name {_shown(names[0])} is not UTF-8") from error


def _shown(value: bytes) -> str:
    return repr(value.strip()[:80].decode("latin-1"))
