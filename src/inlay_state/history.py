"""Items that come before a request: those of a chain of responses, or of a conversation."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from inlay.api.openai.responses.input import in_input
from inlay.api.openai.schema.responses import ResponsesRequest
from inlay.base.errors import InvalidRequestError
from inlay.http.parsed_request import ParsedRequest
from inlay.http.server import Call
from inlay.store.kept.contents import Piece
from inlay_state.items import Item, decoder
from inlay_state.kept import Kept
from inlay_state.records import ConversationRecord, ResponseRecord

MAX_RESPONSES = 1000
MAX_BYTES = 16 * 1024 * 1024
"""Bytes of the items of a conversation, or before a request, at most."""

GONE = "previous_response_not_found"
DECODED = 4
"""Bytes that items take for each of their JSON."""


class _Output(msgspec.Struct):
    output: list[Item] = []


_output = msgspec.json.Decoder(_Output)


class History(NamedTuple):
    """Items before a request.

    Attributes:
        items: oldest first.
        size: bytes of their JSON.
        session: by which workers are found that know the prefix; "" for none.
    """

    items: list[Item]
    size: int
    session: str


NOTHING = History([], 0, "")


def reserve(call: Call, pieces: Iterable[Piece]) -> int:
    """Reserve the memory of reading and decoding pieces; return their bytes.

    Raises as `Reservation.grow`.
    """
    size = sum(piece.size for piece in pieces)
    call.reserve((1 + DECODED) * size)
    return size


async def items_in(call: Call, kept: Kept, pieces: Sequence[Piece]) -> list[Item]:
    """Return the items that pieces hold. Raises as `reserve` and `Kept.read`."""
    size = reserve(call, pieces)
    return await call.server.run_prepared(size, decoder.decode, await kept.read(pieces) or b"[]")


async def before_response(call: Call, kept: Kept, owner: str, previous: str | None) -> History:
    """Return the items of a response and of all before it.

    Raises:
        InvalidRequestError: it does not exist, has not ended well, or the chain is too long.
        InlayError: as `items_in`.
    """
    records: list[ResponseRecord] = []
    id_, size = previous, 0
    while id_ is not None:
        _, record = await kept.find(owner, id_, ResponseRecord)
        if record is None:
            earlier = "" if id_ == previous else f", which goes on with {id_!r},"
            raise InvalidRequestError(
                f"previous_response_id {str(previous)[:80]!r}{earlier} was not found: it was never "
                "kept, has expired or was deleted",
                param="previous_response_id",
                code=GONE,
            )
        if record.status not in ("completed", "incomplete"):
            raise InvalidRequestError(
                f"previous_response_id: the response {id_!r} is {record.status}; one that is "
                "completed can be continued",
                param="previous_response_id",
            )
        records.append(record)
        size += sum(piece.size for piece in (*record.input, *record.output))
        if len(records) > MAX_RESPONSES or size > MAX_BYTES:
            raise InvalidRequestError(
                f"the responses before this one are more than {MAX_RESPONSES} or have more than "
                f"{MAX_BYTES} bytes; send what matters of them as input",
                param="previous_response_id",
            )
        id_ = record.previous
    reserve(call, (piece for record in records for piece in (*record.input, *record.output)))
    items: list[Item] = []
    for record in reversed(records):
        given, made = await kept.read(record.input) or b"[]", await kept.read(record.output)
        items += await call.server.run_prepared(len(given), decoder.decode, given)
        items += (await call.server.run_prepared(len(made), _output.decode, made)).output
    return History(items, size, records[0].session if records else "")


async def of_conversation(call: Call, kept: Kept, owner: str, id_: str) -> History:
    """Return the items of a conversation. Raises as `Kept.get` and `items_in`."""
    record, items = await kept.content(
        owner, id_, ConversationRecord, lambda found: items_in(call, kept, found.items)
    )
    return History(items, sum(piece.size for piece in record.items), id_)


async def history_of(
    call: Call, kept: Kept, owner: str, previous: str | None, conversation_id: str | None
) -> History:
    """Return what comes before a request that goes on with either. Raises as both."""
    if conversation_id is not None:
        return await of_conversation(call, kept, owner, conversation_id)
    return await before_response(call, kept, owner, previous)


async def with_history(
    call: Call, incoming: ParsedRequest[ResponsesRequest], history: History
) -> ParsedRequest[ResponsesRequest]:
    """Return a request with what comes before it in its input.

    Raises:
        InvalidRequestError: embeddings in it are not allowed.
    """
    request = incoming.parsed.request
    if not history.items:
        return incoming
    given: Any = request.input
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    request.input = [*history.items, *(given or ())]
    size = incoming.size + history.size
    sources = await call.server.run_prepared(size, in_input, request)
    if sources:
        call.server.embeds.tensors(sources)
    return replace(incoming, sources=sources, size=size)
