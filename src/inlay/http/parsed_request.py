"""Reading of requests: a body within its limits, JSON or multipart, and the JSON in it.

A body is read within its size limit, the memory budget and a time limit.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import BinaryIO, Generic, NamedTuple, TypeVar

import msgspec

from inlay.base import liveness
from inlay.base.errors import BodyTooLargeError, InvalidRequestError, UnsupportedMediaTypeError
from inlay.http.bodies import base64_extractor as lift
from inlay.http.bodies.accounting import RequestMemory
from inlay.http.bodies.base64_extractor import Base64Extractor, ExtractedBody, Parsed
from inlay.http.bodies.embeds import Source
from inlay.http.bodies.form import MAX_TEXT_BYTES, FieldForm
from inlay.http.bodies.framing import MULTIPART
from inlay.http.bodies.media import file_data
from inlay.http.bodies.memory import Memory, Room, private
from inlay.http.bodies.multipart import Form
from inlay.http.errors import BodyTimeoutError, ClientGone, from_parser
from inlay.http.server import JSON, Call
from inlay.http.settings import FrontendSettings
from inlay.messages.prompt import Buffer
from inlay.tensors import ReadLimits

MIN_RATE = 64 * 1024
"""Minimum average bytes a second of a body, so that slow senders cannot hold the budget."""

_WHOLE_FROM = 64 * 1024
"""Bytes of a body from which it is read directly from its connection."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ParsedRequest(Generic[T]):
    """A request after parsing.

    Attributes:
        parsed: its JSON.
        size: bytes of its body.
        sources: the sources of embeddings and images in it, in order.
        parts: files of a multipart body, by name; None for a JSON body.
    """

    parsed: Parsed[T]
    size: int
    sources: Sequence[Source]
    parts: Mapping[str, Buffer] | None = None


class ContentType(NamedTuple):
    """Media type of a body.

    Attributes:
        kind: lower case, without parameters; "application/json" if the header is absent.
        parameters: by name in lower case.
    """

    kind: str
    parameters: dict[str, str]


def content_type(call: Call, *allowed: str) -> ContentType:
    """Return the media type of the body.

    Args:
        call: the HTTP request.
        allowed: media types; one that ends in "/*" stands for all that begin so.

    Raises:
        UnsupportedMediaTypeError: it is none of these, or the body is compressed.
    """
    encoding = call.headers.get(b"content-encoding", b"").strip().lower()
    if encoding not in (b"", b"identity"):
        raise UnsupportedMediaTypeError(
            f"content-encoding {encoding.decode('latin-1')!r} is not supported; send the body "
            "as it is (identity)"
        )
    kind, *rest = call.headers.get(b"content-type", b"").decode("latin-1").split(";")
    kind = kind.strip().lower() or JSON
    if kind.endswith("+json"):
        kind = JSON
    if kind not in allowed and f"{kind.partition('/')[0]}/*" not in allowed:
        raise UnsupportedMediaTypeError(
            f"content-type {kind!r} is not supported; send {' or '.join(allowed)}"
        )
    parameters: dict[str, str] = {}
    for item in rest:
        name, _, text = item.partition("=")
        parameters[name.strip().lower()] = text.strip().strip('"')
    return ContentType(kind, parameters)


async def read_request(
    call: Call, decoder: msgspec.json.Decoder[T], sources_in: Callable[[T], Sequence[Source]]
) -> ParsedRequest[T]:
    """Read a request with its files, JSON or multipart.

    Args:
        call: the HTTP request.
        decoder: of the request's type.
        sources_in: returns the sources of embeddings and images in a request, in order.

    Raises:
        InvalidRequestError: not JSON of the expected type, or not a valid multipart body.
        EmbeddingsError: tensor data over the limit.
        InlayError: as `receive_body`.
    """
    server = call.server
    media = content_type(call, JSON, MULTIPART)
    parts: Mapping[str, Buffer] | None = None
    body: ExtractedBody | bytes | bytearray
    sources: list[Source] = []

    def tensors_in(request: T) -> list[str]:
        sources[:] = sources_in(request)
        return server.embeds.tensors(sources) if sources else []

    if media.kind == JSON:
        body = await read_body(call, server.room)
        size = len(body)
    else:
        form = await _read_form(call, media)
        body, parts, size = form.request, form.parts, form.size
        call.memory.check_total(map(len, parts.values()))
    parsed = await parse(
        call, body, decoder, tensors_in, lambda _: file_data(sources) if sources else ()
    )
    del body
    call.memory.body_freed(kept=sum(map(len, (parts or {}).values())))
    return ParsedRequest(parsed, size, sources, parts)


async def _read_form(call: Call, media: ContentType) -> Form:
    server = call.server
    server.embeds.require_enabled()
    boundary = media.parameters.get("boundary")
    form = Form(boundary, call.declared, server.limits.any, server.room)
    await read_pieces(call, take=lambda piece: form.feed(bytes(piece)))
    form.close()
    return form


async def read_form(
    call: Call, file: str, spool: BinaryIO, *, max_file_bytes: int, flag: str
) -> FieldForm:
    """Read a form of text fields and one file, which goes to `spool` and is not kept in memory.

    Arguments and errors as `FieldForm` and `receive_body`; the limit of bodies does not apply.
    """
    media = content_type(call, MULTIPART)
    form = FieldForm(
        media.parameters.get("boundary"), file, spool, max_file_bytes=max_file_bytes, flag=flag
    )
    limit = max_file_bytes + 2 * MAX_TEXT_BYTES

    def check(size: int) -> None:
        if size > limit:
            raise BodyTooLargeError(
                f"the body of {size} bytes is over the limit: {file} may have {max_file_bytes} "
                f"bytes ({flag})",
                param=file,
            )

    call.reservation.grow_to(MAX_TEXT_BYTES)
    await read_pieces(call, take=lambda piece: form.feed(bytes(piece)), check=check, held=False)
    form.close()
    return form


async def read_json(call: Call, decoder: msgspec.json.Decoder[T], *, empty: T | None = None) -> T:
    """Read a request that is JSON without embeddings; `empty` if there is no body.

    Raises as `read_request`.
    """
    content_type(call, JSON)
    body = await read_body(call)
    if empty is not None and not len(body):
        return empty
    return (await parse(call, body, decoder, lambda _: ())).request


async def parse(
    call: Call,
    body: ExtractedBody | bytes | bytearray,
    decoder: msgspec.json.Decoder[T],
    tensors_in: Callable[[T], Sequence[str]],
    files_in: Callable[[T], Sequence[str]] = lambda _: (),
) -> Parsed[T]:
    """Parse a body, in a thread if it is large. Arguments and errors as `parse_body`."""
    return await call.server.run_prepared(
        body.parsed_size if isinstance(body, ExtractedBody) else len(body),
        parse_body,
        body,
        decoder,
        tensors_in,
        limits=lambda: call.server.limits.any,
        files_in=files_in,
        intake=call.memory,
    )


def parse_body(
    body: ExtractedBody | bytes | bytearray,
    decoder: msgspec.json.Decoder[T],
    tensors_in: Callable[[T], Sequence[str]],
    *,
    limits: Callable[[], ReadLimits],
    files_in: Callable[[T], Sequence[str]] = lambda _: (),
    intake: RequestMemory | None = None,
) -> Parsed[T]:
    """Parse a body with `decoder`.

    Args:
        body: JSON, as it came or already extracted.
        decoder: of the request's type.
        tensors_in: returns the strings of a request that are tensor data; may refuse the request.
        limits: returns those of one tensor file.
        files_in: returns the strings that are other files; called after `tensors_in`.
        intake: reserves the memory of parsing and decoding beforehand.

    Raises:
        InvalidRequestError: not JSON of the expected type.
        EmbeddingsError: tensor data over the limit.
        InlayError: `intake` refuses the memory.
    """
    if not isinstance(body, ExtractedBody) and len(body) >= lift.RUN:
        extractor = Base64Extractor(len(body))
        extractor.feed(body)
        body = extractor.close()
    refused: InvalidRequestError | None = None
    if isinstance(body, ExtractedBody):
        if body.runs:
            parsed = lift.parse_extracted(body, decoder, tensors_in, files_in, limits(), intake)
            if isinstance(parsed, Parsed):
                return parsed
            refused = parsed
            if intake is not None:
                intake.on_reassembled(len(body))
        body = body.reassembled()
    try:
        if intake is not None:
            intake.parsing(body)
        request = decoder.decode(body)
    except BodyTooLargeError:
        # The base64 counts only because the first parse was refused: that error says more.
        if refused is not None:
            raise refused from None
        raise
    except lift.PARSER_ERRORS as error:
        raise from_parser(error, decoder.type, body) from error
    finally:
        # The raised error holds this frame; breaking the cycle frees both without a collection.
        refused = None
    tensors = tensors_in(request)
    sizes = lift.check_encoded(tensors, limits()) if tensors else []
    sizes += map(lift.decoded_size, files_in(request))
    if intake is not None and sizes:
        intake.decoding(sizes)
    return Parsed(request, {})


async def receive_body(
    call: Call,
    *,
    check: Callable[[int], None],
    take: Callable[[bytes], None],
    held: bool = True,
) -> None:
    """Pass on a body as it arrives; the bytes received, or declared, are reserved.

    Args:
        call: the HTTP request.
        check: called with the known minimum size, first that of Content-Length; raises if it is
            too large.
        take: called with each piece.
        held: `take` keeps the pieces in memory; if not, nothing is reserved.

    Raises:
        OverloadedError: the memory budget is used up.
        BodyTimeoutError: the body arrives too slowly.
        ClientGone: the client left.
    """
    if call.declared is not None:
        check(call.declared)
        if held:
            call.reservation.grow_to(call.declared)
    size = 0
    async with _in_time(call) as progress:
        while True:
            message = await call.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            if call.exchange is not None:
                call.exchange.check()
            chunk: bytes = message.get("body", b"")
            if chunk:
                size += len(chunk)
                check(size)
                if held:
                    call.reservation.grow_to(size)
                take(chunk)
            if not message.get("more_body", False):
                break
            progress(size)
    _received(call)


@asynccontextmanager
async def _in_time(call: Call) -> AsyncIterator[Callable[[int], None]]:
    """Yield a callback for the number of bytes received so far.

    Raises `BodyTimeoutError` if they are too few for the time.
    """
    began = liveness.now()
    size, most = 0, call.server.settings.body_timeout
    try:
        async with liveness.timeout(most) as timer:

            def progress(came: int) -> None:
                nonlocal size
                size = came
                allowed = began + most + size / MIN_RATE
                timer.reset(min(most, allowed - liveness.now()))

            yield progress
    except TimeoutError as error:
        raise BodyTimeoutError(
            f"the body came too slowly: {size} bytes in {liveness.now() - began:.0f} s"
            + ("" if call.declared is None else f" of {call.declared}")
        ) from error


def _received(call: Call) -> None:
    """Note that nothing of the body is left, and begin to account for what is made of it."""
    call.body_read = True
    call.memory = RequestMemory(call.reservation, call.server.limits)


async def read_pieces(
    call: Call,
    *,
    take: Callable[[bytes | memoryview], None],
    check: Callable[[int], None] | None = None,
    held: bool = True,
) -> None:
    """Pass on a body as it arrives; a large one of known length directly from the socket.

    Arguments and errors as `receive_body`; the memory of a piece is reused afterwards. `check` is
    that of the limit of bodies unless given.
    """
    check = check or body_limit(call.server.settings)
    declared, exchange = call.declared, call.exchange
    arrived = None if exchange is None else exchange.arrived()
    if arrived is not None:
        check(len(arrived))
        if held:
            call.reservation.grow_to(len(arrived))
        if arrived:
            take(arrived)
    elif exchange is None or declared is None or declared < _WHOLE_FROM:
        await receive_body(call, check=check, take=take, held=held)
        return
    else:
        check(declared)
        if held:
            call.reservation.grow_to(declared)
        async with _in_time(call) as progress:
            await exchange.stream(declared, take, progress)
    _received(call)


async def read_body(call: Call, room: Room = private) -> ExtractedBody | bytearray:
    """Read a JSON body; its large base64 strings are decoded into `room` as they arrive.

    Raises:
        BodyTooLargeError: over the limit, by Content-Length before anything is read; or too much
            JSON text.
        OverloadedError, BodyTimeoutError, ClientGone: as `receive_body`.
    """
    body: ExtractedBody | bytearray
    if call.declared is not None and call.declared < lift.RUN:
        # No string in it is long enough to be extracted.
        body = bytearray()
        await read_pieces(call, take=body.extend)
    else:
        extractor = Base64Extractor(call.declared, room, call.server.limits.check_json)
        await read_pieces(call, take=extractor.feed)
        body = extractor.close()
    call.server.metrics.body_read(call.route, len(body))
    return body


async def read_file(call: Call, fits: Callable[[int], None]) -> Buffer:
    """Read a body that is one file, of a size that `fits` does not refuse.

    A large one of known length goes directly into its memory. Errors as `receive_body`.
    """
    in_body = body_limit(call.server.settings)

    def check(size: int) -> None:
        in_body(size)
        fits(size)

    declared, exchange = call.declared, call.exchange
    if exchange is not None and declared is not None and declared >= _WHOLE_FROM:
        check(declared)
        call.reservation.grow_to(declared)
        whole = private(declared)
        async with _in_time(call) as progress:
            await exchange.fill(whole, progress)
        _received(call)
        return Buffer(whole)
    # Allocated at the first byte: by then the declared size has been checked.
    memory: Memory | None = None

    def take(piece: bytes) -> None:
        nonlocal memory
        if memory is None:
            memory = Memory(declared)
        memory.write(piece)

    await receive_body(call, check=check, take=take)
    return Buffer(b"") if memory is None else memory.buffer()


def body_limit(settings: FrontendSettings) -> Callable[[int], None]:
    """Return a function that raises `BodyTooLargeError` for sizes over the limit of bodies."""

    def check(size: int) -> None:
        if size > settings.max_body_bytes:
            raise BodyTooLargeError(
                f"the body of {size} bytes is over the limit of {settings.max_body_bytes} bytes "
                "(--max-body-bytes)"
            )

    return check
