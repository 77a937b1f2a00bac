"""One background response, and what becomes of its conversation, without a model."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
import pytest

from inlay.api.openai.responses.items import item_id
from inlay.api.openai.responses.route import opening_of
from inlay.api.openai.schema.responses import OutputMessage, ResponsesRequest
from inlay.base.errors import InlayError, InvalidRequestError, NotFoundError
from inlay.http.asgi import Message
from inlay.store.kept.lease import replace
from inlay_state import conversations
from inlay_state.background import TRIES, Background
from inlay_state.events import lines_in
from inlay_state.history import history_of, of_conversation
from inlay_state.items import Item, encoded, items_of
from inlay_state.records import ResponseRecord
from tests.state.place import CONVERSATION, ID, OWNER, QUEUED, Place


class Answer:
    """Streams one answer, and counts how often it was asked for."""

    def __init__(self, text: str = "hello") -> None:
        self.asked = 0
        done = {**QUEUED, "status": "completed", "output": [{"type": "message", "text": text}]}
        self.events: list[dict[str, Any]] = [
            {"type": "response.created", "response": {**QUEUED, "status": "in_progress"}},
            {"type": "response.output_text.delta", "item_id": "m", "delta": text},
            {"type": "response.completed", "response": done},
        ]

    async def __call__(self, _: bytes, send: Callable[[Message], Awaitable[None]]) -> None:
        self.asked += 1
        for event in self.events:
            await send({"body": b"event: e\ndata: " + msgspec.json.encode(event) + b"\n\n"})


async def made(place: Place, answer: Callable[..., Awaitable[None]]) -> None:
    await Background(await place.take(), OWNER, place.kept, answer).run()


async def test_events_are_whole_where_their_content_is_cut_into_pieces() -> None:
    place = Place()
    events = [b'{"type":"response.created","text":"%b"}' % (b"x" * 700_000) for _ in range(3)]
    pieces = await place.kept.write(OWNER, "events", b"".join(one + b"\n" for one in events))
    assert len(pieces) > 2
    assert [line async for line in lines_in(place.kept.contents.stream(pieces))] == events


async def test_an_answer_is_kept_with_its_events() -> None:
    place = Place()
    await place.enqueue()
    await made(place, Answer())
    assert (await place.shown())["status"] == "completed"
    assert [event["sequence_number"] for event in await place.events()] == [0, 1, 2]
    record = await place.record()
    assert await place.storage.contents() == {piece.name for piece in record.pieces}


async def test_an_answer_over_the_bytes_of_its_tenant_fails_once_and_says_why() -> None:
    place = Place(owner_bytes=2000)
    await place.enqueue()
    answer = Answer("lantern " * 1000)
    await made(place, answer)
    assert answer.asked == 1
    found = await place.shown()
    assert found["status"] == "failed"
    assert found["error"]["code"] == "rate_limit_exceeded"
    assert "--responses-tenant-bytes" in found["error"]["message"]
    assert [event["type"] for event in await place.events()] == ["response.failed"]
    record = await place.record()
    assert await place.storage.contents() == {piece.name for piece in record.pieces}


async def test_a_response_that_is_made_again_with_another_text_fails_once_and_says_so() -> None:
    place = Place()
    await place.enqueue()
    held = await place.take()
    events = [{**event, "sequence_number": at} for at, event in enumerate(Answer().events[:2])]
    lines = b"".join(msgspec.json.encode(event) + b"\n" for event in events)
    pieces = await place.kept.write(OWNER, "events", lines)
    await held.change(lambda record: replace(record, events=pieces))
    answer = Answer("another")

    async def streamed(body: bytes, send: Callable[[Message], Awaitable[None]]) -> None:
        # As the route, which fails in its stream.
        try:
            await answer(body, send)
        except InlayError:
            error = {"code": "server_error", "message": "internal error"}
            failed = {"type": "response.failed", "response": {**QUEUED, "error": error}}
            await send({"body": b"data: " + msgspec.json.encode(failed) + b"\n\n"})

    await Background(held, OWNER, place.kept, streamed).run()
    assert answer.asked == 1
    assert "another text" in (await place.shown())["error"]["message"]
    kinds = ["response.created", "response.output_text.delta", "response.failed"]
    assert [event["type"] for event in await place.events()] == kinds


async def test_a_failure_before_the_first_event_has_the_fields_of_the_queued_response() -> None:
    place = Place()
    await place.enqueue()

    async def refused(*_: object) -> None:
        raise InvalidRequestError("it is too long")

    await made(place, refused)
    error = {"code": "invalid_prompt", "message": "it is too long"}
    found = await place.shown()
    assert found == {**QUEUED, "status": "failed", "error": error}
    (event,) = await place.events()
    assert event["response"] == found


async def settled(place: Place) -> None:
    """Wait until nothing is made."""
    for _ in range(3000):
        if not len(place.jobs):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it is still made")


async def test_a_response_that_no_frontend_can_make_is_shown_as_failed() -> None:
    place = Place()
    await place.converse()
    await place.enqueue(conversation=CONVERSATION)
    (request,) = (await place.record()).request
    await place.storage.erase(request.name)
    for _ in range(TRIES):
        assert (await place.record()).status == "queued"
        await place.jobs.scan()
        await settled(place)
    found = await place.shown()
    assert found["status"] == "failed"
    assert found["error"]["code"] == "server_error"
    assert found["model"] == "tiny"
    assert [event["type"] for event in await place.events()] == ["response.failed"]
    assert (await place.conversation()).locked_by == ""
    assert await place.kept.jobs() == []


async def test_a_response_that_has_ended_gives_up_its_conversation_though_its_frontend_died() -> (
    None
):
    place = Place()
    await place.converse()
    await place.enqueue("completed", CONVERSATION)
    await place.jobs.scan()
    assert (await place.conversation()).locked_by == ""
    assert await place.kept.jobs() == []


async def test_a_response_that_is_made_holds_its_conversation_on() -> None:
    place = Place()
    await place.converse()
    await place.enqueue(conversation=CONVERSATION)
    place.now += conversations.LOCK_SECONDS - 1
    await made(place, Answer())
    place.now += 2
    with pytest.raises(InvalidRequestError, match="another response"):
        await conversations.lock(place.kept, OWNER, CONVERSATION, "resp_b")


async def test_holding_on_takes_no_conversation_that_was_given_up() -> None:
    place = Place()
    await place.converse()
    await conversations.unlock(place.kept, OWNER, CONVERSATION, ID)
    await conversations.renew(place.kept, OWNER, CONVERSATION, ID)
    assert (await place.conversation()).locked_by == ""


async def test_what_is_read_while_others_change_it_is_what_they_made_of_it() -> None:
    place = Place()
    item: list[Item] = items_of("one", "a")
    await place.converse(msgspec.json.encode(item))
    others: list[Item] = items_of("two", "b")
    kept = place.kept

    async def add() -> None:
        await conversations.put_items(place.call(), kept, OWNER, CONVERSATION, others)

    place.storage.on_read = add
    assert (await of_conversation(place.call(), kept, OWNER, CONVERSATION)).items == [
        *item,
        *others,
    ]
    place.storage.on_read = add
    third = items_of("three", "c")
    await conversations.put_items(place.call(), kept, OWNER, CONVERSATION, third)
    found = (await of_conversation(place.call(), kept, OWNER, CONVERSATION)).items
    assert found == [*item, *others, *others, *third]


async def test_a_response_is_shown_and_cancelled_while_it_ends() -> None:
    for act in (Place.shown, Place.cancel):
        place = Place()
        await place.enqueue()
        place.storage.on_read = partial(made, place, Answer())
        assert (await act(place))["status"] == "completed"


async def test_what_is_not_there_is_told_in_words_of_no_file() -> None:
    place = Place()
    await place.enqueue("completed")
    (output,) = (await place.record()).output
    await place.storage.erase(output.name)
    with pytest.raises(NotFoundError, match=r"^its content is gone$"):
        await place.shown()


async def test_what_is_published_of_a_response_that_another_frontend_cancels_is_erased() -> None:
    place = Place()
    await place.enqueue()
    place.storage.on_write = place.cancel
    await made(place, Answer())
    record = await place.record()
    assert record.status == "cancelled"
    assert await place.storage.contents() == {piece.name for piece in record.pieces}
    await place.kept.drop(OWNER, ID, ResponseRecord)
    assert await place.storage.contents() == set()


@pytest.mark.parametrize("given", ["and?", [{"role": "user", "content": "and?", "id": "mine"}], []])
async def test_a_response_that_is_made_again_has_not_its_own_items_before_it(given: Any) -> None:
    place = Place()
    before = items_of("one", "a")
    await place.converse(msgspec.json.encode(before))
    items = items_of(given, ID)
    own = encoded(items, {})
    output = OutputMessage(item_id("msg", ID, 0), "completed", [])
    response = opening_of(ID, ResponsesRequest(), "tiny", 1.0, 1.0)
    response = msgspec.structs.replace(response, output=[output])

    async def history() -> list[Item]:
        found = await history_of(place.call(), place.kept, OWNER, None, CONVERSATION)
        return conversations.items_before(found.items, ID, items)

    assert await history() == before
    await conversations.complete(place.call(), place.kept, OWNER, CONVERSATION, ID, own, response)
    assert await history() == before
    await conversations.put_items(
        place.call(), place.kept, OWNER, CONVERSATION, items_of("later", "b")
    )
    assert await history() == before
