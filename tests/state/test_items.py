"""Items that every route keeps, and those that no model can be told, which none keeps."""

import io
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import msgspec
import pytest
from PIL import Image

from inlay.api.fields import MAX_DEPTH
from inlay.api.openai.responses.input import in_input
from inlay.api.openai.schema.responses import ResponsesRequest
from inlay.http.bodies.base64_extractor import Parsed
from inlay.http.parsed_request import ParsedRequest
from inlay.http.server import OFFLOAD_BYTES
from inlay.store.settings import ResponseSettings
from inlay_state import history
from inlay_state.api import conversations
from inlay_state.items import items_of
from tests.api.test_comparisons import on_the_loop
from tests.api.test_transcriptions import sound_file
from tests.live import Fleet, fleet
from tests.omni_models import omni
from tests.payloads import b64, constant, error, post
from tests.state.place import Place

USER: dict[str, Any] = {"type": "message", "role": "user", "content": "a"}
ODD: tuple[Any, ...] = ([], {}, 5, ["a"])
BAD: list[tuple[dict[str, Any], str]] = [
    *((USER | {"id": id_}, ".id") for id_ in (*ODD, True)),
    *((USER | {"type": kind}, ".type") for kind in (*ODD, "", 0, "x")),
    *(
        (USER | {"content": [{"type": kind, "text": "a"}]}, ".content[0].type")
        for kind in (*ODD, None, "", "x")
    ),
    (USER | {"content": [{"type": "input_text", "text": 5}]}, ".content[0].text"),
    (USER | {"content": [5]}, ".content[0]"),
    (USER | {"content": 5}, ".content"),
    (USER | {"content": [{"type": "prompt_embeds", "data": 5}]}, ".content[0].data"),
    (USER | {"content": [{"type": "input_image", "detail": []}]}, ".content[0].detail"),
    ({"type": "function_call_output", "call_id": "c", "output": [{"type": []}]}, ".output[0].type"),
]


@pytest.fixture(scope="module")
def url(llama: Fleet) -> str:
    return llama.serve(
        responses=ResponseSettings(response_store="memory"), enable_prompt_embeds=True
    )


@pytest.mark.parametrize(("item", "where"), BAD)
def test_what_no_model_can_be_told_is_kept_nowhere(
    url: str, item: dict[str, Any], where: str
) -> None:
    with httpx.Client(base_url=url) as client:
        conversation = client.post("/v1/conversations", json={}).json()["id"]
        items = f"/v1/conversations/{conversation}/items"
        asked = {"model": "tiny", "input": [item], "max_output_tokens": 1}
        refused = [
            (client.post("/v1/conversations", json={"items": [item]}), "items[0]"),
            (client.post(items, json={"items": [item]}), "items[0]"),
            (client.post("/v1/responses", json=asked | {"store": False}), "input[0]"),
            (client.post("/v1/responses", json=asked), "input[0]"),
            (client.post("/v1/responses", json=asked | {"background": True}), "input[0]"),
            (
                client.post("/v1/responses", json=asked | {"conversation": conversation}),
                "input[0]",
            ),
        ]
        for answer, field in refused:
            assert answer.status_code == 400, answer.text
            assert error(answer)["param"] == field + where
        assert client.get(items).json()["data"] == []


@pytest.mark.parametrize("path", ["/v1/conversations", "/v1/conversations/{id}/items"])
def test_items_of_many_parts_are_looked_at_beside_the_event_loop(
    url: str, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    seen, _ = on_the_loop(monkeypatch, conversations, "check_items")
    id_ = post(url, "/v1/conversations", {}).json()["id"]
    parts = [{"type": "input_text", "text": "a"}] * 1000
    assert post(url, path.replace("{id}", id_), {"items": [USER | {"content": parts}]}).is_success
    assert seen == [False]


def test_no_items_are_refused_where_some_are_to_be_added(url: str) -> None:
    id_ = post(url, "/v1/conversations", {"items": []}).json()["id"]
    refused = post(url, f"/v1/conversations/{id_}/items", {"items": []})
    assert (refused.status_code, error(refused)["param"]) == (400, "items")


def test_items_that_are_nested_too_deeply_are_kept_nowhere(url: str) -> None:
    deep: list[Any] = []
    for _ in range(MAX_DEPTH):
        deep = [deep]
    refused = post(url, "/v1/conversations", {"items": [USER | {"status": deep}]})
    assert (refused.status_code, error(refused)["param"]) == (400, "items")


def picture() -> str:
    file = io.BytesIO()
    Image.new("RGB", (24, 24), (200, 30, 30)).save(file, "PNG")
    return b64(file.getvalue())


def said(*parts: dict[str, Any]) -> dict[str, Any]:
    """Return a user's message of parts and a text."""
    return USER | {"content": [*parts, {"type": "input_text", "text": "count"}]}


ROWS = constant(0.5, hidden=64)
SOUND = {"data": b64(sound_file(0.8)), "format": "wav"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c"}
GOOD: dict[str, list[dict[str, Any]]] = {
    "text": [USER],
    "embeds by data": [said({"type": "prompt_embeds", "data": ROWS})],
    "embeds by ref": [said({"type": "prompt_embeds", "ref": "REF"})],
    "image": [said({"type": "input_image", "image_url": f"data:image/png;base64,{picture()}"})],
    "audio": [said({"type": "input_audio", "input_audio": SOUND})],
    "tool calls": [USER, CALL, RESULT | {"output": "four"}],
    "a tool's rows": [USER, CALL, RESULT | {"output": [{"type": "prompt_embeds", "data": ROWS}]}],
    "reasoning": [
        USER,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
        {"type": "message", "role": "assistant", "content": "four"},
        USER,
    ],
}


@pytest.fixture(scope="module")
def omni_url() -> Iterator[str]:
    with fleet(omni(), dtype="float32") as running:
        yield running.serve(
            responses=ResponseSettings(response_store="memory"), enable_prompt_embeds=True
        )


@pytest.mark.parametrize("kind", GOOD)
def test_what_a_model_can_be_told_is_taken_by_every_route(omni_url: str, kind: str) -> None:
    ask = partial(post, omni_url)
    ref = ask("/v1/prompt_embeds", {"data": ROWS}).json()["id"]
    items = msgspec.json.decode(msgspec.json.encode(GOOD[kind]).replace(b"REF", ref.encode()))
    made = {"model": "tiny", "max_output_tokens": 1}

    def taken(path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = ask(path, body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def count(**asked: Any) -> int:
        number = taken("/v1/responses/input_tokens", {"model": "tiny", **asked})["input_tokens"]
        assert isinstance(number, int)
        return number

    def ended(**asked: Any) -> dict[str, Any]:
        id_ = taken("/v1/responses", made | asked | {"background": True})["id"]
        deadline = time.monotonic() + 90
        while True:
            found: dict[str, Any] = httpx.get(f"{omni_url}/v1/responses/{id_}").json()
            if found["status"] not in ("queued", "in_progress"):
                return found
            assert time.monotonic() < deadline
            time.sleep(0.05)

    positions = count(input=items)
    first = taken("/v1/responses", made | {"input": items})
    alone = ended(input=items)
    assert first["status"] == alone["status"] == "incomplete"
    used = [each["usage"]["input_tokens"] for each in (first, alone)]
    assert used == [positions, positions]
    begun = taken("/v1/conversations", {"items": items})["id"]
    added = taken("/v1/conversations", {})["id"]
    taken(f"/v1/conversations/{added}/items", {"items": items})
    for before in (
        {"previous_response_id": first["id"]},
        {"previous_response_id": alone["id"]},
        {"conversation": begun},
        {"conversation": added},
    ):
        more = count(input="on", **before)
        assert more > positions
        assert ended(input="on", **before)["usage"]["input_tokens"] == more
        if "conversation" not in before:
            after = taken("/v1/responses", made | {"input": "on"} | before)
            assert after["usage"]["input_tokens"] == more


async def test_items_of_a_long_history_are_looked_through_beside_other_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = Place()
    items = items_of([{"role": "user", "content": "a"}] * 3000, "resp_a")
    assert len(msgspec.json.encode(items)) > OFFLOAD_BYTES
    threads: list[threading.Thread] = []

    def seen(request: ResponsesRequest) -> Any:
        threads.append(threading.current_thread())
        return in_input(request)

    monkeypatch.setattr(history, "in_input", seen)
    request = ResponsesRequest(input="b")
    incoming = ParsedRequest(Parsed(request, {}), 1, [])
    before = history.History(items, len(msgspec.json.encode(items)), "")
    whole = await history.with_history(place.call(), incoming, before)
    assert whole.parsed.request.input is not None
    assert len(whole.parsed.request.input) == 3001
    assert threads
    assert threading.main_thread() not in threads
