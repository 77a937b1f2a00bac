"""Pages of lists: `limit` and `after`."""

from collections.abc import Sequence
from typing import TypeVar

from inlay.base.errors import InvalidRequestError, NotFoundError
from inlay.http.quoting import shown_value
from inlay.http.server import Call
from inlay_batches.records import BatchRecord, FileRecord
from inlay_batches.service import NAME, Batches

R = TypeVar("R", FileRecord, BatchRecord)


def batches_of(call: Call) -> Batches:
    """Return the files and batches of the server. Raises `NotFoundError` while they are off."""
    found: Batches | None = call.server.parts.get(NAME)
    if found is None:
        # Clients take a 404 of the list for a server without files, and nothing else.
        scope = call.scope
        raise NotFoundError(
            f"{scope['method']} {scope['path']} does not exist: this server keeps no files "
            "(--batch-store)"
        )
    return found


def page_of(
    call: Call, records: Sequence[R], *, usual: int, most: int, newest_first: bool
) -> tuple[list[R], bool]:
    """Return the page that a query asks for, and whether there is more.

    Raises:
        InvalidRequestError: `limit` is no number within its bounds, or `after` no id of the list.
    """
    query = call.query()
    text = query.get("limit", [str(usual)])[0]
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= most):
        raise InvalidRequestError(
            f"limit must be a whole number from 1 to {most}, got {shown_value(text)}",
            param="limit",
        )
    limit = int(text)
    ordered = sorted(
        records, key=lambda record: (record.created_at, record.id), reverse=newest_first
    )
    start = 0
    if after := query.get("after", [""])[0]:
        ids = [record.id for record in ordered]
        if after not in ids:
            raise InvalidRequestError(
                f"after must be the id of an entry of the list, got {shown_value(after)}",
                param="after",
            )
        start = ids.index(after) + 1
    return ordered[start : start + limit], start + limit < len(ordered)
