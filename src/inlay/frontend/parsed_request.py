"""Reading requests that may hold embeddings: JSON, multipart, or a raw tensor file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from inlay.errors import EmbeddingsError
from inlay.frontend.bodies import base64_extractor as lift
from inlay.frontend.bodies.base64_extractor import ExtractedBody, Parsed
from inlay.frontend.bodies.body import (
    JSON,
    ContentType,
    body_limit,
    check_content_type,
    content_type_of,
    declared_length,
    read_pieces,
    read_whole,
    receive_body,
)
from inlay.frontend.bodies.memory import Memory
from inlay.frontend.bodies.multipart import MULTIPART, Form
from inlay.frontend.server import Call
from inlay.prompt import Buffer
from inlay.tensors import check_size

OCTETS = "application/octet-stream"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ParsedRequest(Generic[T]):
    """A request after parsing.

    Attributes:
        parsed: its JSON.
        size: bytes of its body.
        parts: files of a multipart body, by name; None for a JSON body.
    """

    parsed: Parsed[T]
    size: int
    parts: Mapping[str, Buffer] | None = None


async def read_request(
    call: Call, decoder: msgspec.json.Decoder[T], tensors_in: Callable[[T], Sequence[str]]
) -> ParsedRequest[T]:
    """Read a request with its files, JSON or multipart.

    Args:
        call: the HTTP request.
        decoder: of the request's type.
        tensors_in: as in `inlay.frontend.bodies.base64_extractor.parse`.

    Raises:
        InvalidRequestError: not JSON of the expected type, or not a valid multipart body.
        EmbeddingsError: tensor data over the limit.
        InlayError: as `inlay.frontend.bodies.body.receive_body`.
    """
    server = call.server
    media = content_type_of(call.scope["headers"])
    check_content_type(media, JSON, MULTIPART)
    parts: Mapping[str, Buffer] | None = None
    body: ExtractedBody | bytes
    if media.kind == JSON:
        body = await call.body(server.room)
        size = len(body)
    else:
        form = await _read_form(call, media)
        body, parts, size = form.request, form.parts, form.size
        call.memory.check_total(map(len, parts.values()))
    parsed = await server.prepare(
        len(body),
        lift.parse,
        body,
        decoder,
        tensors_in,
        limits=server.embeds.limits,
        intake=call.memory,
    )
    del body
    call.memory.body_freed(kept=sum(map(len, (parts or {}).values())))
    return ParsedRequest(parsed, size, parts)


async def read_json(call: Call, decoder: msgspec.json.Decoder[T], *, empty: T | None = None) -> T:
    """Read a request that is JSON without embeddings; `empty` if there is no body.

    Raises as `read_request`.
    """
    server = call.server
    body = await call.body()
    if empty is not None and not len(body):
        return empty
    parsed: Parsed[T] = await server.prepare(
        len(body),
        lift.parse,
        body,
        decoder,
        _nothing,
        limits=server.embeds.limits,
        intake=call.memory,
    )
    return parsed.request


def _nothing(_: object) -> Sequence[str]:
    return ()


async def _read_form(call: Call, media: ContentType) -> Form:
    server = call.server
    server.embeds.require_enabled()
    limits, settings, headers = server.embeds.limits, server.settings, call.scope["headers"]
    declared = declared_length(headers)
    boundary = media.parameters.get("boundary")
    form = Form(boundary, declared, limits, server.room)
    await read_pieces(
        call.scope,
        call.receive,
        settings,
        call.reservation,
        check=body_limit(settings),
        take=lambda piece: form.feed(bytes(piece)),
    )
    call.body_read = True
    form.close()
    return form


async def read_tensor(call: Call) -> Buffer:
    """Read a body that is a tensor file.

    Raises:
        EmbeddingsError: over the limit; from Content-Length, before anything is read.
        BodyTooLargeError: over the limit of bodies.
        InlayError: as `inlay.frontend.bodies.body.receive_body`.
    """
    server = call.server
    check_content_type(content_type_of(call.scope["headers"]), OCTETS)
    fits = body_limit(server.settings)
    limits = server.embeds.limits

    def check(size: int) -> None:
        fits(size)
        if size > limits.max_bytes:
            check_size(size, limits=limits)

    whole = await read_whole(call.scope, server.settings, call.reservation, check)
    if whole is not None:
        call.body_read = True
        return Buffer(whole)
    # Allocated at the first byte: by then the declared size has been checked.
    memory: Memory | None = None

    def take(piece: bytes) -> None:
        nonlocal memory
        if memory is None:
            memory = Memory(declared_length(call.scope["headers"]))
        memory.write(piece)

    await receive_body(
        call.scope, call.receive, server.settings, call.reservation, check=check, take=take
    )
    call.body_read = True
    if memory is None:
        raise EmbeddingsError(
            "prompt_embeds decoded data must be at least 100 bytes, got an empty body"
        )
    return memory.buffer()
