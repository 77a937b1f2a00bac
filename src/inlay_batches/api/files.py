"""`/v1/files`: files that clients upload for batches, and what batches have made."""

import tempfile
from typing import BinaryIO

from inlay.base.errors import InvalidRequestError
from inlay.http.bodies.form import FieldForm
from inlay.http.paging import is_ascending, number_in
from inlay.http.parsed_request import read_form
from inlay.http.quoting import shown_value
from inlay.http.request_scope import RequestScope
from inlay.http.server import OCTETS, Call
from inlay.store.kept.contents import PIECES_HELD
from inlay_batches.api.pages import batches_of, records_page
from inlay_batches.api.schema import FileDeleted, FileList, FileObject
from inlay_batches.records import FileRecord

PURPOSES = ("batch", "user_data")
_MOST = 10_000
_IN_MEMORY = 1024 * 1024
"""Bytes of an upload that are held in memory; a larger one goes to an unnamed file."""


async def upload(call: Call) -> None:
    """Keep a file of a form."""
    batches = batches_of(call)
    owner = batches.owner(call.caller.tenant.id)
    await batches.files.check_room(owner, call.declared or 0)
    with tempfile.SpooledTemporaryFile(_IN_MEMORY) as spool:
        file: BinaryIO = spool  # type: ignore[assignment]
        form = await read_form(
            call,
            "file",
            file,
            max_file_bytes=batches.settings.max_file_bytes,
            flag="--max-file-bytes",
        )
        purpose = _purpose(form)
        record = await batches.files.create(
            owner,
            file,
            filename=form.filename,
            purpose=purpose,
            size=form.file_bytes or 0,
            ttl=_ttl(form),
        )
    await call.json(shown(record))


def _purpose(form: FieldForm) -> str:
    purpose = form.text("purpose")
    if purpose not in PURPOSES:
        got = "none" if purpose is None else shown_value(purpose)
        raise InvalidRequestError(
            f"purpose must be {' or '.join(map(repr, PURPOSES))}, got {got}", param="purpose"
        )
    return purpose


def _ttl(form: FieldForm) -> int | None:
    """Return the seconds that a file is kept, where its form says it."""
    given = form.group("expires_after")
    if not given:
        return None
    seconds = number_in(given.get("seconds", ""), 3600, 2_592_000)
    if given.get("anchor") != "created_at" or seconds is None:
        raise InvalidRequestError(
            "expires_after must have anchor created_at and seconds from 3600 to 2592000, got "
            f"{shown_value(given)}",
            param="expires_after",
        )
    return seconds


async def list_files(call: Call) -> None:
    """Answer with the caller's files."""
    batches, ascending = batches_of(call), is_ascending(call)
    purpose = call.query().get("purpose", [None])[0]
    records = [
        record
        for record in await batches.files.all_of(batches.owner(call.caller.tenant.id))
        if isinstance(record, FileRecord) and purpose in (None, record.purpose)
    ]
    page, more = records_page(call, records, usual=_MOST, most=_MOST, ascending=ascending)
    await call.json(
        FileList(
            data=[shown(record) for record in page],
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
            has_more=more,
        )
    )


async def _found(call: Call) -> FileRecord:
    batches = batches_of(call)
    return await batches.files.get(
        batches.owner(call.caller.tenant.id), str(call.path_params["id"])
    )


async def show(call: Call) -> None:
    """Answer with what is known of a file."""
    await call.json(shown(await _found(call)))


async def content(call: Call) -> None:
    """Answer with the bytes of a file, a piece at a time."""
    record = await _found(call)
    # However slow its client is, so much is held for it.
    call.reserve(PIECES_HELD * max((piece.size for piece in record.pieces), default=0))
    pieces = batches_of(call).files.read(record)
    # Before the answer begins, so that a file that is lost is an error.
    first = await anext(pieces, b"")
    headers = [
        (b"content-type", OCTETS.encode()),
        (b"content-length", str(record.size).encode()),
    ]
    async with RequestScope(call.server.inflight, call.receive):
        await call.send({"type": "http.response.start", "status": 200, "headers": headers})
        await call.send({"type": "http.response.body", "body": first, "more_body": True})
        async for piece in pieces:
            await call.send({"type": "http.response.body", "body": piece, "more_body": True})
        await call.send({"type": "http.response.body", "body": b""})


async def delete(call: Call) -> None:
    """Remove a file."""
    batches, id_ = batches_of(call), str(call.path_params["id"])
    await batches.files.delete(batches.owner(call.caller.tenant.id), id_)
    await call.json(FileDeleted(id=id_))


def shown(record: FileRecord) -> FileObject:
    """Return a file as clients see it."""
    return FileObject(
        id=record.id,
        bytes=record.size,
        created_at=record.created_at,
        expires_at=record.expires_at,
        filename=record.filename,
        purpose=record.purpose,
    )
