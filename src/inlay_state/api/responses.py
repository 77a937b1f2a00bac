"""`/v1/responses/{id}`: responses that are kept."""

from inlay.http.server import JSON_HEADER, Call
from inlay_state.api.pages import page_of, state_of, whole_number
from inlay_state.api.schema import ResponseDeleted
from inlay_state.history import before_response, of_conversation
from inlay_state.items import decoder
from inlay_state.records import ResponseRecord

_TRUE = ("true", "True", "1")
_MOST_EVENTS = 10**9


async def show(call: Call) -> None:
    """Answer with a response, or with the events of a background response."""
    state, id_ = state_of(call), str(call.path_params["id"])
    owner = state.owner_of(call)
    if call.query().get("stream", [""])[0] in _TRUE:
        after = whole_number(call, "starting_after", -1, 0, _MOST_EVENTS)
        await state.stream(call, owner, id_, after)
        return
    await call.bytes(await state.shown(owner, id_), JSON_HEADER)


async def cancel(call: Call) -> None:
    """Cancel a background response."""
    state = state_of(call)
    body = await state.cancel(state.owner_of(call), str(call.path_params["id"]))
    await call.bytes(body, JSON_HEADER)


async def delete(call: Call) -> None:
    """Delete a response."""
    state, id_ = state_of(call), str(call.path_params["id"])
    await state.delete(state.owner_of(call), id_)
    await call.json(ResponseDeleted(id_))


async def input_items(call: Call) -> None:
    """Answer with the items that a response was made of, those before it included."""
    state, id_ = state_of(call), str(call.path_params["id"])
    owner, kept = state.owner_of(call), state.kept
    record = await kept.get(owner, id_, ResponseRecord)
    own = decoder.decode(await kept.read(record.input) or b"[]")
    before = (await before_response(kept, owner, record.previous)).items
    if record.conversation is not None:
        items = (await of_conversation(kept, owner, record.conversation)).items
        ids = [item.get("id") for item in items]
        first = own[0]["id"] if own else None
        before = items[: ids.index(first)] if first in ids else items
    await call.json(page_of(call, [*before, *own]))
