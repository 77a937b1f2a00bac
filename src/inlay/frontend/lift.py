"""Large base64 strings are taken out of a JSON body before it is parsed.

A run of at least `RUN` characters between two quotes is swapped for a nonce, a real JSON parser reads the rest, and a string
that is a nonce and nothing else, where the schema expects tensor data, is decoded straight from the body's memory. Whenever
anything else happens (a nonce elsewhere, within a longer string, or nowhere; a run that is not base64; a parser's complaint)
the whole body takes the full parser: the result is always the one the full parser alone would have given.

Why that is enough: a string that reads as the nonce alone began at the quote before the run and ended at the quote after
it, and base64 reads the same inside JSON as outside. A run behind an escaped quote is part of a longer string; one between
a closing and an opening quote is no JSON, with or without the swap.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
import pybase64

from inlay.errors import EmbeddingsError, InvalidRequestError
from inlay.frontend.errors import from_parser
from inlay.frontend.intake import Intake
from inlay.tensors import ReadLimits, check_size

RUN = 64 * 1024
"""Base64 characters from which on a string is lifted."""

_QUOTE = b'"'
_SAMPLE = 256
_alphabet = re.compile(rb"[A-Za-z0-9+/]+")
_PARSER_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Parsed(Generic[T]):
    """A request, and the tensor data that was lifted out of it.

    Attributes:
        request: with nonces in the place of lifted strings.
        lifted: decoded bytes by nonce.
    """

    request: T
    lifted: Mapping[str, bytes]

    def data(self, text: str, *, limits: ReadLimits) -> bytes:
        """The decoded bytes of a string where tensor data is expected. Raises `EmbeddingsError`."""
        data = self.lifted.get(text)
        return decode_base64(text, limits=limits) if data is None else data


def find_runs(body: bytes | bytearray) -> list[tuple[int, int]]:
    """(start, stop) of each run of at least `RUN` characters that looks like base64, between quotes.

    Any `RUN` positions in a row contain a multiple of `RUN` away from where the search stands, so only those are looked at,
    and from them outwards for the quotes: the cost is a fraction of a pass over the body.
    """
    found: list[tuple[int, int]] = []
    floor, probe, size = 0, RUN, len(body)
    while probe < size:
        if body[probe] == _QUOTE[0]:
            probe += RUN
            continue
        left = body.rfind(_QUOTE, max(floor, probe - RUN - 1), probe)
        right = body.find(_QUOTE, probe)
        if right < 0:
            break
        if left >= 0 and right - left - 1 >= RUN:
            if _looks_like_base64(body, left + 1, right):
                found.append((left + 1, right))
            floor = right + 1
            probe = right + RUN
        else:
            probe = max(probe + RUN, right + 1) if left < 0 else probe + RUN
    return found


def _looks_like_base64(body: bytes | bytearray, start: int, stop: int) -> bool:
    # Only a look: what is decoded is checked whole, and long plain text should not be lifted in vain.
    return (
        _alphabet.fullmatch(body, start, start + _SAMPLE) is not None
        and _alphabet.fullmatch(body, stop - _SAMPLE, stop - 2) is not None
    )


def parse(
    body: bytes | bytearray,
    decoder: msgspec.json.Decoder[T],
    tensors_in: Callable[[T], Sequence[str]],
    *,
    limits: ReadLimits,
    intake: Intake | None = None,
) -> Parsed[T]:
    """`body` as the request `decoder` reads.

    Args:
        body: JSON. It may be freed afterwards: nothing returned refers to it.
        decoder: of the request's type.
        tensors_in: the strings of a request that are tensor data. May refuse the request, before anything is decoded.
        limits: of one tensor file.
        intake: told what parsing and decoding will take, before they do.

    Raises:
        InvalidRequestError: not the JSON that was asked for.
        EmbeddingsError: tensor data over the limit.
        InlayError: what `intake` refuses.
    """
    runs = find_runs(body)
    if runs:
        parsed = _parse_lifted(body, runs, decoder, tensors_in, limits, intake)
        if parsed is not None:
            return parsed
    if intake is not None:
        intake.parsing(body)
    try:
        request = decoder.decode(body)
    except _PARSER_ERRORS as error:
        raise from_parser(error) from error
    _check_encoded(tensors_in(request), limits, intake)
    return Parsed(request, {})


def _parse_lifted(
    body: bytes | bytearray,
    runs: list[tuple[int, int]],
    decoder: msgspec.json.Decoder[T],
    tensors_in: Callable[[T], Sequence[str]],
    limits: ReadLimits,
    intake: Intake | None,
) -> Parsed[T] | None:
    key = secrets.token_hex(16)
    view = memoryview(body)
    pieces: list[bytes | memoryview] = []
    spans: dict[str, memoryview] = {}
    position = 0
    for index, (start, stop) in enumerate(runs):
        nonce = f"{key}.{index}"
        spans[nonce] = view[start:stop]
        pieces += (view[position:start], nonce.encode())
        position = stop
    pieces.append(view[position:])
    rest = b"".join(pieces)
    if intake is not None:
        intake.parsing(rest)
    try:
        request = decoder.decode(rest)
        wanted = tensors_in(request)
    except (*_PARSER_ERRORS, InvalidRequestError):
        return None
    if sum(text in spans for text in wanted) != len(spans):
        return None
    _check_encoded([spans.get(text, text) for text in wanted], limits, intake)
    try:
        return Parsed(request, {nonce: _decode(span) for nonce, span in spans.items()})
    except ValueError:
        return None


def _decode(text: str | memoryview) -> bytes:
    return pybase64.b64decode(text, validate=True)


def _check_encoded(
    texts: Sequence[str | memoryview], limits: ReadLimits, intake: Intake | None = None
) -> None:
    # Told from the lengths alone, before anything is decoded; what is too short is told after, as it may not be base64.
    sizes = [_decoded_size(text) for text in texts]
    for size in sizes:
        if size > limits.max_bytes:
            check_size(size, limits=limits)
    if intake is not None:
        intake.decoding(sizes)


def _decoded_size(text: str | memoryview) -> int:
    tail = text[-2:] if isinstance(text, str) else bytes(text[-2:]).decode("latin-1")
    return len(text) // 4 * 3 - tail.count("=")


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
