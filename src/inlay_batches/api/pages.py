"""Pages of files and batches, and what they are kept in."""

from collections.abc import Sequence
from typing import TypeVar

from inlay.base.errors import NotFoundError
from inlay.http.paging import page_of
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


def records_page(
    call: Call, records: Sequence[R], *, usual: int, most: int, ascending: bool = False
) -> tuple[list[R], bool]:
    """Return the page by time that a query asks for, and whether there is more.

    Raises:
        InvalidRequestError: `limit` is no number within its bounds, or `after` no id of the list.
    """
    ordered = sorted(
        records, key=lambda record: (record.created_at, record.id), reverse=not ascending
    )
    return page_of(call, ordered, lambda record: record.id, usual=usual, most=most)
