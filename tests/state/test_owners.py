"""Several frontends that each believe they own one background response: it is made once."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from io import BytesIO
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.api.openai.responses.route import opening_of
from inlay.api.openai.schema.responses import OutputMessage, OutputText, ResponsesRequest
from inlay.base.errors import InvalidRequestError
from inlay.http.asgi import Message
from inlay.store.kept.contents import Contents
from inlay.store.kept.joining import MOST_SMALL
from inlay.store.kept.lease import LeaseLostError
from inlay_state import conversations
from inlay_state.background import PUBLISH_SECONDS, Background
from inlay_state.kept import Kept
from inlay_state.records import HeldResponse, ResponseRecord, decode_response
from tests import virtual_time
from tests.batches.fakes import Killed, Mortal, Slow
from tests.examples import examples
from tests.state.place import CONVERSATION, ID, OWNER, QUEUED, Place

WORDS = [f"lantern {number}, " for number in range(12)]
TEXT = "".join(WORDS)
ticks = st.integers(0, 40).map(lambda number: number / 20)


def another(place: Place, storage: Any) -> Kept:
    """Return what another frontend sees of the place."""
    return Kept(
        storage,
        Contents(storage),
        max_bytes=1 << 30,
        owner_bytes=1 << 30,
        ttl=100_000,
        clock=lambda: place.now,
    )


def streamed(
    place: Place, kept: Kept, seconds: float, size: int
) -> Callable[[bytes, Callable[[Message], Awaitable[None]]], Awaitable[None]]:
    """Return what streams the text, some words at a time, and completes the conversation."""
    message = OutputMessage("m", "completed", [OutputText(TEXT)])
    opening = opening_of(ID, ResponsesRequest(input="x"), "tiny", 0.0, 1.0)
    response = msgspec.structs.replace(opening, status="completed", output=[message])

    async def attempt(_: bytes, send: Callable[[Message], Awaitable[None]]) -> None:
        async def event(**fields: Any) -> None:
            await send({"body": b"data: " + msgspec.json.encode(fields) + b"\n\n"})

        await event(type="response.created", response={**QUEUED, "status": "in_progress"})
        for start in range(0, len(WORDS), size):
            await asyncio.sleep(seconds)
            delta = "".join(WORDS[start : start + size])
            await event(type="response.output_text.delta", item_id="m", delta=delta)
        given = await kept.read((await kept.get(OWNER, ID, ResponseRecord)).input)
        await conversations.complete(place.call(), kept, OWNER, CONVERSATION, ID, given, response)
        await event(type="response.completed", response=msgspec.to_builtins(response))

    return attempt


async def take(storage: Any, kept: Kept, holder: str) -> HeldResponse | None:
    revision, record = await kept.find(OWNER, ID, ResponseRecord)
    assert record is not None
    if record.ended:
        return None
    return await HeldResponse.take(
        storage, f"{OWNER}.{ID}", revision, record, holder, decode_response
    )


async def make(place: Place, storage: Any, holder: str, seconds: float, size: int) -> None:
    """Make the response though another that is not dead may have it."""
    kept = another(place, storage)
    with suppress(LeaseLostError):
        held = await take(storage, kept, holder)
        if held is not None:
            await Background(held, OWNER, kept, streamed(place, kept, seconds, size)).run()


async def check_made_once(place: Place) -> None:
    events = await place.events()
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert [event["type"] for event in events if "delta" not in event] == [
        "response.created",
        "response.completed",
    ]
    assert "".join(event.get("delta", "") for event in events) == TEXT
    found = await place.shown()
    assert found["status"] == "completed"
    assert found["output"][0]["content"][0]["text"] == TEXT
    record = await place.conversation()
    items = msgspec.json.decode(await place.kept.read(record.items))
    assert [item["type"] for item in items] == ["message", "message"]
    assert record.locked_by == ""


async def queued() -> Place:
    place = Place()
    await place.converse()
    await place.enqueue(conversation=CONVERSATION, given=b'[{"type":"message","id":"in"}]')
    return place


Owner = tuple[float, list[float], float, int, int | None, bool]


@settings(max_examples=examples(120), deadline=None)
@given(
    owners=st.lists(
        st.tuples(
            ticks,
            st.lists(ticks, max_size=5),
            ticks,
            st.integers(1, 5),
            st.none() | st.integers(1, 12),
            st.booleans(),
        ),
        min_size=2,
        max_size=5,
    )
)
def test_a_response_is_made_once_whoever_believes_to_own_it_and_wherever_they_die(
    owners: list[Owner],
) -> None:
    async def own(place: Place, number: int, owner: Owner) -> None:
        begin, answers, seconds, size, steps, after = owner
        await asyncio.sleep(begin)
        storage = Slow(Mortal(place.storage, steps, after=after), answers)
        with suppress(Killed):
            await make(place, storage, f"holder-{number}", seconds, size)

    async def act() -> None:
        place = await queued()
        owning = [own(place, number, owner) for number, owner in enumerate(owners)]
        for found in await asyncio.gather(*owning, return_exceptions=True):
            assert found is None or isinstance(found, Killed), found
        await make(place, place.storage, "last", 0.1, 2)
        await check_made_once(place)
        # What the dead left is swept, and no more.
        await place.kept.sweep(-1e18)
        named = {*(await place.record()).pieces, *(await place.conversation()).pieces}
        assert await place.storage.contents() == {piece.name for piece in named}

    virtual_time.run(act())


def test_the_events_of_a_long_response_are_few_pieces_and_its_readers_see_all() -> None:
    words = 6 * MOST_SMALL

    async def act() -> None:
        place = await queued()
        held = await place.take()
        asked: list[int] = []
        most = 0

        async def long(_: bytes, send: Callable[[Message], Awaitable[None]]) -> None:
            nonlocal most
            for number in range(words):
                event = {
                    "type": "response.output_text.delta",
                    "item_id": "m",
                    "delta": f"{number} ",
                }
                await send({"body": b"data: " + msgspec.json.encode(event) + b"\n\n"})
                await asyncio.sleep(PUBLISH_SECONDS)
                most = max(most, len((await place.record()).events))
            done = {"type": "response.completed", "response": {**QUEUED, "status": "completed"}}
            await send({"body": b"data: " + msgspec.json.encode(done) + b"\n\n"})

        async def read(after: int) -> list[int]:
            lines = place.state._events(place.call(), OWNER, await place.record(), after)
            return [msgspec.json.decode(line)["sequence_number"] async for line in lines]

        reading = [asyncio.create_task(read(after)) for after in (-1, 3, words - 1)]
        await Background(held, OWNER, place.kept, long).run()
        asked = [words + 1, words - 3, 1]
        assert [len(each) for each in await asyncio.gather(*reading)] == asked
        assert MOST_SMALL > most > 1
        assert await read(-1) == [*range(words + 1)]
        record = await place.record()
        kept = {piece.name for piece in (*record.pieces, *(await place.conversation()).pieces)}
        assert await place.storage.contents() == kept

    virtual_time.run(act())


@pytest.mark.parametrize("words", range(MOST_SMALL - 2, MOST_SMALL + 4))
def test_a_response_ends_on_a_storage_that_never_has_room_to_join_its_events(words: int) -> None:
    async def act() -> None:
        place = await queued()

        async def long(_: bytes, send: Callable[[Message], Awaitable[None]]) -> None:
            for number in range(words):
                if number == MOST_SMALL - 3:
                    # What is left takes some more events, and never as many as are joined.
                    left = (1 << 24) - (await place.storage.size())[0]
                    await place.storage.write("other", BytesIO(bytes(left - 1200)))
                event = {"type": "response.output_text.delta", "item_id": "m", "delta": "a"}
                await send({"body": b"data: " + msgspec.json.encode(event) + b"\n\n"})
                await asyncio.sleep(PUBLISH_SECONDS)
            done = {"type": "response.completed", "response": {**QUEUED, "status": "completed"}}
            await send({"body": b"data: " + msgspec.json.encode(done) + b"\n\n"})

        async with asyncio.timeout(60):
            await Background(await place.take(), OWNER, place.kept, long).run()
        assert len(await place.events()) == words + 1
        record = await place.record()
        assert len(record.events) > words - 3
        kept = {piece.name for piece in (*record.pieces, *(await place.conversation()).pieces)}
        assert await place.storage.contents() == kept | {"other"}

    virtual_time.run(act())


def test_a_conversation_is_held_by_a_response_for_as_long_as_its_client_waits() -> None:
    async def act() -> None:
        place = await queued()
        loop = asyncio.get_running_loop()
        await conversations.unlock(place.kept, OWNER, CONVERSATION, ID)
        begun, seconds = loop.time(), 3 * conversations.LOCK_SECONDS
        place.kept._clock = lambda: 1000.0 + loop.time() - begun

        async def taken() -> None:
            await conversations.lock(place.kept, OWNER, CONVERSATION, "resp_b")

        async with conversations.locked(place.kept, OWNER, CONVERSATION, ID):
            for _ in range(100):
                await asyncio.sleep(seconds / 100)
                with pytest.raises(InvalidRequestError, match="another response"):
                    await taken()
        await taken()
        # One whose frontend is lost is free after a while.
        await asyncio.sleep(conversations.LOCK_SECONDS)
        await conversations.lock(place.kept, OWNER, CONVERSATION, "resp_c")

    virtual_time.run(act())
