"""Embeddings and media that a request refers to: in its body, in the store, or at URLs."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from inlay.base.errors import InvalidRequestError, NotFoundError
from inlay.http.bodies.embeds import Embeddings, TensorSource, check_source
from inlay.http.bodies.media import MediaItems, MediaSource, fetched, is_own, spec_for
from inlay.http.parsed_request import ParsedRequest
from inlay.http.request_scope import RequestScope
from inlay.http.server import LONG_BYTES, Call, Server
from inlay.media.audio import container_of
from inlay.media.video import Encode
from inlay.messages.card import ModelCard
from inlay.messages.prompt import Buffer, Rows
from inlay.store import StoredPrompt, StoredPrompts
from inlay.tensors.tensor import quoted

SWEEP_SECONDS = 10.0
"""Interval at which expired prompts are removed from the store."""


async def embeddings_of(
    call: Call, incoming: ParsedRequest[Any], card: ModelCard, only: TensorSource | None = None
) -> Embeddings:
    """Return the embeddings and images of the request for the model of `card`.

    Files that are elsewhere are fetched.

    Args:
        call: the HTTP request.
        incoming: the parsed request.
        card: of the model.
        only: the source that is read, where they are for several models; None for all.

    Raises:
        InvalidRequestError: the body has a part that the request does not name, or the model
            takes no images, or not these.
        InlayError: as `stored_rows` and `inlay.http.bodies.media.fetched`.
    """
    tensors = [source for source in incoming.sources if isinstance(source, TensorSource)]
    unused = sorted(set(incoming.parts or ()) - {source.part for source in tensors})
    if unused:
        raise InvalidRequestError(
            f"the request does not use part {quoted(unused[0])} of its body",
            param=unused[0][:80],
        )
    reader, parsed = call.server.embeds, incoming.parsed
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
        parts=incoming.parts,
        stored=stored,
        media=await _media(call, incoming, card, decode),
    )


async def _media(
    call: Call, incoming: ParsedRequest[Any], card: ModelCard, decode: Callable[[str], Buffer]
) -> MediaItems | None:
    sources = [
        source
        for source in incoming.sources
        if isinstance(source, MediaSource) and not is_own(source, card)
    ]
    if not sources:
        return None
    server, hold = call.server, call.reservation.grow
    spec = spec_for(card, sources)
    files = await stored_files(call, sources)
    found = await fetched(server.fetcher, sources, hold, call.client)
    call.memory.check_total(map(len, found.values()))
    files.update(found)
    for source in sources:
        if source.kind == "audio" and source.url is not None:
            await _unpack(call, incoming, source, files)
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
        lifted=incoming.parsed.lifted,
        decode=decode,
        hold=hold,
        encode=encode,
    )


async def _unpack(
    call: Call, incoming: ParsedRequest[Any], source: MediaSource, files: dict[str, Buffer]
) -> None:
    """Put a sound among the files if it is made another of."""
    try:
        data = files.get(source.name)
        if data is None:
            data = source.data(incoming.parsed.lifted, call.server.settings.max_media_bytes)
        found = await unpacked_sound(call, data)
    except InvalidRequestError as error:
        raise error.located(source.param) from None
    if found is not data:
        files[source.name] = found


async def unpacked_sound(call: Call, data: Buffer) -> Buffer:
    """Return a sound as `media.unpacking.unpacked` makes it, without work on the event loop.

    Ends when its client has left.
    """
    if container_of(data.view) is None:
        return data
    from inlay.media.unpacking import unpacked

    size = max(LONG_BYTES, len(data))  # few bytes may be minutes
    async with RequestScope(call.server.inflight, call.receive):
        return await call.server.run_prepared(size, unpacked, data, call.reservation.grow)


def _no_times(_: str) -> Sequence[int]:
    """Stand for the tokenizer in a request without videos."""
    return ()


def store_for(call: Call) -> StoredPrompts:
    """Return the store of embeddings, images and vectors.

    Raises:
        InvalidRequestError: this server accepts neither, and gives no vectors.
        NotFoundError: this server has no store.
    """
    server = call.server
    if not takes_images(server) and not _gives_vectors(server):
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
        with placed(param):
            found[ref] = await store.rows(
                tenant, ref, target, look=_counter(call), hold=call.reservation.grow
            )
    return found


def takes_images(server: Server) -> bool:
    """Return True if any model takes images."""
    return any(
        card.media is not None and card.media.image is not None for card in server.router.models()
    )


def _gives_vectors(server: Server) -> bool:
    return any(card.embedding is not None for card in server.router.models())


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
        with placed(source.param):
            found[source.ref] = await store_for(call).file(
                call.caller.tenant.id, source.ref, look=_counter(call), hold=call.reservation.grow
            )
    return found


def _counter(call: Call) -> Callable[[StoredPrompt], None]:
    """Return what counts stored bytes among those of the request."""
    return lambda stored: call.memory.check_total([stored.bytes])


@contextmanager
def placed(param: str) -> Iterator[None]:
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
