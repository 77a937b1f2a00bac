"""As many logprobs of a token as the vocabulary has, where the server allows them."""

from collections.abc import Iterator
from typing import Any

import pytest

from inlay.engine.settings import EngineSettings
from tests.api.test_named_logprobs import events
from tests.live import Fleet, fleet
from tests.models import VOCAB_SIZE, tiny
from tests.payloads import error, post

ASKED = {"prompt": "count the lanterns", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "count"}],
    "max_tokens": 1,
    "logprobs": True,
}


@pytest.mark.parametrize(("given", "most"), [(20, 20), (1001, 1001), (151_936, 5000), (-1, 5000)])
def test_the_most_is_what_was_set_or_the_vocabulary(given: int, most: int) -> None:
    settings = EngineSettings.of(model="m", max_logprobs=given)
    assert settings.limits.most_logprobs(5000) == most


@pytest.fixture(scope="module")
def running() -> Iterator[Fleet]:
    with fleet(tiny("llama"), max_logprobs=151_936) as found:
        yield found


@pytest.fixture(scope="module")
def all_of_them(running: Fleet) -> str:
    return running.serve()


def test_all_of_the_vocabulary_may_be_asked_for(all_of_them: str) -> None:
    body = {**ASKED, "logprobs": VOCAB_SIZE, "prompt_logprobs": VOCAB_SIZE}
    (choice,) = post(all_of_them, "/v1/completions", body).json()["choices"]
    few = post(all_of_them, "/v1/completions", {**ASKED, "logprobs": 3}).json()["choices"][0]
    assert choice["text"] == few["text"]
    for top, best in zip(
        choice["logprobs"]["top_logprobs"], few["logprobs"]["top_logprobs"], strict=True
    ):
        assert len(top) > VOCAB_SIZE // 2  # several ids may have one text
        assert dict(list(top.items())[:3]) == best
    assert {len(found) for found in choice["prompt_logprobs"][1:]} == {VOCAB_SIZE}
    chat = post(all_of_them, "/v1/chat/completions", {**CHAT, "top_logprobs": VOCAB_SIZE}).json()
    assert len(chat["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == VOCAB_SIZE
    found = error(post(all_of_them, "/v1/completions", {**ASKED, "logprobs": VOCAB_SIZE + 1}))
    assert found["message"] == f"logprobs must be from 0 to {VOCAB_SIZE}, got {VOCAB_SIZE + 1}"


def test_a_stream_shows_them_too(all_of_them: str) -> None:
    body = {**ASKED, "logprobs": VOCAB_SIZE, "return_tokens_as_token_ids": True}
    shown = [
        top
        for event in events(all_of_them, "/v1/completions", body)
        for choice in event["choices"]
        for top in (choice["logprobs"] or {"top_logprobs": []})["top_logprobs"]
    ]
    assert [len(top) for top in shown] == [VOCAB_SIZE, VOCAB_SIZE]


@pytest.mark.parametrize("stream", [False, True])
def test_their_memory_is_reserved_before_they_are_computed(running: Fleet, stream: bool) -> None:
    small = running.serve(max_client_bytes=512 * VOCAB_SIZE)
    for path, body in (
        ("/v1/completions", {**ASKED, "logprobs": VOCAB_SIZE}),
        ("/v1/chat/completions", {**CHAT, "top_logprobs": VOCAB_SIZE}),
    ):
        refused = post(small, path, {**body, "stream": stream})
        assert (refused.status_code, error(refused)["param"]) == (400, "logprobs")
        assert "one client may hold" in error(refused)["message"]
        assert post(small, path, {**ASKED, **CHAT, "logprobs": None}).status_code == 200
