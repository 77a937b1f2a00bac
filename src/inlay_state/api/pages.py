"""Pages of items: `limit`, `order` and `after`."""

from inlay.base.errors import InvalidRequestError, NotFoundError
from inlay.http.quoting import shown_value
from inlay.http.server import Call
from inlay_state.api.schema import ItemList
from inlay_state.items import Item
from inlay_state.service import State

NAME = "state"
MOST, USUAL = 100, 20
MOST_DIGITS = 12


def state_of(call: Call) -> State:
    """Return what the server keeps. Raises `NotFoundError` where it keeps nothing."""
    found: State | None = call.server.parts.get(NAME)
    if found is None:
        raise NotFoundError(
            f"{call.scope['method']} {call.scope['path']} does not exist: this server keeps no "
            "responses (--response-store)"
        )
    return found


def whole_number(call: Call, name: str, usual: int, least: int, most: int) -> int:
    """Return a number of the query. Raises `InvalidRequestError`."""
    text = call.query().get(name, [str(usual)])[0]
    if text == str(usual):
        return usual
    is_number = text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS
    if not (is_number and least <= int(text) <= most):
        raise InvalidRequestError(
            f"{name} must be a whole number from {least} to {most}, got {shown_value(text)}",
            param=name,
        )
    return int(text)


def page_of(call: Call, items: list[Item]) -> ItemList:
    """Return the page of `items`, oldest first, that a query asks for.

    Raises:
        InvalidRequestError: `limit`, `order` or `after` cannot be.
    """
    query = call.query()
    limit = whole_number(call, "limit", USUAL, 1, MOST)
    order = query.get("order", ["desc"])[0]
    if order not in ("asc", "desc"):
        raise InvalidRequestError(
            f"order must be asc or desc, got {shown_value(order)}", param="order"
        )
    ordered = items if order == "asc" else items[::-1]
    start = 0
    if after := query.get("after", [""])[0]:
        ids = [item.get("id") for item in ordered]
        if after not in ids:
            raise InvalidRequestError(
                f"after must be the id of an entry of the list, got {shown_value(after)}",
                param="after",
            )
        start = ids.index(after) + 1
    page = ordered[start : start + limit]
    return ItemList(
        page,
        page[0]["id"] if page else None,
        page[-1]["id"] if page else None,
        start + limit < len(ordered),
    )
