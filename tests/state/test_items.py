"""Items that no model can be told: refused by every route, before anything is kept."""

import threading
from typing import Any

import httpx
import msgspec
import pytest

from inlay.api.openai.responses.input import in_input
from inlay.api.openai.schema.responses import ResponsesRequest
from inlay.http.bodies.base64_extractor import Parsed
from inlay.http.parsed_request import ParsedRequest
from inlay.http.server import OFFLOAD_BYTES
from inlay.store.settings import ResponseSettings
from inlay_state import history
from inlay_state.items import items_of
from tests.live import Fleet
from tests.payloads import error
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
