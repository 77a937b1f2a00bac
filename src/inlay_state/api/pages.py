"""Pages of items, and what they are kept in."""

from inlay.base.errors import NotFoundError
from inlay.http.paging import is_ascending, page_of
from inlay.http.server import Call
from inlay_state.api.schema import ItemList
from inlay_state.items import Item
from inlay_state.service import State

NAME = "state"
MOST, USUAL = 100, 20


def state_of(call: Call) -> State:
    """Return what the server keeps. Raises `NotFoundError` where it keeps nothing."""
    found: State | None = call.server.parts.get(NAME)
    if found is None:
        raise NotFoundError(
            f"{call.scope['method']} {call.scope['path']} does not exist: this server keeps no "
            "responses (--response-store)"
        )
    return found


def items_page(call: Call, items: list[Item]) -> ItemList:
    """Return the page of `items`, oldest first, that a query asks for.

    Raises:
        InvalidRequestError: `limit`, `order` or `after` cannot be.
    """
    ordered = items if is_ascending(call) else items[::-1]
    page, more = page_of(call, ordered, lambda item: item.get("id"), usual=USUAL, most=MOST)
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return ItemList(page, first, last, more)
