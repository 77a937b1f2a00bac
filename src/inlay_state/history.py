"""Items that come before a request: those of a chain of responses, or of a conversation."""

from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from inlay.api.openai.responses.input import in_input
from inlay.api.openai.schema.responses import ResponsesRequest
from inlay.base.errors import InvalidRequestError
from inlay.http.parsed_request import ParsedRequest
from inlay.http.server import Call
from inlay_state.items import Item, decoder
from inlay_state.kept import Kept
from inlay_state.records import ConversationRecord, ResponseRecord

MAX_RESPONSES = 1000
MAX_BYTES = 16 * 1024 * 1024


class _Output(msgspec.Struct):
    output: list[Item] = []


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


async def before_response(kept: Kept, owner: str, previous: str | None) -> History:
    """Return the items of a response and of all before it.

    Raises:
        InvalidRequestError: it does not exist, has not ended well, or the chain is too long.
        OverloadedError: the storage does not answer.
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
                code="previous_response_not_found",
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
    items: list[Item] = []
    for record in reversed(records):
        items += decoder.decode(await kept.read(record.input) or b"[]")
        items += msgspec.json.decode(await kept.read(record.output), type=_Output).output
    return History(items, size, records[0].session if records else "")


async def of_conversation(kept: Kept, owner: str, id_: str) -> History:
    """Return the items of a conversation. Raises as `Kept.get`."""
    record = await kept.get(owner, id_, ConversationRecord)
    body = await kept.read(record.items)
    return History(decoder.decode(body or b"[]"), len(body), id_)


async def history_of(
    kept: Kept, owner: str, previous: str | None, conversation_id: str | None
) -> History:
    """Return what comes before a request that goes on with either. Raises as both."""
    if conversation_id is not None:
        return await of_conversation(kept, owner, conversation_id)
    return await before_response(kept, owner, previous)


def with_history(
    call: Call, incoming: ParsedRequest[ResponsesRequest], history: History
) -> ParsedRequest[ResponsesRequest]:
    """Return a request with what comes before it in its input.

    Raises:
        InvalidRequestError: embeddings in it are not allowed.
        InlayError: as `Reservation.grow`.
    """
    request = incoming.parsed.request
    if not history.items:
        return incoming
    given: Any = request.input
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    call.reservation.grow(4 * history.size)
    request.input = [*history.items, *(given or ())]
    sources = in_input(request)
    if sources:
        call.server.embeds.tensors(sources)
    return replace(incoming, sources=sources, size=incoming.size + history.size)
