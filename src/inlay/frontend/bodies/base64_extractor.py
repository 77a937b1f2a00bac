"""Large base64 strings are taken out of a JSON body while it arrives, and decoded piece by piece.

A run of at least `RUN` characters between two quotes is decoded into memory of its own as it comes;
what is kept of the body is the rest. In the end a nonce stands where each run stood, a real JSON
parser reads that, and a string that is a nonce and nothing else, where the schema expects tensor
data, is what was decoded. Whenever anything else happens (a nonce elsewhere, within a longer
string, or nowhere; a run that is not base64; a parser's complaint) the whole body is put together
again and takes the full parser: the result is always the one the full parser alone would have
given.

Why that is enough: a string that reads as the nonce alone began at the quote before the run and
ended at the quote after it, and base64 reads the same inside JSON as outside. A run behind an
escaped quote is part of a longer string; one between a closing and an opening quote is no JSON,
with or without the swap. Strict base64 encodes back to the same characters but for bits of its last
four that mean nothing, and these are kept.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
import pybase64

from inlay.errors import BodyTooLargeError, EmbeddingsError, InvalidRequestError
from inlay.frontend.bodies.memory import Memory, Room, private
from inlay.frontend.bodies.request_memory import RequestMemory
from inlay.frontend.errors import from_parser
from inlay.prompt import Buffer
from inlay.tensors import ReadLimits, check_size

RUN = 64 * 1024
"""Base64 characters from which on a string is lifted."""

STEP = 256 * 1024
"""Bytes looked at in one go: they stay in the cache between being received, decoded and moved."""

_KEPT = 4 * STEP
_QUOTE = b'"'
_SAMPLE = 256
_alphabet = re.compile(rb"[A-Za-z0-9+/]+")
_PARSER_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Base64Span:
    """A string that was cut out of a body.

    Attributes:
        data: what it decodes to.
        last: its last four characters.
        whole: it is base64 to its end, where a quote follows. Otherwise `data` is what its
            beginning decodes to, and the rest of it is in the text after it.
    """

    data: Buffer
    last: bytes = b""
    whole: bool = True

    def encoded(self) -> bytes:
        """The characters that were cut out."""
        exact = len(self.data) - len(_decode(self.last))
        return pybase64.b64encode(self.data.view[:exact]) + self.last


@dataclass(frozen=True, slots=True)
class ExtractedBody:
    """A body, cut up.

    Attributes:
        pieces: of it, in order; what is no `Run` stands as it came.
        size: bytes of all of it.
    """

    pieces: list[bytes | bytearray | Base64Span]
    size: int

    def __len__(self) -> int:
        return self.size

    @property
    def runs(self) -> list[Base64Span]:
        """What was cut out, in order."""
        return [piece for piece in self.pieces if isinstance(piece, Base64Span)]

    def text(
        self, stand_in: Callable[[Base64Span], bytes] = Base64Span.encoded
    ) -> bytes | bytearray:
        """The body as it came, or with something else in the place of each run."""
        if len(self.pieces) == 1 and not isinstance(self.pieces[0], Base64Span):
            return self.pieces[0]
        return b"".join(
            stand_in(piece) if isinstance(piece, Base64Span) else piece for piece in self.pieces
        )


class Base64Extractor:
    """Cuts a body up as it arrives: `feed` it each piece, then `close` it.

    Args:
        expected: bytes of the body, where that is known.
        room: where decoded strings go.
        check: told how many bytes are certain to be text so far; raises when they are too many.
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
        # Bytes of text in the pieces; what may still begin a run is not among them.
        self._num_text = 0
        self._size = 0
        self._pieces: list[bytes | bytearray | Base64Span] = []
        self._text = bytearray()
        # In the text: no run begins before the one, and none reaches up to the other without having
        # been seen.
        self._floor = 0
        self._probe = RUN
        # Of the run that is arriving: where it goes, and its last one to four characters, which may
        # be padding.
        self._memory: Memory | None = None
        self._carry = b""
        self._broken = False

    def feed(self, piece: bytes | bytearray | memoryview) -> None:
        """Take the next piece, which may change afterwards."""
        view = memoryview(piece)
        for start in range(0, len(view), STEP):
            self._take(view[start : start + STEP])
        self._check(self._num_text)

    def close(self) -> ExtractedBody:
        """The body; nothing more is to come."""
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
        # A run that ends in this piece leaves text behind, in which others may begin.
        while self._memory is None and not self._broken and self._search():
            pass
        if len(self._text) > _KEPT:
            self._put_by(
                len(self._text) if self._broken else max(self._floor, self._probe - RUN - 1)
            )

    def _search(self) -> bool:
        """Look for a run in the text.

        Any `RUN` positions in a row contain a multiple of `RUN` away from where the search stands,
        so only those are looked at, and from them outwards for the quotes: the cost is a fraction
        of a pass over the text.

        Returns:
            Whether one was found, to its end or not.
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
            elif _looks_like_base64(text, left + 1):
                self._begin(left + 1)
                return True
            else:
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
        assert self._memory is not None
        came = memoryview(b"".join((self._carry, piece))) if self._carry else piece
        # One character at least is kept back, so that padding is always among what is kept.
        quads = (len(came) - 1) // 4 * 4
        data = _decoded(came[:quads])
        carry = bytes(came[quads:])
        if data is None or len(data) != quads // 4 * 3 or _QUOTE in carry:
            self._finish(bytes(came))
        else:
            self._memory.write(data)
            self._carry = carry

    def _finish(self, rest: bytes) -> None:
        """The run ends in `rest`, or is none."""
        assert self._memory is not None
        end = rest.find(_QUOTE)
        data = _decoded(rest[:end]) if end >= 0 else None
        if data is None:
            # Put together again by whoever parses it, which is not done here: there may be much of
            # it.
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
        """Move text that is not looked at again to the pieces."""
        self._pieces.append(bytes(memoryview(self._text)[:end]))
        self._num_text += end
        del self._text[:end]
        self._floor, self._probe = max(self._floor - end, 0), max(self._probe - end, 0)


def _looks_like_base64(text: bytearray, start: int) -> bool:
    # Only a look, so that long plain text is not lifted in vain: what is lifted is checked as it is
    # decoded.
    return _alphabet.fullmatch(text, start, start + _SAMPLE) is not None


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
    """A request, and the tensor data that was lifted out of it.

    Attributes:
        request: with nonces in the place of lifted strings.
        lifted: decoded bytes by nonce.
    """

    request: T
    lifted: Mapping[str, Buffer]

    def data(self, text: str, *, limits: ReadLimits) -> Buffer:
        """The decoded bytes of a string where tensor data is expected. Raises `EmbeddingsError`."""
        data = self.lifted.get(text)
        return Buffer(decode_base64(text, limits=limits)) if data is None else data


def parse(
    body: ExtractedBody | bytes | bytearray,
    decoder: msgspec.json.Decoder[T],
    tensors_in: Callable[[T], Sequence[str]],
    *,
    limits: ReadLimits,
    intake: RequestMemory | None = None,
) -> Parsed[T]:
    """`body` as the request `decoder` reads.

    Args:
        body: JSON, as it came or cut up already.
        decoder: of the request's type.
        tensors_in: the strings of a request that are tensor data. May refuse the request.
        limits: of one tensor file.
        intake: told what parsing and decoding will take, before they do.

    Raises:
        InvalidRequestError: not the JSON that was asked for.
        EmbeddingsError: tensor data over the limit.
        InlayError: what `intake` refuses.
    """
    if not isinstance(body, ExtractedBody):
        lift = Base64Extractor(len(body))
        lift.feed(body)
        body = lift.close()
    refused: InvalidRequestError | None = None
    if body.runs:
        parsed = _parse_extracted(body, decoder, tensors_in, limits, intake)
        if isinstance(parsed, Parsed):
            return parsed
        refused = parsed
        if intake is not None:
            intake.on_reassembled(len(body))
    text = body.text()
    try:
        if intake is not None:
            intake.parsing(text)
        request = decoder.decode(text)
    except BodyTooLargeError:
        # Its base64 counts only because it was refused without it: why says more.
        if refused is not None:
            raise refused from None
        raise
    except _PARSER_ERRORS as error:
        raise from_parser(error) from error
    finally:
        # What is raised keeps this frame: it must not be kept by it.
        refused = None
    sizes = _check_encoded(tensors_in(request), limits)
    if intake is not None:
        intake.decoding(sizes)
    return Parsed(request, {})


def _parse_extracted(
    body: ExtractedBody,
    decoder: msgspec.json.Decoder[T],
    tensors_in: Callable[[T], Sequence[str]],
    limits: ReadLimits,
    intake: RequestMemory | None,
) -> Parsed[T] | InvalidRequestError | None:
    """The request; why it is refused, where its whole text may say that better.

    None where strings are no tensor data.
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
    except InvalidRequestError as error:
        return error.with_traceback(None)
    except _PARSER_ERRORS as error:
        return from_parser(error)
    if sum(text in spans for text in wanted) != len(spans):
        return None
    for text in wanted:
        if text in spans:
            _check_fits(len(spans[text].data), limits)
        else:
            _check_fits(_decoded_size(text), limits)
    if intake is not None:
        intake.on_decoded(len(run.data) for run in spans.values())
        intake.decoding(_decoded_size(text) for text in wanted if text not in spans)
    return Parsed(request, {nonce: run.data for nonce, run in spans.items()})


def _check_encoded(texts: Sequence[str], limits: ReadLimits) -> list[int]:
    # Told from the lengths alone, before anything is decoded; what is too short is told after, as
    # it may not be base64.
    sizes = [_decoded_size(text) for text in texts]
    for size in sizes:
        _check_fits(size, limits)
    return sizes


def _check_fits(size: int, limits: ReadLimits) -> None:
    if size > limits.max_bytes:
        check_size(size, limits=limits)


def _decoded_size(text: str) -> int:
    return len(text) // 4 * 3 - text[-2:].count("=")


def decode_base64(text: str, *, limits: ReadLimits) -> bytes:
    """Strict base64 (RFC 4648, no white space) to bytes.

    Raises:
        EmbeddingsError: not base64, or certain to be over the limit.
    """
    _check_encoded([text], limits)
    try:
        return _decode(text)
    except ValueError as error:
        why = "drop the `data:...;base64,` prefix" if text[:5].lower() == "data:" else error
        raise EmbeddingsError(f"prompt_embeds must be valid base64: {why}") from error
