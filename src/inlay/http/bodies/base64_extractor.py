"""Extraction of large base64 strings from a JSON body while it arrives.

A string of at least `RUN` characters that is base64, or a data: URL in base64, is decoded into
memory of its own as it arrives; only the rest of the body is kept. At the end a nonce stands in
place of each run of base64, and a JSON parser reads that text. A string that equals a nonce, where
the schema expects tensor data or a file, stands for the decoded bytes; so does the end of a data:
URL, behind its comma. In every other case (a nonce elsewhere, inside a longer string, or missing; a
run that is not base64; an error of the parser) the whole body is reassembled and parsed in full. So
the result is always that of the parser alone.

Proof: a string that ends with the nonce ended at the quote after the run, one that equals it also
began at the quote before it, and base64 has the same characters inside JSON as outside. A run after
an escaped quote is part of a longer string; one between a closing and an opening quote is invalid
JSON with or without the nonce. Decoding and encoding strict base64 restores the same characters,
except for unused bits in the last four, which are kept.
"""

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
import pybase64

from inlay.base.errors import EmbeddingsError, InvalidRequestError
from inlay.base.pace import yield_gil
from inlay.http.bodies.accounting import RequestMemory
from inlay.http.bodies.memory import Memory, Room, private
from inlay.http.errors import from_parser
from inlay.messages.prompt import Buffer
from inlay.tensors import ReadLimits, check_size

RUN = 64 * 1024
"""Minimum characters of a string that is extracted."""

STEP = 256 * 1024
"""Bytes processed at a time: they stay in the CPU cache while received, decoded and moved."""

_ENCODED = STEP // 4 * 3
"""Bytes that are encoded at a time; a multiple of three."""

_KEPT = 4 * STEP
_REASSEMBLED = 1024 * 1024
_QUOTE = b'"'
_SAMPLE = 256
_alphabet = re.compile(rb"[A-Za-z0-9+/]+")
_data_url = re.compile(rb"data:[!#-\[\]-~]{0,128}?;base64,", re.IGNORECASE)
PARSER_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Base64Span:
    """A base64 string that was extracted from a body.

    Attributes:
        data: the decoded bytes.
        last: its last four characters.
        whole: True if it is base64 up to a quote. Otherwise `data` is its decoded beginning, and
            the rest is in the text after it.
    """

    data: Buffer
    last: bytes = b""
    whole: bool = True

    def encoded(self) -> Iterator[bytes]:
        """Yield the characters that were extracted, in order."""
        exact = len(self.data) - len(_decode(self.last))
        for start in range(0, exact, _ENCODED):
            yield pybase64.b64encode(self.data.view[start : min(start + _ENCODED, exact)])
        yield self.last


@dataclass(frozen=True, slots=True)
class ExtractedBody:
    """A body as text and extracted strings.

    Attributes:
        pieces: pieces in order: unchanged text, or a `Base64Span`.
        size: bytes of the whole body.
    """

    pieces: list[bytes | bytearray | Base64Span]
    size: int

    def __len__(self) -> int:
        return self.size

    @property
    def parsed_size(self) -> int:
        """Bytes that parsing takes time for.

        Those of the text. Of a large body all, which is put together again if the text alone is
        not valid.
        """
        if self.size > _REASSEMBLED:
            return self.size
        return sum(len(piece) for piece in self.pieces if not isinstance(piece, Base64Span))

    @property
    def runs(self) -> list[Base64Span]:
        """The extracted strings, in order."""
        return [piece for piece in self.pieces if isinstance(piece, Base64Span)]

    def text(self, stand_in: Callable[[Base64Span], bytes]) -> bytes:
        """Return the body with the result of `stand_in` for each run."""
        return b"".join(
            stand_in(piece) if isinstance(piece, Base64Span) else piece for piece in self.pieces
        )

    def reassembled(self) -> bytes | bytearray:
        """Return the body as it came, put together in steps between which others may run."""
        if len(self.pieces) == 1 and not isinstance(self.pieces[0], Base64Span):
            return self.pieces[0]
        whole, at = bytearray(self.size), 0
        for piece in self.pieces:
            for part in piece.encoded() if isinstance(piece, Base64Span) else _steps(piece):
                whole[at : at + len(part)] = part
                at += len(part)
                yield_gil()
        return whole


class Base64Extractor:
    """Extracts base64 strings as a body arrives: `feed` each piece, then `close`.

    Args:
        expected: bytes of the body, if known.
        room: gives memory for decoded strings.
        check: called with the bytes that are certain to be text so far; raises if too many.
    """

    def __init__(
        self,
        expected: int | None = None,
        room: Room = private,
        check: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._expected = expected
        self._room = room
        self._check = check
        # Bytes of text in the pieces, without text that may still begin a run.
        self._num_text = 0
        self._size = 0
        self._pieces: list[bytes | bytearray | Base64Span] = []
        self._text = bytearray()
        # Search state: no run begins before `_floor`, and none that reaches `_probe` was missed.
        self._floor = 0
        self._probe = RUN
        # Of the current run: its memory, and its last one to four characters, which may be padding.
        self._memory: Memory | None = None
        self._carry = b""
        self._broken = False

    def feed(self, piece: bytes | bytearray | memoryview) -> None:
        """Take the next piece; its memory may be reused afterwards."""
        view = memoryview(piece)
        for start in range(0, len(view), STEP):
            self._take(view[start : start + STEP])
        self._check(self._num_text)

    def close(self) -> ExtractedBody:
        """Return the body after its last piece."""
        if self._memory is not None:
            self._finish(self._carry)
        self._pieces.append(self._text)
        return ExtractedBody(self._pieces, self._size)

    def _take(self, piece: memoryview) -> None:
        self._size += len(piece)
        if self._memory is not None:
            self._decode_more(piece)
        else:
            self._text += piece
        # After a run ends in this piece, others may begin in the rest of it.
        while self._memory is None and not self._broken and self._search():
            pass
        if len(self._text) > _KEPT:
            self._put_by(
                len(self._text) if self._broken else max(self._floor, self._probe - RUN - 1)
            )

    def _search(self) -> bool:
        """Search the text for a run; return True if one was found, whole or not.

        Any `RUN` consecutive positions contain one of the probes, which are `RUN` apart. So only
        the probes are read, and the quotes around them are searched: the cost is a fraction of a
        pass over the text.
        """
        text = self._text
        while self._probe < len(text):
            probe = self._probe
            if text[probe] == _QUOTE[0]:
                self._probe = probe + RUN
                continue
            left = text.rfind(_QUOTE, max(self._floor, probe - RUN - 1), probe)
            right = text.find(_QUOTE, probe)
            if left < 0:
                self._probe = max(probe + RUN, right + 1)
                continue
            stop = right if right >= 0 else len(text)
            if stop - left - 1 < RUN:
                if right < 0:
                    return False
                self._probe = probe + RUN
                continue
            start = _start_of_base64(text, left + 1)
            if start is not None:
                self._begin(start)
                return True
            self._floor, self._probe = (
                (right + 1, right + RUN) if right >= 0 else (probe, probe + RUN)
            )
        return False

    def _begin(self, start: int) -> None:
        run = bytes(memoryview(self._text)[start:])
        before = self._size - len(run)
        self._put_by(start)
        self._text = bytearray()
        left = None if self._expected is None else max(self._expected - before, len(run))
        self._memory = Memory(None if left is None else _decoded_most(left), self._room)
        self._carry = b""
        self._decode_more(memoryview(run))

    def _decode_more(self, piece: memoryview) -> None:
        came = piece
        if self._carry:
            # Only the quad that the piece completes is joined: joining all takes as long as
            # decoding.
            lacking = 4 - len(self._carry)
            quad = b"".join((self._carry, piece[:lacking]))
            if len(piece) > lacking and self._write(quad):
                came = piece[lacking:]
            else:
                came = memoryview(b"".join((self._carry, piece)))
        # At least one character is kept back, so that padding is always in `_carry`.
        quads = (len(came) - 1) // 4 * 4
        carry = bytes(came[quads:])
        if _QUOTE not in carry and self._write(came[:quads]):
            self._carry = carry
        else:
            self._finish(bytes(came))

    def _write(self, quads: bytes | memoryview) -> bool:
        """Decode quads without padding; return False, with nothing written, if they are none."""
        assert self._memory is not None
        data = _decoded(quads)
        if data is None or len(data) != len(quads) // 4 * 3:
            return False
        self._memory.write(data)
        return True

    def _finish(self, rest: bytes) -> None:
        """End the run in `rest`, or find that it is no base64."""
        assert self._memory is not None
        end = rest.find(_QUOTE)
        data = _decoded(rest[:end]) if end >= 0 else None
        if data is None:
            # Not encoded back here: it may be long, and the parser's thread does it.
            self._pieces.append(Base64Span(self._memory.buffer(), whole=False))
            self._num_text += len(self._memory) // 3 * 4
            self._text, self._broken = bytearray(rest), True
        else:
            self._memory.write(data)
            self._pieces.append(Base64Span(self._memory.buffer(), rest[max(end - 4, 0) : end]))
            self._text = bytearray(memoryview(rest)[end:])
        self._floor, self._probe = 1, RUN
        self._memory = None

    def _put_by(self, end: int) -> None:
        """Move text that is not searched again to the pieces."""
        self._pieces.append(bytes(memoryview(self._text)[:end]))
        self._num_text += end
        del self._text[:end]
        self._floor, self._probe = max(self._floor - end, 0), max(self._probe - end, 0)


def _steps(text: bytes | bytearray) -> Iterator[memoryview]:
    view = memoryview(text)
    return (view[start : start + STEP] for start in range(0, len(view), STEP))


def _start_of_base64(text: bytearray, start: int) -> int | None:
    """Return the index at which the base64 of a string begins, if it looks like any."""
    url = _data_url.match(text, start)
    begin = start if url is None else url.end()
    # A sample only, so that long plain text is not extracted in vain; decoding checks the rest.
    return begin if _alphabet.fullmatch(text, begin, begin + _SAMPLE) is not None else None


def _decoded(text: bytes | memoryview) -> bytes | None:
    try:
        return _decode(text)
    except ValueError:
        return None


def _decode(text: str | bytes | memoryview) -> bytes:
    return pybase64.b64decode(text, validate=True)


def _decoded_most(length: int) -> int:
    return (length + 3) // 4 * 3


@dataclass(frozen=True, slots=True)
class Parsed(Generic[T]):
    """A parsed request, and the data that was extracted from it.

    Attributes:
        request: the request, with nonces in place of extracted strings.
        lifted: decoded bytes by nonce.
    """

    request: T
    lifted: Mapping[str, Buffer]

    def data(self, text: str, *, limits: ReadLimits) -> Buffer:
        """Return the decoded bytes of a tensor-data string. Raises `EmbeddingsError`."""
        data = self.lifted.get(text)
        return Buffer(decode_base64(text, limits=limits)) if data is None else data


def parse_extracted(
    body: ExtractedBody,
    decoder: msgspec.json.Decoder[T],
    tensors_in: Callable[[T], Sequence[str]],
    files_in: Callable[[T], Sequence[str]],
    limits: ReadLimits,
    intake: RequestMemory | None,
) -> Parsed[T] | InvalidRequestError | None:
    """Parse a body with nonces: the request, or an error that the full parse may state better.

    None if an extracted string is not tensor data.
    """
    if not all(run.whole for run in body.runs):
        return None
    key = secrets.token_hex(16)
    spans: dict[str, Base64Span] = {}

    def nonce(run: Base64Span) -> bytes:
        name = f"{key}.{len(spans)}"
        spans[name] = run
        return name.encode()

    rest = body.text(nonce)
    if intake is not None:
        intake.parsing(rest)
    try:
        request = decoder.decode(rest)
        wanted = tensors_in(request)
        files = files_in(request)
    except InvalidRequestError as error:
        return error.with_traceback(None)
    except PARSER_ERRORS as error:
        return from_parser(error, decoder.type, rest)
    if sum(text in spans for text in (*wanted, *files)) != len(spans):
        return None
    for text in wanted:
        if text in spans:
            _check_fits(len(spans[text].data), limits)
        else:
            _check_fits(decoded_size(text), limits)
    if intake is not None:
        intake.on_decoded(len(run.data) for run in spans.values())
        intake.decoding(decoded_size(text) for text in (*wanted, *files) if text not in spans)
    return Parsed(request, {nonce: run.data for nonce, run in spans.items()})


def check_encoded(texts: Sequence[str], limits: ReadLimits) -> list[int]:
    """Return the decoded sizes of base64 strings; raise `EmbeddingsError` for one over the limit.

    From the lengths alone, before decoding. Too short is checked later: it may not be base64.
    """
    sizes = [decoded_size(text) for text in texts]
    for size in sizes:
        _check_fits(size, limits)
    return sizes


def _check_fits(size: int, limits: ReadLimits) -> None:
    if size > limits.max_bytes:
        check_size(size, limits=limits)


def decoded_size(text: str) -> int:
    """Return the bytes that a base64 string decodes to."""
    return len(text) // 4 * 3 - text[-2:].count("=")


def decode_base64(text: str, *, limits: ReadLimits) -> bytes:
    """Decode strict base64 (RFC 4648, no white space).

    Raises:
        EmbeddingsError: not base64, or over the limit.
    """
    check_encoded([text], limits)
    try:
        return _decode(text)
    except ValueError as error:
        why = "drop the `data:...;base64,` prefix" if text[:5].lower() == "data:" else error
        raise EmbeddingsError(
            f"prompt_embeds must be valid base64: {why}", reason="base64"
        ) from error
