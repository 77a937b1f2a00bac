"""What one frontend keeps in NATS, another reads and goes on with, though NATS was away meanwhile."""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import openai
import pytest

from inlay.store.settings import BatchSettings, ResponseSettings
from inlay.transport.nats.member import Member
from inlay.transport.nats.prompts import NatsPrompts
from tests.batches.test_batches import COMPLETION, begin, line, rows
from tests.batches.test_batches import ended as batch_ended
from tests.live import fleet, until
from tests.models import tiny
from tests.state.test_responses import ASK, client_of, ended
from tests.transport.nats_server import NatsServer

LONG: dict[str, Any] = {
    "model": "tiny",
    "input": "count the lanterns",
    "max_output_tokens": 300,
    "temperature": 1,
    "extra_body": {"seed": 5, "ignore_eos": True},
}
MIB = 1 << 20
Serve = Callable[[NatsServer], openai.OpenAI]


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    """Starts a frontend that keeps all it keeps in a NATS server."""
    namespace = secrets.token_hex(8)
    with fleet(tiny("llama")) as running:

        def one(server: NatsServer) -> openai.OpenAI:
            member = running.run(Member.join(server.settings(namespace), "frontend"))
            running.at_end.append(member.leave)
            url = running.serve(
                responses=ResponseSettings(response_store="nats"),
                batches=BatchSettings(batch_store="nats"),
                open_shared=partial(NatsPrompts.open, member),
            )
            return client_of(url)

        yield one


@pytest.fixture(scope="module")
def pair(serve: Serve, nats_server: NatsServer) -> tuple[openai.OpenAI, openai.OpenAI]:
    return serve(nats_server), serve(nats_server)


def test_a_response_goes_on_at_another_frontend(
    pair: tuple[openai.OpenAI, openai.OpenAI],
) -> None:
    one, other = pair
    first = one.responses.create(input="count the lanterns", **ASK)
    assert other.responses.retrieve(first.id).to_dict() == first.to_dict()
    second = other.responses.create(input="go on", previous_response_id=first.id, **ASK)
    said: Any = [
        {"role": "user", "content": "count the lanterns"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "go on"},
    ]
    assert second.output_text == one.responses.create(input=said, **ASK).output_text
    assert len(one.responses.input_items.list(second.id).data) == 3
    other.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        one.responses.retrieve(first.id)


def test_a_conversation_is_continued_and_locked_at_all_frontends(
    pair: tuple[openai.OpenAI, openai.OpenAI],
) -> None:
    one, other = pair
    # A few MiB, far over the most that a message of NATS has.
    kept = [{"type": "message", "role": "user", "content": "x" * MIB} for _ in range(3)]
    large = one.conversations.create(items=kept)  # type: ignore[arg-type]
    items = other.conversations.items.list(large.id, order="asc").data
    assert [item.content[0].text for item in items] == ["x" * MIB] * 3  # type: ignore[union-attr, index]
    id_ = one.conversations.create().id
    first = one.responses.create(input="count", conversation=id_, **ASK)
    running = other.responses.create(
        background=True, conversation=id_, **{**LONG, "max_output_tokens": 150}
    )
    with pytest.raises(openai.BadRequestError) as caught:
        one.responses.create(input="count", conversation=id_, **ASK)
    assert caught.value.code == "conversation_locked"
    last = ended(one, running.id)
    texts = [
        item.content[0].text  # type: ignore[union-attr, index]
        for item in one.conversations.items.list(id_, order="asc").data
    ]
    assert texts == ["count", first.output_text, LONG["input"], last.output_text]
    one.responses.create(input="count", conversation=id_, **ASK)


def test_a_background_response_is_read_and_cancelled_at_another_frontend(
    pair: tuple[openai.OpenAI, openai.OpenAI],
) -> None:
    one, other = pair
    made = one.responses.create(background=True, **LONG)
    events = list(other.responses.retrieve(made.id, stream=True))
    assert [event.sequence_number for event in events] == [*range(len(events))]
    deltas = [one.delta for one in events if one.type == "response.output_text.delta"]
    assert "".join(deltas) == one.responses.create(store=False, **LONG).output_text
    later = list(other.responses.retrieve(made.id, stream=True, starting_after=4))
    assert [event.sequence_number for event in later] == [*range(5, len(events))]
    stopped = one.responses.create(background=True, **LONG)
    assert other.responses.cancel(stopped.id).status == "cancelled"
    assert one.responses.retrieve(stopped.id).status == "cancelled"


@pytest.mark.thorough
def test_a_batch_is_read_at_another_frontend(pair: tuple[openai.OpenAI, openai.OpenAI]) -> None:
    one, other = pair
    long = {**COMPLETION, "metadata": {"note": "x" * 2000}, "max_tokens": 2}
    data = b"".join(line(f"a{index}", "/v1/completions", long) for index in range(1000))
    assert len(data) > 2 * MIB
    batch = begin(one, data, "/v1/completions")
    assert other.files.content(batch.input_file_id).read() == data
    found = batch_ended(other, batch)
    assert found.status == "completed"
    assert set(rows(other, found.output_file_id)) == {f"a{index}" for index in range(1000)}
    other.files.delete(batch.input_file_id)
    with pytest.raises(openai.NotFoundError):
        one.files.retrieve(batch.input_file_id)


@pytest.mark.slow
def test_what_is_made_goes_on_when_nats_was_away(serve: Serve, tmp_path: Path) -> None:
    with NatsServer(tmp_path) as server:
        one, other = serve(server), serve(server)
        lines = [line(f"a{index}", "/v1/completions", COMPLETION) for index in range(400)]
        batch = begin(one, b"".join(lines), "/v1/completions")
        made = [one.responses.create(background=True, **LONG) for _ in range(6)]
        events: list[int] = []

        def read() -> None:
            # The stream that is open at another frontend goes on too.
            stream = other.responses.retrieve(made[-1].id, stream=True)
            events.extend(event.sequence_number for event in stream)

        reading = threading.Thread(target=read)
        reading.start()
        until(lambda: len(events) > 2)
        server.kill()
        time.sleep(4)
        server.start()
        text = one.responses.create(store=False, **LONG).output_text
        for each in made:
            assert ended(other, each.id).output_text == text
        reading.join()
        assert events == [*range(len(events))]
        found = batch_ended(other, batch)
        counts = found.request_counts
        assert counts is not None
        assert (counts.completed, counts.failed) == (400, 0)
        assert set(rows(other, found.output_file_id)) == {f"a{index}" for index in range(400)}


@pytest.mark.thorough
def test_without_nats_a_client_is_told_and_nothing_is_half_kept(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inlay.transport.nats.prompts.WAIT_SECONDS", 0.5)
    with NatsServer(tmp_path) as server:
        client = serve(server)
        kept = client.responses.create(input="count", **ASK)
        server.kill()
        for act in (
            lambda: client.responses.create(input="count", **ASK),
            lambda: client.responses.retrieve(kept.id),
            lambda: client.conversations.create(),
            lambda: client.files.create(file=("a", BytesIO(b"{}")), purpose="batch"),
        ):
            with pytest.raises(openai.InternalServerError) as caught:
                act()
            assert caught.value.status_code == 503
            assert "NATS" in caught.value.message
        assert client.responses.create(input="count", store=False, **ASK).output_text
        server.start()
        assert client.responses.retrieve(kept.id).to_dict() == kept.to_dict()
