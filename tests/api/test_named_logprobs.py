"""Logprobs of ids that a request names, and tokens that are called by their ids."""

from typing import Any

import pytest

from inlay.render import Renderer
from tests.live import Fleet
from tests.models import VOCAB_SIZE
from tests.payloads import error, post

COMPLETION = {"prompt": "count the lanterns", "max_tokens": 4, "temperature": 0, "logprobs": 2}
CHAT = {
    "messages": [{"role": "user", "content": "count"}],
    "max_tokens": 4,
    "temperature": 0,
    "logprobs": True,
    "top_logprobs": 2,
}
IDS = [7, 40, 7, 300]


def events(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    import json

    text = post(url, path, {**body, "stream": True}).text
    lines = [
        line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")
    ]
    return [json.loads(line) for line in lines]


def test_completions_show_the_logprobs_of_the_ids_a_request_names(llama: Fleet, url: str) -> None:
    named = {**COMPLETION, "logprob_token_ids": IDS, "return_tokens_as_token_ids": True}
    plain = post(url, "/v1/completions", {**COMPLETION, "return_token_ids": True}).json()[
        "choices"
    ][0]
    choice = post(url, "/v1/completions", named).json()["choices"][0]
    assert choice["text"] == plain["text"]
    found = choice["logprobs"]
    assert found["tokens"] == [f"token_id:{id_}" for id_ in plain["token_ids"]]
    assert found["token_logprobs"] == pytest.approx(plain["logprobs"]["token_logprobs"])
    for id_, top in zip(plain["token_ids"], found["top_logprobs"], strict=True):
        assert list(top) == list(dict.fromkeys(f"token_id:{one}" for one in (id_, *IDS)))
        assert all(value < 0 for value in top.values())
    pieces = [event["choices"][0]["logprobs"] for event in events(url, "/v1/completions", named)]
    assert [token for piece in pieces for token in piece["tokens"]] == found["tokens"]
    # What is named and what is most likely are the same numbers.
    every = {**COMPLETION, "logprobs": 20, "return_tokens_as_token_ids": True, "max_tokens": 1}
    (best,) = post(url, "/v1/completions", every).json()["choices"][0]["logprobs"]["top_logprobs"]
    wanted = {name: value for name, value in best.items() if name.startswith("token_id:")}
    ids = [int(name.removeprefix("token_id:")) for name in wanted]
    again = {**every, "logprobs": 1, "logprob_token_ids": ids}
    (told,) = post(url, "/v1/completions", again).json()["choices"][0]["logprobs"]["top_logprobs"]
    assert told == pytest.approx(wanted, abs=1e-5)


def test_chats_show_the_logprobs_of_the_ids_a_request_names(llama: Fleet, url: str) -> None:
    named = {**CHAT, "logprob_token_ids": IDS, "return_tokens_as_token_ids": True}
    plain = post(url, "/v1/chat/completions", {**CHAT, "return_token_ids": True}).json()["choices"][
        0
    ]
    found = post(url, "/v1/chat/completions", named).json()["choices"][0]["logprobs"]["content"]
    renderer = Renderer.load(llama.path)
    for id_, entry in zip(plain["token_ids"], found, strict=True):
        assert (entry["token"], entry["bytes"]) == (f"token_id:{id_}", renderer.token_bytes(id_))
        wanted = list(dict.fromkeys((id_, *IDS)))
        assert [one["token"] for one in entry["top_logprobs"]] == [
            f"token_id:{one}" for one in wanted
        ]
        assert [one["bytes"] for one in entry["top_logprobs"]] == [
            renderer.token_bytes(i) for i in wanted
        ]
    streamed = [
        event["choices"][0]["logprobs"] for event in events(url, "/v1/chat/completions", named)
    ]
    assert [one for piece in streamed if piece for one in piece["content"]] == found


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
)
@pytest.mark.parametrize(
    ("fields", "phrase"),
    [
        (
            {"logprob_token_ids": [1], "logprobs": None, "top_logprobs": None},
            "when logprobs are asked for",
        ),
        ({"logprob_token_ids": [VOCAB_SIZE]}, "out of vocabulary"),
        ({"logprob_token_ids": [-1]}, "out of vocabulary"),
        ({"logprob_token_ids": [1] * 129}, "has 129 ids; at most 128"),
    ],
)
def test_ids_that_cannot_be_told_of_are_refused(
    url: str, path: str, body: dict[str, Any], fields: dict[str, Any], phrase: str
) -> None:
    response = post(url, path, {**body, **fields})
    found = error(response)
    assert (response.status_code, found["param"]) == (400, "logprob_token_ids")
    assert phrase in found["message"]


def test_an_empty_list_names_none_and_an_echo_alone_has_none(url: str) -> None:
    plain = post(url, "/v1/completions", COMPLETION).json()["choices"]
    assert (
        post(url, "/v1/completions", {**COMPLETION, "logprob_token_ids": []}).json()["choices"]
        == plain
    )
    body = {**COMPLETION, "echo": True, "max_tokens": 0, "logprob_token_ids": [1]}
    assert error(post(url, "/v1/completions", body))["param"] == "logprob_token_ids"


def test_logprobs_of_an_echoed_prompt_are_of_the_most_likely(url: str) -> None:
    body = {**COMPLETION, "echo": True, "max_tokens": 1, "return_tokens_as_token_ids": True}
    plain = post(url, "/v1/completions", body).json()["choices"][0]["logprobs"]["top_logprobs"]
    named = post(url, "/v1/completions", {**body, "logprob_token_ids": [5]}).json()["choices"][0][
        "logprobs"
    ]
    assert named["top_logprobs"][:-1] == plain[:-1]
    assert "token_id:5" in named["top_logprobs"][-1]
