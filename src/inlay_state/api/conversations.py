"""`/v1/conversations`: items that responses add to."""

import secrets

import msgspec

from inlay.api.fields import own_names
from inlay.api.openai.responses.input import check_metadata
from inlay.base.errors import InlayError, InvalidRequestError, NotFoundError
from inlay.http.parsed_request import read_json
from inlay.http.server import Call
from inlay.store.kept.lease import replace
from inlay_state.api.pages import items_page, state_of
from inlay_state.api.schema import (
    Conversation,
    ConversationDeleted,
    ConversationRequest,
    ConversationUpdate,
    ItemList,
    ItemsRequest,
)
from inlay_state.conversations import put_items
from inlay_state.history import History, of_conversation
from inlay_state.items import Item, check_items, items_of
from inlay_state.records import ConversationRecord, encode, new_id

MOST_ITEMS = 20
_create = msgspec.json.Decoder(ConversationRequest)
_update = msgspec.json.Decoder(ConversationUpdate)
_items = msgspec.json.Decoder(ItemsRequest)


async def create(call: Call) -> None:
    """Begin a conversation."""
    state = state_of(call)
    request = await read_json(call, _create, empty=ConversationRequest())
    check_metadata(request.metadata or {})
    items = await _checked(call, request.items or [])
    owner, kept = state.owner_of(call), state.kept
    record = ConversationRecord(
        id=new_id("conv_"),
        created_at=int(kept.now()),
        expires_at=kept.expiry(),
        metadata=request.metadata or {},
    )
    kept.check_room(owner, len(encode(record)))
    await kept.add(owner, record)
    if items:
        try:
            await put_items(call, kept, owner, record.id, items)
        except InlayError:
            await kept.drop(owner, record.id, ConversationRecord)
            raise
    await call.json(_shown(record))


async def show(call: Call) -> None:
    """Answer with a conversation."""
    state = state_of(call)
    id_ = str(call.path_params["id"])
    await call.json(_shown(await state.kept.get(state.owner_of(call), id_, ConversationRecord)))


async def update(call: Call) -> None:
    """Change the metadata of a conversation."""
    state = state_of(call)
    request = await read_json(call, _update)
    metadata = request.metadata or {}
    check_metadata(metadata)
    owner, kept = state.owner_of(call), state.kept

    def updated(found: ConversationRecord) -> ConversationRecord:
        changed = replace(found, metadata=metadata, expires_at=kept.expiry())
        kept.check_room(owner, len(encode(changed)) - len(encode(found)))
        return changed

    id_ = str(call.path_params["id"])
    await call.json(_shown(await kept.change(owner, id_, ConversationRecord, updated)))


async def delete(call: Call) -> None:
    """Delete a conversation; the responses that were made in it stay."""
    state, id_ = state_of(call), str(call.path_params["id"])
    await state.kept.drop(state.owner_of(call), id_, ConversationRecord)
    await call.json(ConversationDeleted(id_))


async def add_items(call: Call) -> None:
    """Add items at the end."""
    state = state_of(call)
    request = await read_json(call, _items)
    if not request.items:
        raise InvalidRequestError("items has no entries; at least one is needed", param="items")
    items = await _checked(call, request.items)
    await put_items(call, state.kept, state.owner_of(call), str(call.path_params["id"]), items)
    await call.json(ItemList(items, items[0]["id"], items[-1]["id"], has_more=False))


async def list_items(call: Call) -> None:
    """Answer with items, newest first unless the query says otherwise."""
    history = await _all(call)
    await call.prepared_json(history.size, lambda: items_page(call, history.items))


async def show_item(call: Call) -> None:
    """Answer with one item."""
    wanted = str(call.path_params["item"])
    history = await _all(call)
    found = next((item for item in history.items if item.get("id") == wanted), None)
    if found is None:
        raise NotFoundError(f"item {wanted[:80]!r} does not exist", param="item_id")
    await call.prepared_json(history.size, lambda: found)


async def delete_item(call: Call) -> None:
    """Remove one item; answer with the conversation."""
    state = state_of(call)
    id_, item = str(call.path_params["id"]), str(call.path_params["item"])
    owner = state.owner_of(call)
    await call.json(_shown(await put_items(call, state.kept, owner, id_, [], without=item)))


async def _all(call: Call) -> History:
    state = state_of(call)
    id_ = str(call.path_params["id"])
    return await of_conversation(call, state.kept, state.owner_of(call), id_)


async def _checked(call: Call, given: list[Item]) -> list[Item]:
    """Return items with their ids. Raises `InvalidRequestError`."""
    if len(given) > MOST_ITEMS:
        raise InvalidRequestError(
            f"items has {len(given)} entries; at most {MOST_ITEMS}", param="items"
        )
    items = items_of(given, secrets.token_hex(8), "items")
    if items:
        with own_names({"input": "items"}):
            await call.server.run_prepared(call.memory.json, check_items, items)
    return items


def _shown(record: ConversationRecord) -> Conversation:
    return Conversation(record.id, record.created_at, record.metadata)
