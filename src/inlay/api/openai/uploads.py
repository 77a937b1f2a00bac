"""`/v1/prompt_embeds`: embeddings and images uploaded once and used by reference."""

from typing import Any

import msgspec

from inlay.api.openai.embeddings.file_answer import FILE_TYPE
from inlay.api.openai.embeddings.upload import upload_vectors
from inlay.api.openai.schema.prompt_embeds import (
    PinRequest,
    PromptEmbeds,
    PromptEmbedsDeleted,
    Stored,
    StoredImage,
    StoredVectors,
    UploadRequest,
)
from inlay.base.errors import EmbeddingsError, InvalidRequestError
from inlay.http.bodies.base64_extractor import Parsed
from inlay.http.bodies.media import MediaSource, file_data, spec_for
from inlay.http.parsed_request import content_type, parse, read_body, read_file, read_json
from inlay.http.references import store_for, takes_images
from inlay.http.server import IMAGES, JSON, OCTETS, Call
from inlay.media.image import read_image_header
from inlay.media.items import image_item
from inlay.media.spec import MediaSpec
from inlay.messages.card import ModelCard
from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer
from inlay.store import NewImage, StoredPrompt
from inlay.tensors import Tensor, check_size, read

_VECTORS = FILE_TYPE.decode()
_upload = msgspec.json.Decoder(UploadRequest)
_pin = msgspec.json.Decoder(PinRequest)


async def upload(call: Call) -> None:
    """Store a tensor or an image; with `?model=` only if that model takes it. Or vectors of it."""
    store_for(call)
    name = _model(call)
    card = None if name is None else call.server.card(name)
    media = content_type(call, OCTETS, JSON, IMAGES + "*", _VECTORS)
    if media.kind == _VECTORS:
        await upload_vectors(call, name)
        return
    if media.kind.startswith(IMAGES):
        await _store_image(call, await _read_image(call), card)
        return
    if media.kind == OCTETS:
        call.server.embeds.require_enabled()
        await _store_tensor(call, await _read_tensor(call), card)
        return
    parsed = await _parsed(call)
    source = _source(parsed.request)
    if source is None:
        call.server.embeds.require_enabled()
        data = parsed.data(parsed.request.data, limits=call.server.limits.any)
        await _store_tensor(call, data, card)
    else:
        data = source.data(parsed.lifted, call.server.settings.max_media_bytes)
        await _store_image(call, data, card)


async def _read_tensor(call: Call) -> Buffer:
    """Read a body that is a tensor file.

    Raises:
        EmbeddingsError: over the limit; from Content-Length, before anything is read.
        BodyTooLargeError: over the limit of bodies.
        InlayError: as `read_file`.
    """
    limits = call.server.limits.any

    def check(size: int) -> None:
        if size > limits.max_bytes:
            check_size(size, limits=limits)

    data = await read_file(call, check)
    if not len(data):
        raise EmbeddingsError(
            "prompt_embeds decoded data must be at least 100 bytes, got an empty body",
            reason="too_small",
        )
    return data


async def _read_image(call: Call) -> Buffer:
    """Read a body that is an image file.

    Raises:
        InvalidRequestError: over the limit; from Content-Length, before anything is read.
        InlayError: as `_read_tensor`.
    """
    limit = call.server.settings.max_media_bytes
    return await read_file(call, lambda size: _check_image_size(size, limit))


def _check_image_size(size: int, limit: int) -> None:
    """Raise `InvalidRequestError` for a file of more than `limit` bytes."""
    if size > limit:
        raise InvalidRequestError(f"an image has {size} bytes; allowed: {limit}")


async def _store_tensor(call: Call, data: Buffer, card: ModelCard | None) -> None:
    store, tenant = store_for(call), call.caller.tenant.id
    tensor = await call.server.run_prepared(len(data), _read, call, data, card)
    stored = await store.put(tenant, data, tensor, hold=call.reservation.grow)
    if card is not None:
        # Makes the rows now, so that the first use finds them.
        await store.rows(tenant, stored.id, call.server.embeds.target(card), look=_seen)
    await call.json(shown(stored))


async def _store_image(call: Call, data: Buffer, card: ModelCard | None) -> None:
    server = call.server
    if not takes_images(server):
        raise InvalidRequestError("no model of this server takes images", param="data")
    _check_image_size(len(data), server.settings.max_media_bytes)
    spec = None
    if card is not None:
        spec = spec_for(card, [MediaSource(None, None, None, "data", ref="data")])
    picture, num_tokens = await server.run_prepared(len(data), _picture, data, spec, server.secret)
    stored = await store_for(call).put(
        call.caller.tenant.id, data, picture, hold=call.reservation.grow
    )
    await call.json(shown(stored, num_tokens))


def _picture(data: Buffer, spec: MediaSpec | None, secret: Secret) -> tuple[NewImage, int | None]:
    """Return an image and, with the spec of a model, the positions it takes in its prompts."""
    try:
        header = read_image_header(data.view)
        picture = NewImage(data, header.format, header.height, header.width)
        return picture, None if spec is None else image_item(spec, data, secret).positions
    except InvalidRequestError as error:
        raise InvalidRequestError(f"data: {error.message}", param="data") from error


def _model(call: Call) -> str | None:
    names = call.query().get("model")
    return names[0] if names else None


async def _parsed(call: Call) -> Parsed[UploadRequest]:
    """Return an upload in JSON, with its data decoded where it is large."""
    body = await read_body(call)
    sources: list[MediaSource | None] = []

    def tensors_in(request: UploadRequest) -> list[str]:
        sources[:] = [_source(request)]
        return [request.data] if sources == [None] else []

    return await parse(call, body, _upload, tensors_in, lambda _: file_data(sources))


def _source(request: UploadRequest) -> MediaSource | None:
    """Return the image of an upload in JSON; None if it is a tensor."""
    if request.data[:5].lower() != "data:":
        return None
    return MediaSource(request.data, None, None, "data")


def _read(call: Call, data: Buffer, card: ModelCard | None) -> Tensor:
    embeds = call.server.embeds
    tensor = read(data, limits=call.server.limits.any)
    if card is not None:
        embeds.check(tensor, card)
    return tensor


def _seen(stored: StoredPrompt) -> None:
    """Do nothing: the prompt has been checked already."""


async def show(call: Call) -> None:
    """Answer with a stored prompt's metadata; this does not extend its time to live."""
    await call.json(shown(await store_for(call).get(call.caller.tenant.id, _id(call))))


async def delete(call: Call) -> None:
    """Delete a stored prompt from every tier."""
    id_ = _id(call)
    await store_for(call).delete(call.caller.tenant.id, id_)
    await call.json(PromptEmbedsDeleted(id=id_))


async def pin(call: Call) -> None:
    """Keep a stored prompt until it is unpinned or deleted.

    `{"pinned": false}` lets it expire again.
    """
    store = store_for(call)
    request = await read_json(call, _pin, empty=PinRequest())
    await call.json(shown(await store.pin(call.caller.tenant.id, _id(call), request.pinned)))


def _id(call: Call) -> str:
    return str(call.path_params["id"])


def shown(stored: StoredPrompt, num_tokens: int | None = None) -> Stored:
    """Return what a client is told of a stored prompt."""
    common: dict[str, Any] = {
        "id": stored.id,
        "bytes": stored.bytes,
        "expires_at": None if stored.expires_at is None else int(stored.expires_at),
        "pinned": stored.pinned,
    }
    if stored.kind == "image":
        height, width = stored.shape
        return StoredImage(
            format=stored.format, width=width, height=height, num_tokens=num_tokens, **common
        )
    if stored.kind == "vectors":
        num_vectors, size = stored.shape
        return StoredVectors(num_vectors=num_vectors, size=size, dtype=stored.dtype, **common)
    return PromptEmbeds(
        num_prompts=stored.num_prompts,
        num_tokens=stored.num_tokens,
        hidden_size=stored.hidden_size,
        dtype=stored.dtype,
        **common,
    )
