"""Responses that are kept, with the real client of OpenAI."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from inlay.store.kept.lease import Lease, replace
from inlay.store.settings import ResponseSettings
from inlay_state.records import ResponseRecord, decode, encode
from inlay_state.service import State
from tests.live import Fleet, until
from tests.payloads import embeds_of, error, post, saved

ASK: dict[str, Any] = {"model": "tiny", "max_output_tokens": 12, "temperature": 0}


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module", params=["memory", "directory"])
def kept_url(
    request: pytest.FixtureRequest, llama: Fleet, tmp_path_factory: pytest.TempPathFactory
) -> str:
    where = str(tmp_path_factory.mktemp("kept") / "store")
    store = "memory" if request.param == "memory" else where
    return llama.serve(responses=ResponseSettings(response_store=store), enable_prompt_embeds=True)


@pytest.fixture
def client(kept_url: str) -> Iterator[openai.OpenAI]:
    with client_of(kept_url) as made:
        yield made


def ended(client: openai.OpenAI, id_: str) -> Any:
    deadline = time.monotonic() + 60
    while (found := client.responses.retrieve(id_)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def test_a_response_is_kept_shown_and_deleted(client: openai.OpenAI) -> None:
    made = client.responses.create(input="count the lanterns", metadata={"a": "b"}, **ASK)
    assert made.store is True
    found = client.responses.retrieve(made.id)
    assert found.to_dict() == made.to_dict()
    items = client.responses.input_items.list(made.id).data
    assert [item.type for item in items] == ["message"]
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(input="more", previous_response_id=made.id, **ASK)
    assert caught.value.code == "previous_response_not_found"


def test_store_false_leaves_nothing(llama: Fleet, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    url = llama.serve(responses=ResponseSettings(response_store=str(folder)))
    with client_of(url) as client:
        made = client.responses.create(input="a secret", store=False, **ASK)
        assert made.store is False
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)
    assert [path for path in folder.rglob("*") if path.is_file()] == [folder / "lock"]


def test_a_chain_has_the_prompt_of_the_same_items_sent_whole(client: openai.OpenAI) -> None:
    first = client.responses.create(input="count the lanterns", **ASK)
    call: Any = [
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "four"},
    ]
    second = client.responses.create(input=call, previous_response_id=first.id, **ASK)
    third = client.responses.create(input="and now?", previous_response_id=second.id, **ASK)
    assert third.previous_response_id == second.id
    whole: Any = [
        {"role": "user", "content": "count the lanterns"},
        *[item.to_dict() for item in first.output],
        *call,
        *[item.to_dict() for item in second.output],
        {"role": "user", "content": "and now?"},
    ]
    alone = client.responses.create(input=whole, store=False, **ASK)
    assert alone.output_text == third.output_text
    assert alone.usage is not None
    assert third.usage is not None
    assert alone.usage.input_tokens == third.usage.input_tokens
    ids = [item.id for item in client.responses.input_items.list(third.id, order="asc")]
    assert len(ids) == len(set(ids)) == 6
    pages = client.responses.input_items.list(third.id, limit=2, order="desc")
    assert [item.id for item in pages] == ids[::-1]


def test_what_a_request_goes_on_with_is_counted(client: openai.OpenAI) -> None:
    first = client.responses.create(input="count the lanterns", **ASK)
    kept = client.conversations.create(items=[{"role": "user", "content": "count"}])
    for past in ({"previous_response_id": first.id}, {"conversation": kept.id}):
        asked: Any = {"input": "go on", **past}
        counted = client.responses.input_tokens.count(model="tiny", **asked).input_tokens
        made = client.responses.create(**asked, **ASK)
        assert made.usage is not None
        assert counted == made.usage.input_tokens


def test_a_stream_is_kept_before_its_end_is_sent(client: openai.OpenAI) -> None:
    for _ in range(5):
        for event in client.responses.create(input="count", stream=True, **ASK):
            if event.type in ("response.completed", "response.incomplete"):
                assert client.responses.retrieve(event.response.id).output == event.response.output


def test_instructions_are_not_inherited(client: openai.OpenAI) -> None:
    plain = client.responses.create(input="count", **ASK)
    told = client.responses.create(input="count", instructions="be brief " * 9, **ASK)
    assert plain.usage is not None
    assert told.usage is not None
    assert told.usage.input_tokens > plain.usage.input_tokens
    more = client.responses.create(input="on", previous_response_id=told.id, **ASK)
    same = client.responses.create(input="on", previous_response_id=plain.id, **ASK)
    assert more.instructions is None
    assert more.usage is not None
    assert same.usage is not None
    if told.output_text == plain.output_text:
        assert more.usage.input_tokens == same.usage.input_tokens


def test_rows_of_the_first_turn_are_there_in_the_second(
    llama: Fleet, client: openai.OpenAI
) -> None:
    rows: Any = [
        {
            "role": "user",
            "content": [{"type": "prompt_embeds", "data": saved(embeds_of(llama))}],
        }
    ]
    first = client.responses.create(input=rows, **ASK)
    second = client.responses.create(input="more", previous_response_id=first.id, **ASK)
    whole = [
        *rows,
        *[item.to_dict() for item in first.output],
        {"role": "user", "content": "more"},
    ]
    alone = client.responses.create(input=whole, store=False, **ASK)
    assert alone.output_text == second.output_text
    assert alone.usage is not None
    assert second.usage is not None
    assert alone.usage.input_tokens == second.usage.input_tokens


def test_a_background_response_is_made_without_its_client(client: openai.OpenAI) -> None:
    made = client.responses.create(input="count", background=True, **ASK)
    assert made.status == "queued"
    assert made.background is True
    found = ended(client, made.id)
    alone = client.responses.create(input="count", store=False, **ASK)
    assert found.output_text == alone.output_text
    assert found.id == made.id
    again = client.responses.cancel(made.id)
    assert again.status == found.status
    more = client.responses.create(input="on", previous_response_id=made.id, **ASK)
    assert more.status in ("completed", "incomplete")


def test_a_stream_is_resumed_from_every_number(client: openai.OpenAI) -> None:
    events = list(client.responses.create(input="count", background=True, stream=True, **ASK))
    id_ = events[0].response.id
    numbers = [event.sequence_number for event in events]
    assert numbers == [*range(len(events))]
    assert events[-1].type in ("response.completed", "response.incomplete")
    for after in (None, 0, 3, len(events) - 2, len(events) - 1):
        more: Any = {} if after is None else {"starting_after": after}
        seen = list(client.responses.retrieve(id_, stream=True, **more))
        start = 0 if after is None else after + 1
        assert [one.to_dict() for one in seen] == [one.to_dict() for one in events[start:]]


def test_two_readers_of_a_stream_see_all_of_it(client: openai.OpenAI, kept_url: str) -> None:
    made = client.responses.create(
        input="count", background=True, **{**ASK, "max_output_tokens": 40}
    )
    with (
        httpx.Client(timeout=60) as other,
        other.stream("GET", f"{kept_url}/v1/responses/{made.id}?stream=true") as answer,
    ):
        mine = list(client.responses.retrieve(made.id, stream=True))
        theirs = answer.read().decode()
    assert theirs.count("data: ") == len(mine)


def test_a_background_response_can_be_cancelled(client: openai.OpenAI, llama: Fleet) -> None:
    made = client.responses.create(
        input="count",
        background=True,
        extra_body={"ignore_eos": True},
        **{**ASK, "max_output_tokens": 400},
    )
    assert client.responses.cancel(made.id).status == "cancelled"
    assert client.responses.retrieve(made.id).status == "cancelled"
    for event in client.responses.retrieve(made.id, stream=True):
        assert event.type not in ("response.completed", "response.incomplete")
    assert llama.idle_within(20)
    plain = client.responses.create(input="count", **ASK)
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(plain.id)
    with pytest.raises(openai.BadRequestError):
        next(iter(client.responses.retrieve(plain.id, stream=True)))
    with pytest.raises(openai.BadRequestError):
        client.responses.create(input="count", background=True, store=False, **ASK)
    with pytest.raises(openai.BadRequestError):
        client.responses.create(input="on", previous_response_id=made.id, **ASK)


def test_a_background_response_that_fails_says_so(client: openai.OpenAI) -> None:
    long = "count the lanterns " * 2000
    made = client.responses.create(input=long, background=True, **ASK)
    found = ended(client, made.id)
    assert found.status == "failed"
    assert found.error is not None
    assert "context" in found.error.message
    assert (found.created_at, found.model, found.output) == (made.created_at, "tiny", [])
    events = list(client.responses.retrieve(made.id, stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.to_dict() == found.to_dict()


def test_a_background_response_says_what_was_left_out_of_its_input(client: openai.OpenAI) -> None:
    items: Any = [{"role": ("user", "assistant")[n % 2], "content": "7 " * 60} for n in range(15)]
    made = client.responses.create(input=items, truncation="auto", background=True, **ASK)
    found: Any = ended(client, made.id)
    assert found.status in ("completed", "incomplete")
    assert found.dropped_messages > 0
    events: Any = list(client.responses.retrieve(made.id, stream=True))
    assert events[-1].response.dropped_messages == found.dropped_messages


def test_an_event_that_is_kept_in_several_pieces_comes_whole(client: openai.OpenAI) -> None:
    made = client.responses.create(
        input="count", instructions="x" * 1_200_000, background=True, **ASK
    )
    assert ended(client, made.id).instructions == made.instructions
    (event,) = client.responses.retrieve(made.id, stream=True)
    assert event.type == "response.failed"
    assert event.response.instructions == made.instructions


def test_a_conversation_is_added_to(client: openai.OpenAI) -> None:
    conversation = client.conversations.create(
        items=[{"type": "message", "role": "user", "content": "count"}], metadata={"a": "b"}
    )
    assert client.conversations.retrieve(conversation.id).metadata == {"a": "b"}
    client.conversations.update(conversation.id, metadata={"c": "d"})
    first = client.responses.create(input="one", conversation=conversation.id, **ASK)
    assert first.conversation is not None
    assert first.conversation.id == conversation.id
    background = client.responses.create(
        input="two", conversation=conversation.id, background=True, **ASK
    )
    ended(client, background.id)
    items = list(client.conversations.items.list(conversation.id, order="asc"))
    assert len(items) == 1 + 2 + 2
    client.conversations.items.create(
        conversation.id, items=[{"type": "message", "role": "user", "content": "three"}]
    )
    newest: Any = client.conversations.items.list(conversation.id, limit=1).data[0]
    item_id = str(newest.id)
    shown = client.conversations.items.retrieve(item_id, conversation_id=conversation.id)
    assert shown.to_dict() == newest.to_dict()
    client.conversations.items.delete(item_id, conversation_id=conversation.id)
    assert len(list(client.conversations.items.list(conversation.id))) == 5
    with pytest.raises(openai.BadRequestError):
        client.responses.create(
            input="x", conversation=conversation.id, previous_response_id=first.id, **ASK
        )
    client.conversations.delete(conversation.id)
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(conversation.id)


def test_one_response_at_a_time_continues_a_conversation(client: openai.OpenAI) -> None:
    conversation = client.conversations.create()
    long: Any = {**ASK, "max_output_tokens": 300}
    made = client.responses.create(
        input="one",
        conversation=conversation.id,
        background=True,
        extra_body={"ignore_eos": True},
        **long,
    )
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(input="two", conversation=conversation.id, **ASK)
    assert caught.value.code == "conversation_locked"
    client.responses.cancel(made.id)
    client.responses.create(input="two", conversation=conversation.id, **ASK)
    assert len(list(client.conversations.items.list(conversation.id))) == 2


def test_a_conversation_is_not_locked_by_a_response_that_could_not_be_kept(llama: Fleet) -> None:
    url = llama.serve(
        responses=ResponseSettings(response_store="memory", responses_tenant_bytes=20_000)
    )
    with client_of(url) as client:
        id_ = client.conversations.create().id
        with pytest.raises(openai.RateLimitError):
            client.responses.create(input="x" * 15_000, conversation=id_, background=True, **ASK)
        assert client.responses.create(input="x", conversation=id_, store=False, **ASK).output


def test_a_response_that_was_lost_behind_its_conversation_is_completed(
    llama: Fleet, kept_url: str
) -> None:
    state: State = llama.apps[kept_url].server.parts["state"]

    async def lose_end(id_: str) -> None:
        """Have the record be as its frontend left it that died before it published the end."""
        kept = state.kept
        ((owner, revision, found),) = [
            (key.partition(".")[0], revision, record)
            for key, revision, value in await kept.storage.list()
            if isinstance(record := decode(key, value), ResponseRecord) and record.id == id_
        ]
        events = (await kept.read(found.events)).splitlines(keepends=True)
        queued = {**msgspec.json.decode(await kept.read(found.output)), "status": "queued"}
        body = {**ASK, "input": "two", "conversation": found.conversation, "stream": True}
        lost = replace(
            found,
            status="in_progress",
            lease=Lease(),
            request=await kept.write(owner, "request", msgspec.json.encode(body)),
            events=await kept.write(owner, "events", b"".join(events[:-1])),
            output=await kept.write(owner, "output", msgspec.json.encode(queued)),
        )
        assert await kept.storage.swap(f"{owner}.{id_}", encode(lost), revision)
        await kept.add_job(owner, id_)

    with client_of(kept_url) as client:
        id_ = client.conversations.create().id
        client.responses.create(input="one", conversation=id_, **ASK)
        made = client.responses.create(input="two", conversation=id_, background=True, **ASK)
        first = ended(client, made.id)
        items = client.conversations.items.list(id_).data
        until(lambda: len(state.jobs) == 0)
        llama.run(lose_end(made.id))
        again = ended(client, made.id)
        assert again.status == first.status
        assert again.output == first.output
        assert again.usage.input_tokens == first.usage.input_tokens
        assert client.conversations.items.list(id_).data == items


@pytest.fixture(scope="module")
def guarded(llama: Fleet, tmp_path_factory: pytest.TempPathFactory) -> str:
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    keys.write_text('[{"key": "key-of-a", "name": "a"}, {"key": "key-of-b", "name": "b"}]')
    return llama.serve(
        responses=ResponseSettings(response_store="memory", responses_tenant_bytes=20_000),
        api_key_file=keys,
    )


def test_what_is_another_tenants_is_as_if_it_were_not_there(guarded: str) -> None:
    with client_of(guarded, "key-of-a") as mine, client_of(guarded, "key-of-b") as other:
        made = mine.responses.create(input="count", background=True, **ASK)
        ended(mine, made.id)
        conversation = mine.conversations.create()
        for act in (
            lambda: other.responses.retrieve(made.id),
            lambda: next(iter(other.responses.retrieve(made.id, stream=True))),
            lambda: other.responses.cancel(made.id),
            lambda: other.responses.delete(made.id),
            lambda: other.responses.input_items.list(made.id),
            lambda: other.conversations.retrieve(conversation.id),
            lambda: other.conversations.items.list(conversation.id),
            lambda: other.conversations.update(conversation.id, metadata={}),
            lambda: other.conversations.delete(conversation.id),
            lambda: other.responses.create(input="x", conversation=conversation.id, **ASK),
        ):
            with pytest.raises(openai.NotFoundError):
                act()
        with pytest.raises(openai.BadRequestError) as caught:
            other.responses.create(input="x", previous_response_id=made.id, **ASK)
        assert caught.value.code == "previous_response_not_found"
        assert mine.responses.retrieve(made.id).id == made.id


def test_a_tenant_over_its_bytes_is_told_and_may_go_on_without_store(guarded: str) -> None:
    with client_of(guarded, "key-of-b") as client:

        def fill() -> None:
            for _ in range(40):
                client.responses.create(input="count " * 120, **ASK)

        with pytest.raises(openai.RateLimitError) as caught:
            fill()
        assert "--responses-tenant-bytes" in str(caught.value)
        assert client.responses.create(input="count", store=False, **ASK).output


def test_a_server_that_keeps_nothing_says_so(plain_url: str) -> None:
    for method, path in (
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1/conversations"),
    ):
        response = httpx.request(method, plain_url + path)
        assert response.status_code == 404
        assert "--response-store" in error(response)["message"]
    refused = post(plain_url, "/v1/responses", {"input": "x", "background": True})
    assert "keeps no state" in error(refused)["message"]
