"""`/v1/responses/{id}`: responses that are kept."""

from inlay.base.errors import InvalidRequestError, NotFoundError
from inlay.http.paging import whole_number
from inlay.http.server import JSON_HEADER, Call
from inlay_state.api.pages import items_page, state_of
from inlay_state.api.schema import ResponseDeleted
from inlay_state.history import GONE, NOTHING, history_of, items_in
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
    await call.bytes(await state.shown(call, owner, id_), JSON_HEADER)


async def cancel(call: Call) -> None:
    """Cancel a background response."""
    state = state_of(call)
    body = await state.cancel(call, state.owner_of(call), str(call.path_params["id"]))
    await call.bytes(body, JSON_HEADER)


async def delete(call: Call) -> None:
    """Delete a response."""
    state, id_ = state_of(call), str(call.path_params["id"])
    await state.delete(state.owner_of(call), id_)
    await call.json(ResponseDeleted(id_))


async def input_items(call: Call) -> None:
    """Answer with the items that a response was made of, those before it included.

    Without these once they are deleted: a response stays.
    """
    state, id_ = state_of(call), str(call.path_params["id"])
    owner, kept = state.owner_of(call), state.kept
    record = await kept.get(owner, id_, ResponseRecord)
    own = await items_in(call, kept, record.input)
    try:
        history = await history_of(call, kept, owner, record.previous, record.conversation)
    except NotFoundError:
        history = NOTHING
    except InvalidRequestError as error:
        if error.code != GONE:
            raise
        history = NOTHING
    before = history.items
    if record.conversation is not None and own:
        ids = [item.get("id") for item in before]
        first = own[0]["id"]
        before = before[: ids.index(first)] if first in ids else before
    size = history.size + sum(piece.size for piece in record.input)
    await call.prepared_json(size, lambda: items_page(call, [*before, *own]))
