"""Lists that are answered a page at a time: `limit`, `order` and `after` of a query."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from inlay.base.errors import InvalidRequestError
from inlay.http.openapi import Parameter
from inlay.http.quoting import shown_value
from inlay.http.server import Call

T = TypeVar("T")

_MOST_DIGITS = 12
_ORDERS = ("asc", "desc")


def limit_parameter(text: str, example: int, usual: int, most: int) -> Parameter:
    """Return `limit`, in words, with an example, `usual` where it is absent and at most `most`."""
    schema = {"type": "integer", "minimum": 1, "maximum": most, "default": usual}
    return Parameter("limit", text, example, schema)


def list_parameters(id_: str, order: str, usual: int, most: int) -> tuple[Parameter, ...]:
    """Return what `page_of` and `is_ascending` read: `limit`, `order` in words, and `after`.

    Args:
        id_: example of an id.
        order: meaning of `order`; empty: the list has one.
        usual: entries of a page unless a query says otherwise.
        most: entries of a page.
    """
    schema: dict[str, Any] = {"enum": [*_ORDERS], "default": "desc"}
    return (
        limit_parameter("entries of a page.", 10, usual, most),
        *([Parameter("order", order, "asc", schema)] if order else []),
        Parameter("after", "id of the last entry of the page before.", id_),
    )


def whole_number(call: Call, name: str, usual: int, least: int, most: int) -> int:
    """Return a number of the query. Raises `InvalidRequestError`."""
    text = call.query().get(name, [str(usual)])[0]
    if text == str(usual):
        return usual
    found = number_in(text, least, most)
    if found is None:
        raise InvalidRequestError(
            f"{name} must be a whole number from {least} to {most}, got {shown_value(text)}",
            param=name,
        )
    return found


def number_in(text: str, least: int, most: int) -> int | None:
    """Return a whole number that a text holds; None unless it is within bounds."""
    # Of thousands of digits Python reads none.
    is_number = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
    return int(text) if is_number and least <= int(text) <= most else None


def is_ascending(call: Call) -> bool:
    """Return True if a query asks for the oldest first. Raises `InvalidRequestError`."""
    order = call.query().get("order", ["desc"])[0]
    if order not in _ORDERS:
        raise InvalidRequestError(
            f"order must be asc or desc, got {shown_value(order)}", param="order"
        )
    return order == "asc"


def page_of(
    call: Call, ordered: Sequence[T], id_of: Callable[[T], Any], *, usual: int, most: int
) -> tuple[list[T], bool]:
    """Return the page of a list that a query asks for, and whether there is more.

    Args:
        call: has the query.
        ordered: the whole list.
        id_of: id of an entry.
        usual: entries unless the query says otherwise.
        most: entries.

    Raises:
        InvalidRequestError: `limit` is no number within its bounds, or `after` no id of the list.
    """
    limit = whole_number(call, "limit", usual, 1, most)
    start = 0
    if after := call.query().get("after", [""])[0]:
        ids = [id_of(entry) for entry in ordered]
        if after not in ids:
            raise InvalidRequestError(
                f"after must be the id of an entry of the list, got {shown_value(after)}",
                param="after",
            )
        start = ids.index(after) + 1
    return [*ordered[start : start + limit]], start + limit < len(ordered)
