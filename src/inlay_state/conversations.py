"""Conversations: items that responses add to, one response at a time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import NoReturn

import msgspec

from inlay.api.openai.responses.items import item_id
from inlay.api.openai.schema.responses import Response
from inlay.base.errors import InvalidRequestError, NotFoundError
from inlay.http.server import OFFLOAD_BYTES, Call
from inlay.store.kept.contents import Piece
from inlay.store.kept.lease import replace
from inlay.store.kept.rounds import rounds
from inlay_state.history import MAX_BYTES, items_in
from inlay_state.items import PREFIXES, Item, decoder, input_id
from inlay_state.kept import Kept
from inlay_state.records import ConversationRecord

LOCK_SECONDS = 120.0
"""Time after which a response gives up a conversation whose frontend holds it no more."""
RENEW_SECONDS = LOCK_SECONDS / 3


async def lock(kept: Kept, owner: str, id_: str, response_id: str) -> None:
    """Have one response alone add to a conversation.

    Raises:
        InvalidRequestError: another response is being made.
        NotFoundError: this owner has no such conversation.
    """

    def taken(record: ConversationRecord) -> ConversationRecord:
        if record.locked_by not in ("", response_id) and kept.now() < record.locked_until:
            raise InvalidRequestError(
                f"conversation {id_!r} is being continued by another response; send it again once "
                "that one has ended",
                param="conversation",
                code="conversation_locked",
            )
        return replace(record, locked_by=response_id, locked_until=kept.now() + LOCK_SECONDS)

    await kept.change(owner, id_, ConversationRecord, taken)


async def renew(kept: Kept, owner: str, id_: str, response_id: str) -> None:
    """Hold a conversation on that this response may have locked; it may be gone."""
    await _set_lock(kept, owner, id_, response_id, response_id)


async def unlock(kept: Kept, owner: str, id_: str, response_id: str) -> None:
    """Give up a conversation that this response may have locked; it may be gone."""
    await _set_lock(kept, owner, id_, response_id, "")


async def _set_lock(kept: Kept, owner: str, id_: str, response_id: str, holder: str) -> None:
    until = kept.now() + LOCK_SECONDS

    def changed(record: ConversationRecord) -> ConversationRecord:
        if record.locked_by != response_id:
            return record
        return replace(record, locked_by=holder, locked_until=until)

    with suppress(NotFoundError):
        await kept.change(owner, id_, ConversationRecord, changed)


@asynccontextmanager
async def locked(kept: Kept, owner: str, id_: str, response_id: str) -> AsyncIterator[None]:
    """Hold a conversation meanwhile, however long that is. Raises as `lock`."""
    await lock(kept, owner, id_, response_id)
    holding = asyncio.create_task(_hold(kept, owner, id_, response_id))
    try:
        yield
    finally:
        holding.cancel()
        await asyncio.wait([holding])
        await unlock(kept, owner, id_, response_id)


async def _hold(kept: Kept, owner: str, id_: str, response_id: str) -> NoReturn:
    await asyncio.sleep(RENEW_SECONDS)
    await rounds(partial(renew, kept, owner, id_, response_id), RENEW_SECONDS)


async def complete(
    call: Call,
    kept: Kept,
    owner: str,
    id_: str,
    response_id: str,
    given: bytes | bytearray,
    response: Response,
) -> None:
    """Add the input and output of a response to the conversation that it has locked.

    Not if it has it no more: then they were added, or others have gone on.
    """
    record = await kept.get(owner, id_, ConversationRecord)
    if record.locked_by != response_id:
        return

    def more() -> list[Item]:
        return decoder.decode(given) + decoder.decode(msgspec.json.encode(response.output))

    items = await call.server.run_prepared(OFFLOAD_BYTES + len(given), more)
    await put_items(call, kept, owner, id_, items, from_=response_id)


def items_before(items: list[Item], response_id: str, given: list[Item]) -> list[Item]:
    """Return the items of a conversation before those that `complete` may have added.

    Args:
        items: of the conversation, oldest first.
        response_id: of the response that `complete` added.
        given: its input.
    """
    makes = (item_id, input_id)
    first = {make(prefix, response_id, 0) for make in makes for prefix in PREFIXES.values()}
    end = next((at for at, item in enumerate(items) if item.get("id") in first), None)
    if end is None:
        return items
    own = {item.get("id") for item in given}
    while end and items[end - 1].get("id") in own:
        end -= 1
    return items[:end]


async def put_items(
    call: Call,
    kept: Kept,
    owner: str,
    id_: str,
    more: list[Item],
    *,
    from_: str = "",
    without: str = "",
) -> ConversationRecord:
    """Add items to a conversation, and remove the one of the id `without`.

    Raises:
        InvalidRequestError: it would be too long.
        NotFoundError: there is none, or it has no such item.
        InlayError: as `items_in`, and as `Kept.write`.
    """
    while True:
        record, items = await kept.content(
            owner, id_, ConversationRecord, lambda found: items_in(call, kept, found.items)
        )
        if from_ and record.locked_by != from_:
            return record
        body = await call.server.run_prepared(OFFLOAD_BYTES, _changed, items, more, without)
        if len(body) > MAX_BYTES:
            raise InvalidRequestError(
                f"the items of the conversation would have {len(body)} bytes; at most {MAX_BYTES}",
                param="items",
            )
        pieces = await kept.write(owner, "items", body, instead_of=record.items)
        add = partial(
            _with_items, before=record.items, now=pieces, expires=kept.expiry(), unlock=bool(from_)
        )
        changed = await kept.change(owner, id_, ConversationRecord, add)
        if changed.items == pieces:
            await kept.erase(owner, list(record.items))
            return changed
        await kept.erase(owner, list(pieces))


def _changed(items: list[Item], more: list[Item], without: str) -> bytes:
    """Return the JSON of items of a conversation. Raises `NotFoundError`: none has `without`."""
    kept = [item for item in items if item.get("id") != without] if without else items
    if without and len(kept) == len(items):
        raise NotFoundError(f"item {without[:80]!r} does not exist", param="item_id")
    return msgspec.json.encode(kept + more)


def _with_items(
    record: ConversationRecord,
    *,
    before: tuple[Piece, ...],
    now: tuple[Piece, ...],
    expires: int,
    unlock: bool,
) -> ConversationRecord:
    """Return a record with other items; as it is where others have changed them."""
    if record.items != before:
        return record
    holder = "" if unlock else record.locked_by
    return replace(record, items=now, expires_at=expires, locked_by=holder)
