"""Lines of an input file: where they stand, what they ask for, and what becomes of them."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
from blake3 import blake3

from inlay.base.errors import InvalidRequestError, parser_words
from inlay.base.pace import yield_gil
from inlay.http.bodies.base64_extractor import PARSER_ERRORS, ExtractedBody
from inlay.store.kept.contents import Contents, Piece
from inlay_batches.records import LineProblem, Place, Stop, UsageSum

T = TypeVar("T")

MAX_CUSTOM_ID = 512
_url = re.compile(r"(/[A-Za-z0-9_.-]{1,64}){1,8}")
_BOM = b"\xef\xbb\xbf"
_WHITE = b" \t\r"
_ends = re.compile(rb"\n+")
_A_TURN = 128
"""Lines after which others have a turn."""


class Line(NamedTuple):
    """A line that is not blank.

    Attributes:
        number: from 0, blank lines counted.
        offset: byte of the file where it begins.
        end: byte where the next one begins.
        data: its bytes; None where they are more than allowed.
    """

    number: int
    offset: int
    end: int
    data: bytes | bytearray | None


class _Cutter:
    """Cuts a file into lines, a piece of at least three bytes at a time.

    Attributes:
        size: bytes so far of the line whose end is still to come.
    """

    def __init__(self, start: Place, max_bytes: int) -> None:
        self._number, self._offset = start.line, start.offset
        self._max = max_bytes
        self.size = 0
        # Of a line that is too long nothing is kept.
        self._parts: list[bytes] = []

    def lines(self, data: bytes, last: bool) -> list[Line]:
        """Return the lines that end in a piece; of the last one all."""
        found: list[Line] = []
        at = count = 0
        # A pattern would take ten times as long to find the end, and let nobody else run.
        while (end := data.find(b"\n", at)) >= 0:
            if not count % _A_TURN:
                yield_gil()
            count += 1
            self._end(data[at:end], found)
            ends = _ends.match(data, end)
            at = end + 1 if ends is None else ends.end()
            blank = at - end - 1
            self._number, self._offset = self._number + blank, self._offset + blank
        if last:
            self._end(data[at:], found)
        else:
            self._keep(data[at:])
        return found

    def _keep(self, text: bytes) -> None:
        first = self._offset == self.size == 0
        self.size += len(text)
        if self.size > self._max:
            self._parts.clear()
        else:
            self._parts.append(text.removeprefix(_BOM) if first else text)

    def _end(self, text: bytes, found: list[Line]) -> None:
        """End a line with `text`, and add it unless it is blank."""
        self._keep(text)
        number, offset, after = self._number, self._offset, self._offset + self.size + 1
        if self.size > self._max:
            found.append(Line(number, offset, after, None))
        elif line := _stripped(self._parts):
            found.append(Line(number, offset, after, line))
        self._parts, self.size = [], 0
        self._number, self._offset = number + 1, after


def _stripped(parts: list[bytes]) -> bytes | bytearray:
    """Return a line that came in parts, without white space around it."""
    if len(parts) == 1:
        return parts[0].strip(_WHITE)
    for end in (0, -1):
        while parts and not parts[end].strip(_WHITE):
            del parts[end]
    if not parts:
        return b""
    parts[0] = parts[0].lstrip(_WHITE)
    parts[-1] = parts[-1].rstrip(_WHITE)
    return ExtractedBody([*parts], sum(map(len, parts))).reassembled()


class Prepare(Protocol):
    """Runs CPU work on so many bytes, in a thread where they are many."""

    def __call__(self, size: int, work: Callable[[], T], /) -> Awaitable[T]:
        """Return what `work` returns. Raises what it raises."""


async def blocks_of(
    contents: Contents, pieces: Sequence[Piece], start: Place, max_bytes: int, prepare: Prepare
) -> AsyncIterator[list[Line]]:
    """Yield the lines of a file from a place on, some at a time.

    What it holds is a piece and one line of `max_bytes`. Raises as `Contents.read`.
    """
    cutter, end = _Cutter(start, max_bytes), 0
    for index, piece in enumerate(pieces):
        begin, end = end, end + piece.size
        if end <= start.offset:
            continue
        data = await contents.read(piece)
        data = data[max(0, start.offset - begin) :]
        last = index == len(pieces) - 1
        yield await prepare(cutter.size + len(data), partial(cutter.lines, data, last))


class LineRequest(NamedTuple):
    """Request of a line; `body` is JSON."""

    custom_id: str
    url: str
    body: bytes


class _RequestLine(msgspec.Struct):
    # Nothing within them is parsed before its size is known.
    custom_id: msgspec.Raw = msgspec.Raw(b"")
    method: msgspec.Raw = msgspec.Raw(b"")
    url: msgspec.Raw = msgspec.Raw(b"")
    body: msgspec.Raw = msgspec.Raw(b"")


_SHORT = 12 * MAX_CUSTOM_ID + 2
"""Bytes of the longest field that may be right: a character takes twelve where it is escaped."""


def _value(given: msgspec.Raw) -> Any:
    """Return what a field holds; of one that is too long the beginning of its JSON."""
    text = memoryview(given)
    if not 0 < len(text) <= _SHORT:
        return bytes(text[:_SHORT]).decode(errors="replace")
    return msgspec.json.decode(text)


_decoder = msgspec.json.Decoder(_RequestLine)


class LineError(InvalidRequestError):
    """A line that cannot be run; `code` is OpenAI's."""


def read_line(line: Line, endpoint: str | None, max_bytes: int) -> LineRequest:
    """Return what a line asks for.

    Args:
        line: of the input file.
        endpoint: of its batch; None where each line has its own.
        max_bytes: of a line, for the error of a longer one.

    Raises:
        LineError: it is not what a line of a batch for `endpoint` is.
    """
    if line.data is None:
        raise LineError(
            f"the line has more than {max_bytes} bytes (--max-body-bytes)", code="line_too_long"
        )
    try:
        found = _decoder.decode(line.data)
        id_, method, url = map(_value, (found.custom_id, found.method, found.url))
    except PARSER_ERRORS as error:
        raise LineError(
            f"the line is not a JSON object of a request: {parser_words(error, line.data)}",
            code="invalid_json_line",
        ) from error
    for name in ("custom_id", "method", "url", "body"):
        if getattr(found, name) in (msgspec.Raw(b""), msgspec.Raw(b"null")):
            raise LineError(f"{name} is missing", code="missing_required_parameter", param=name)
    body = bytes(found.body)
    if not isinstance(id_, str) or not 0 < len(id_) <= MAX_CUSTOM_ID:
        raise LineError(
            f"custom_id must be a text of 1 to {MAX_CUSTOM_ID} characters, got {_shown(id_)}",
            code="invalid_custom_id",
            param="custom_id",
        )
    if method != "POST":
        raise LineError(
            f"method must be POST, got {_shown(method)}",
            code="invalid_method",
            param="method",
        )
    fits = url == endpoint
    if endpoint is None:
        fits = isinstance(url, str) and _url.fullmatch(url) is not None
    if not fits:
        wanted = "the path of a route" if endpoint is None else f"{endpoint}, as of the batch"
        raise LineError(
            f"url must be {wanted}, got {_shown(url)}",
            code="url_mismatch",
            param="url",
        )
    if not body.startswith(b"{"):
        raise LineError("body must be an object", code="invalid_request", param="body")
    return LineRequest(id_, url, body)


def _shown(value: object) -> str:
    return ascii(value)[:80]


def seed_of(batch: str, custom_id: str) -> int:
    """Return the seed of a line that has none, so that it has one answer however often it runs."""
    digest = blake3(f"{batch}\0{custom_id}".encode(), derive_key_context="inlay 2026 batch seed")
    return int.from_bytes(digest.digest(8), "little") >> 1


def with_seed(body: bytes, seed: int) -> bytes:
    """Return a body, an object in JSON without white space around it, with a seed of its own."""
    # The last of two fields of one name counts, so that this one also replaces a null.
    inner = body[:-1].rstrip()
    return b'%b%b"seed":%d}' % (inner, b"" if inner.endswith(b"{") else b",", seed)


class Outcome(NamedTuple):
    """Result of a line.

    Attributes:
        number: of the line.
        text: its line in a file, with a line's end.
        status: HTTP status; None where it did not run.
        usage: tokens.
        vector: float32, where it goes to a matrix and not into the line.
    """

    number: int
    text: bytes
    status: int | None
    usage: UsageSum = UsageSum()
    vector: bytes = b""


class _Response(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _OutputLine(msgspec.Struct, frozen=True):
    id: str
    custom_id: str
    response: _Response | None
    error: dict[str, str] | None


_encode = msgspec.json.Encoder().encode


def _line_id(batch: str, number: int) -> str:
    return f"batch_req_{batch.removeprefix('batch_')}{number:x}"


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    input_tokens: int = 0
    completion_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _UsageAnswer(msgspec.Struct, frozen=True):
    usage: _Usage | None = None


_answers = msgspec.json.Decoder(_UsageAnswer)


def usage_of(body: bytes) -> UsageSum:
    """Return the usage in an answer, a JSON object; zeros where it has none, as an error."""
    found = _answers.decode(body).usage
    if found is None:
        return UsageSum()
    read = found.prompt_tokens_details or found.input_tokens_details or _Details()
    made = found.completion_tokens_details or found.output_tokens_details or _Details()
    return UsageSum(
        found.prompt_tokens or found.input_tokens,
        read.cached_tokens or 0,
        found.completion_tokens or found.output_tokens,
        made.reasoning_tokens or 0,
    )


def answered(
    batch: str,
    number: int,
    custom_id: str,
    status: int,
    request_id: str,
    body: bytes,
    usage: UsageSum,
) -> Outcome:
    """Return the outcome of a line that was answered with `body`, JSON."""
    response = _Response(status, request_id, msgspec.Raw(body))
    text = _encode(_OutputLine(_line_id(batch, number), custom_id, response, None))
    return Outcome(number, text + b"\n", status, usage)


_NOT_RUN: dict[Stop, str] = {
    "batch_cancelled": "the batch was cancelled before this request ran",
    "batch_expired": "the batch's completion window ended before this request ran",
    "storage_full": "the files of this key reached their limit (--files-tenant-bytes)",
}


def not_run(batch: str, number: int, custom_id: str, why: Stop) -> Outcome:
    """Return the outcome of a line that did not run."""
    error = {"code": why, "message": _NOT_RUN[why]}
    text = _encode(_OutputLine(_line_id(batch, number), custom_id, None, error))
    return Outcome(number, text + b"\n", None)


def problem_of(line: Line, error: InvalidRequestError) -> LineProblem:
    """Return the error of a line as clients see it."""
    return LineProblem(error.code or "invalid_request", error.message, line.number + 1, error.param)
