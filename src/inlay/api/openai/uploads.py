"""`/v1/prompt_embeds`: embeddings uploaded once and used by reference."""

import msgspec

from inlay.api.openai.schema.prompt_embeds import (
    PinRequest,
    PromptEmbeds,
    PromptEmbedsDeleted,
    UploadRequest,
)
from inlay.card import ModelCard
from inlay.http.asgi import JSON, OCTETS, check_content_type, content_type_of
from inlay.http.parsed_request import parse, read_json, read_tensor, store_for
from inlay.http.server import Call
from inlay.prompt import Buffer
from inlay.store import StoredPrompt
from inlay.tensors import Tensor, read

_upload = msgspec.json.Decoder(UploadRequest)
_pin = msgspec.json.Decoder(PinRequest)


async def upload(call: Call) -> None:
    """Store a tensor; with `?model=` only if that model takes it."""
    store = store_for(call)
    name = _model(call)
    card = None if name is None else call.server.card(name)
    media = content_type_of(call.scope["headers"])
    check_content_type(media, OCTETS, JSON)
    data = await read_tensor(call) if media.kind == OCTETS else await _decoded(call)
    tensor = await call.server.prepare(len(data), _read, call, data, card)
    tenant = call.tenant.id
    stored = await store.put(tenant, data, tensor, hold=call.reservation.grow)
    if card is not None:
        # Makes the rows now, so that the first use finds them.
        await store.rows(tenant, stored.id, call.server.embeds.target(card), look=_seen)
    await call.json(_shown(stored))


def _model(call: Call) -> str | None:
    names = call.query("model").get("model")
    return names[0] if names else None


async def _decoded(call: Call) -> Buffer:
    body = await call.body()
    parsed = await parse(call, body, _upload, lambda request: [request.data])
    return parsed.data(parsed.request.data, limits=call.server.embeds.limits)


def _read(call: Call, data: Buffer, card: ModelCard | None) -> Tensor:
    embeds = call.server.embeds
    tensor = read(data, limits=embeds.limits)
    if card is not None:
        embeds.check(tensor, card)
    return tensor


def _seen(stored: StoredPrompt) -> None:
    """Do nothing: the prompt has been checked already."""


async def show(call: Call) -> None:
    """Answer with a stored prompt's metadata; this does not extend its time to live."""
    await call.json(_shown(await store_for(call).get(call.tenant.id, _id(call))))


async def delete(call: Call) -> None:
    """Delete a stored prompt from every tier."""
    id_ = _id(call)
    await store_for(call).delete(call.tenant.id, id_)
    await call.json(PromptEmbedsDeleted(id=id_))


async def pin(call: Call) -> None:
    """Keep a stored prompt until it is unpinned or deleted.

    `{"pinned": false}` lets it expire again.
    """
    store = store_for(call)
    request = await read_json(call, _pin, empty=PinRequest())
    await call.json(_shown(await store.pin(call.tenant.id, _id(call), request.pinned)))


def _id(call: Call) -> str:
    return str(call.path_params["id"])


def _shown(stored: StoredPrompt) -> PromptEmbeds:
    return PromptEmbeds(
        id=stored.id,
        num_prompts=stored.num_prompts,
        num_tokens=stored.num_tokens,
        hidden_size=stored.hidden_size,
        dtype=stored.dtype,
        bytes=stored.bytes,
        expires_at=None if stored.expires_at is None else int(stored.expires_at),
        pinned=stored.pinned,
    )
