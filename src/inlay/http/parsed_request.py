"""Reading requests that may hold embeddings: JSON, multipart, or a raw tensor file."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import msgspec

from inlay.card import ModelCard
from inlay.errors import EmbeddingsError, InvalidRequestError, NotFoundError
from inlay.http.bodies import base64_extractor as lift
from inlay.http.bodies.base64_extractor import ExtractedBody, Parsed
from inlay.http.bodies.body import body_limit, read_body, read_pieces, read_whole, receive_body
from inlay.http.bodies.embeds import Embeddings, Source, TensorSource, check_source
from inlay.http.bodies.media import MediaItems, MediaSource, fetched, file_data, spec_for
from inlay.http.bodies.memory import Memory
from inlay.http.bodies.multipart import MULTIPART, Form
from inlay.http.server import JSON, Call, ContentType, Server
from inlay.media.video import Encode
from inlay.prompt import Buffer, Rows
from inlay.store import StoredPrompt, StoredPrompts
from inlay.tensors import check_size
from inlay.tensors.tensor import quoted

SWEEP_SECONDS = 10.0
"""Interval at which expired prompts are removed from the store."""

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

    async def embeddings(
        self, call: Call, card: ModelCard, only: TensorSource | None = None
    ) -> Embeddings:
        """Return the embeddings and images of the request for the model of `card`.

        Files that are elsewhere are fetched.

        Args:
            call: the HTTP request.
            card: of the model.
            only: the source that is read, where they are for several models; None for all.

        Raises:
            InvalidRequestError: the body has a part that the request does not name, or the model
                takes no images, or not these.
            InlayError: as `stored_rows` and `inlay.http.bodies.media.fetched`.
        """
        tensors = [source for source in self.sources if isinstance(source, TensorSource)]
        unused = sorted(set(self.parts or ()) - {source.part for source in tensors})
        if unused:
            raise InvalidRequestError(
                f"the request does not use part {quoted(unused[0])} of its body",
                param=unused[0][:80],
            )
        reader, parsed = call.server.embeds, self.parsed
        if only is not None:
            tensors = [only]
        stored = await stored_rows(call, tensors, card) if tensors else {}

        def decode(text: str) -> Buffer:
            return parsed.data(text, limits=call.server.limits.any)

        return Embeddings(
            reader,
            card,
            decode,
            hold=call.reservation.grow,
            parts=self.parts,
            stored=stored,
            media=await self._media(call, card, decode),
        )

    async def _media(
        self, call: Call, card: ModelCard, decode: Callable[[str], Buffer]
    ) -> MediaItems | None:
        sources = [source for source in self.sources if isinstance(source, MediaSource)]
        if not sources:
            return None
        server, hold = call.server, call.reservation.grow
        spec = spec_for(card, sources)
        files = await stored_files(call, sources)
        found = await fetched(server.fetcher, sources, hold, call.client)
        call.memory.check_total(map(len, found.values()))
        files.update(found)
        encode: Encode = _no_times
        if any(source.kind == "video" for source in sources):
            renderer = await server.renderers.of(card)
            encode = partial(renderer.encode, add_special_tokens=False)
        return MediaItems(
            card,
            spec,
            server.secret,
            server.limits,
            max_bytes=server.settings.max_media_bytes,
            files=files,
            lifted=self.parsed.lifted,
            decode=decode,
            hold=hold,
            encode=encode,
        )


def _no_times(_: str) -> Sequence[int]:
    """Stand for the tokenizer in a request without videos."""
    return ()


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
        InlayError: as `inlay.http.bodies.body.receive_body`.
    """
    server = call.server
    media = call.content_type(JSON, MULTIPART)
    parts: Mapping[str, Buffer] | None = None
    body: ExtractedBody | bytes
    sources: list[Source] = []

    def tensors_in(request: T) -> list[str]:
        sources[:] = sources_in(request)
        return server.embeds.tensors(sources) if sources else []

    if media.kind == JSON:
        body = await read_body(call, server.room)
        size = body.size
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


async def read_json(call: Call, decoder: msgspec.json.Decoder[T], *, empty: T | None = None) -> T:
    """Read a request that is JSON without embeddings; `empty` if there is no body.

    Raises as `read_request`.
    """
    call.content_type(JSON)
    body = await read_body(call)
    if empty is not None and not len(body):
        return empty
    return (await parse(call, body, decoder, lambda _: ())).request


async def parse(
    call: Call,
    body: ExtractedBody | bytes,
    decoder: msgspec.json.Decoder[T],
    tensors_in: Callable[[T], Sequence[str]],
    files_in: Callable[[T], Sequence[str]] = lift.no_files,
) -> Parsed[T]:
    """Parse a body. Arguments and errors as `inlay.http.bodies.base64_extractor.parse`."""
    limits = call.server.limits.any
    return await call.server.prepare(
        body.parsed_size if isinstance(body, ExtractedBody) else len(body),
        lift.parse,
        body,
        decoder,
        tensors_in,
        limits=limits,
        files_in=files_in,
        intake=call.memory,
    )


async def _read_form(call: Call, media: ContentType) -> Form:
    server = call.server
    server.embeds.require_enabled()
    boundary = media.parameters.get("boundary")
    form = Form(boundary, call.declared, server.limits.any, server.room)
    await read_pieces(call, take=lambda piece: form.feed(bytes(piece)))
    form.close()
    return form


async def read_tensor(call: Call) -> Buffer:
    """Read a body that is a tensor file.

    Raises:
        EmbeddingsError: over the limit; from Content-Length, before anything is read.
        BodyTooLargeError: over the limit of bodies.
        InlayError: as `inlay.http.bodies.body.receive_body`.
    """
    limits = call.server.limits.any

    def check(size: int) -> None:
        if size > limits.max_bytes:
            check_size(size, limits=limits)

    data = await _read_raw(call, check)
    if not len(data):
        raise EmbeddingsError(
            "prompt_embeds decoded data must be at least 100 bytes, got an empty body",
            reason="too_small",
        )
    return data


async def read_image(call: Call) -> Buffer:
    """Read a body that is an image file.

    Raises:
        InvalidRequestError: over the limit; from Content-Length, before anything is read.
        InlayError: as `read_tensor`.
    """
    limit = call.server.settings.max_media_bytes
    return await _read_raw(call, lambda size: check_media_size(size, limit))


def check_media_size(size: int, limit: int) -> None:
    """Raise `InvalidRequestError` for a file of more than `limit` bytes."""
    if size > limit:
        raise InvalidRequestError(f"an image has {size} bytes; allowed: {limit}")


async def _read_raw(call: Call, fits: Callable[[int], None]) -> Buffer:
    """Read a body that is one file, of a size that `fits` does not refuse."""
    in_body = body_limit(call.server.settings)

    def check(size: int) -> None:
        in_body(size)
        fits(size)

    whole = await read_whole(call, check)
    if whole is not None:
        return Buffer(whole)
    # Allocated at the first byte: by then the declared size has been checked.
    memory: Memory | None = None

    def take(piece: bytes) -> None:
        nonlocal memory
        if memory is None:
            memory = Memory(call.declared)
        memory.write(piece)

    await receive_body(call, check=check, take=take)
    return Buffer(b"") if memory is None else memory.buffer()


def store_for(call: Call) -> StoredPrompts:
    """Return the store of uploaded embeddings and images.

    Raises:
        InvalidRequestError: this server accepts neither.
        NotFoundError: this server has no store.
    """
    server = call.server
    if not takes_images(server):
        server.embeds.require_enabled()
    if server.store is None:
        raise NotFoundError("prompt_embeds not found: this server stores none")
    return server.store


async def stored_rows(
    call: Call, sources: Sequence[TensorSource], card: ModelCard
) -> dict[str, tuple[Rows, ...]]:
    """Return the rows of every reference among `sources`, by id.

    Rows that this model has used before are looked up, not computed again.

    Raises:
        EmbeddingsError: not acceptable for the model.
        InvalidRequestError: a source that is not exactly one string.
        NotFoundError: no such stored prompt, or not the caller's.
        BodyTooLargeError: they are over the limit of one request.
        OverloadedError: reading them would exceed the memory budget.
    """
    wanted: dict[str, str] = {}
    for source in sources:
        check_source(source)
        if isinstance(source.ref, str):
            wanted.setdefault(source.ref, source.param)
    if not wanted:
        return {}
    store, target, tenant = store_for(call), call.server.embeds.target(card), call.caller.tenant.id

    found: dict[str, tuple[Rows, ...]] = {}
    for ref, param in wanted.items():
        with _named(param):
            found[ref] = await store.rows(
                tenant, ref, target, look=_counter(call), hold=call.reservation.grow
            )
    return found


def takes_images(server: Server) -> bool:
    """Return True if any model takes images."""
    return any(
        card.media is not None and card.media.image is not None for card in server.router.models()
    )


async def stored_files(call: Call, sources: Sequence[MediaSource]) -> dict[str, Buffer]:
    """Return the files of every stored image among `sources`, by id.

    Raises:
        InvalidRequestError: stored embeddings, not an image.
        InlayError: as `stored_rows`.
    """
    found: dict[str, Buffer] = {}
    for source in sources:
        if source.ref is None or source.ref in found:
            continue
        with _named(source.param):
            found[source.ref] = await store_for(call).file(
                call.caller.tenant.id, source.ref, look=_counter(call), hold=call.reservation.grow
            )
    return found


def _counter(call: Call) -> Callable[[StoredPrompt], None]:
    """Return what counts stored bytes among those of the request."""
    return lambda stored: call.memory.check_total([stored.bytes])


@contextmanager
def _named(param: str) -> Iterator[None]:
    """Name the place of a reference in its errors."""
    try:
        yield
    except NotFoundError as error:
        raise error.at(param) from error
    except InvalidRequestError as error:
        if error.param is not None:
            raise
        raise InvalidRequestError(f"{param}: {error.message}", param=param) from error


async def sweep(store: StoredPrompts) -> None:
    """Remove expired prompts at intervals, until cancelled."""
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        await store.sweep()
