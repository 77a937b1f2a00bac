"""Answers have the fields of vLLM 0.32's, null ones included, wherever vLLM sends them.

`tests/engines/vllm/test_response_fields.py` holds the names here against vLLM's own classes.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.equality.reference import tokenizer_of
from tests.live import Fleet
from tests.payloads import TEXT, constant, embeds_of, error, post, saved

WHOLE = {
    "id", "object", "created", "model", "choices", "usage", "service_tier", "system_fingerprint",
    "kv_transfer_params", "ec_transfer_params", "metrics",
}  # fmt: skip
WHOLE_CHAT = WHOLE | {"prompt_logprobs", "prompt_token_ids", "prompt_text"}
CHOICE = {
    "index", "text", "logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_logprobs",
    "prompt_token_ids", "routed_experts",
}  # fmt: skip
CHAT_CHOICE = {
    "index", "message", "logprobs", "finish_reason", "stop_reason", "token_ids", "routed_experts"
}  # fmt: skip
MESSAGE = {"role", "content", "refusal", "annotations", "audio", "function_call", "reasoning"}
USAGE = {
    "prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details",
    "completion_tokens_details",
}  # fmt: skip
CHUNK = {"id", "object", "created", "model", "choices"}
CHUNK_CHOICE = {
    "index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids"
}  # fmt: skip
ROLE_CHOICE = {"index", "delta", "logprobs", "finish_reason"}

SETTINGS: dict[str, Any] = {"model": "tiny", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": TEXT}]


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def stream(url: str, path: str, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream."""
    answer = post(url, path, {**SETTINGS, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    return [
        json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")
    ]


def test_a_completion_has_every_field_of_vllms_and_null_where_it_says_nothing(
    client: openai.OpenAI,
) -> None:
    answer = client.completions.create(prompt=TEXT, extra_body={"ignore_eos": True}, model="tiny")
    (choice,) = answer.choices
    assert set(answer.to_dict()) == WHOLE
    assert set(choice.to_dict()) == CHOICE
    empty = [getattr(answer, name) for name in sorted(WHOLE) if name.endswith("params")]
    empty += [getattr(answer, name) for name in ("service_tier", "metrics")]
    empty += [getattr(choice, name) for name in CHOICE - {"index", "text", "finish_reason"}]
    assert set(empty) == {None}
    assert answer.usage is not None
    assert set(answer.usage.to_dict()) == USAGE
    details = answer.usage.to_dict()["prompt_tokens_details"]
    assert set(details) == {"cached_tokens", "created_cache_tokens", "multimodal_tokens"}  # type: ignore[call-overload]


def test_a_chat_has_every_field_of_vllms_and_null_where_it_says_nothing(
    client: openai.OpenAI,
) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=3)  # type: ignore[arg-type]
    (choice,) = answer.choices
    assert set(answer.to_dict()) == WHOLE_CHAT
    assert set(choice.to_dict()) == CHAT_CHOICE
    assert set(choice.message.to_dict()) == MESSAGE
    named = WHOLE_CHAT - WHOLE | {
        "kv_transfer_params",
        "ec_transfer_params",
        "service_tier",
        "metrics",
    }
    empty = [getattr(answer, name) for name in named]
    empty += [
        getattr(choice, name) for name in ("logprobs", "stop_reason", "token_ids", "routed_experts")
    ]
    empty += [getattr(choice.message, name) for name in MESSAGE - {"role", "content"}]
    assert set(empty) == {None}


def test_what_was_asked_for_stands_where_null_would(client: openai.OpenAI) -> None:
    extra = {"return_token_ids": True, "prompt_logprobs": True}
    answer = client.completions.create(model="tiny", prompt=TEXT, max_tokens=3, extra_body=extra)
    choice: Any = answer.choices[0]
    ids = len(choice.prompt_token_ids)
    assert (len(choice.token_ids), len(choice.prompt_logprobs)) == (3, ids)
    assert choice.prompt_logprobs[0] is None
    assert all(1 <= len(entry) <= 2 for entry in choice.prompt_logprobs[1:])
    chat: Any = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=3, extra_body=extra  # type: ignore[arg-type]
    )  # fmt: skip
    assert len(chat.prompt_logprobs) == len(chat.prompt_token_ids) == chat.usage.prompt_tokens


def test_the_events_of_a_completion_have_vllms_fields(url: str) -> None:
    events = stream(url, "/v1/completions", prompt=TEXT)
    assert all(set(event) == CHUNK for event in events[:-1])
    assert set(events[-1]) == CHUNK | {"system_fingerprint"}
    assert all(set(event["choices"][0]) == CHUNK_CHOICE for event in events)
    with_ids = stream(url, "/v1/completions", prompt=TEXT, return_token_ids=True)
    assert with_ids[0]["choices"][0]["prompt_token_ids"]
    # All tokens may come in one event.
    assert all(event["choices"][0]["prompt_token_ids"] is None for event in with_ids[1:])


def test_the_events_of_a_chat_have_vllms_fields(url: str) -> None:
    role, *pieces = stream(url, "/v1/chat/completions", messages=MESSAGES)
    assert set(role) == CHUNK | {"prompt_token_ids", "prompt_text"}
    assert set(role["choices"][0]) == ROLE_CHOICE
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    for piece in pieces[:-1]:
        assert set(piece) == CHUNK
        assert set(piece["choices"][0]) == ROLE_CHOICE | {"token_ids"}
    assert set(pieces[-1]) == CHUNK | {"system_fingerprint"}
    assert set(pieces[-1]["choices"][0]) == ROLE_CHOICE | {"token_ids", "stop_reason"}


PATHS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": TEXT}),
    ("/v1/chat/completions", {"messages": MESSAGES}),
]


@pytest.mark.parametrize(("path", "body"), PATHS)
@pytest.mark.parametrize("options", [{}, {"include_usage": False}, {"include_usage": None}])
def test_usage_is_not_shown_as_it_goes_unless_it_is_shown_at_the_end(
    url: str, path: str, body: dict[str, Any], options: dict[str, Any]
) -> None:
    events = stream(url, path, **body, stream_options={**options, "continuous_usage_stats": True})
    assert not any("usage" in event for event in events)


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_usage_as_it_goes_counts_what_each_choice_has_shown(
    url: str, path: str, body: dict[str, Any]
) -> None:
    both = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = stream(url, path, **body, n=2, stream_options=both, return_token_ids=True)
    shown = {0: 0, 1: 0}
    for event in events:
        (choice,) = event["choices"]
        shown[choice["index"]] += len(choice.get("token_ids") or ())
        usage = event["usage"]
        assert usage["completion_tokens"] == shown[choice["index"]]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        chats = {"completion_tokens_details"} if "chat" in path else set()
        assert set(usage) == {"prompt_tokens", "completion_tokens", "total_tokens"} | chats
    assert shown == {0: 5, 1: 5}
    assert last["choices"] == []
    assert set(last) == CHUNK | {"usage", "system_fingerprint"}
    assert last["usage"]["completion_tokens"] == 10
    assert set(last["usage"]["prompt_tokens_details"]) == {"cached_tokens"}
    assert "completion_tokens_details" not in last["usage"]
    if "chat" in path:
        assert events[0]["usage"]["completion_tokens"] == 0


def test_one_system_has_one_fingerprint(url: str) -> None:
    answers = [
        post(url, path, {**SETTINGS, **body}).json() for path, body in PATHS for _ in range(2)
    ]
    events = stream(url, "/v1/completions", prompt=TEXT, stream_options={"include_usage": True})
    (found,) = {answer["system_fingerprint"] for answer in answers} | {
        events[-1]["system_fingerprint"]
    }
    assert found.startswith("inlay-")
    assert "system_fingerprint" not in events[-2]


@pytest.mark.parametrize("echo", [False, True])
def test_logprobs_0_name_the_chosen_token(url: str, echo: bool) -> None:
    body = {**SETTINGS, "prompt": TEXT, "logprobs": 0, "echo": echo}
    found = post(url, "/v1/completions", body).json()["choices"][0]["logprobs"]
    start = 1 if echo else 0
    assert found["top_logprobs"][start:] == [
        {token: logprob}
        for token, logprob in zip(
            found["tokens"][start:], found["token_logprobs"][start:], strict=True
        )
    ]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    "prompt",
    ["<|im_start|>count<|im_end|> the lanterns", "café 🙂 東<|im_end|>京 of", "plain words"],
)
def test_offsets_of_an_echoed_text_are_where_its_tokens_begin(
    url: str, prompt: str, skip: bool
) -> None:
    body = {**SETTINGS, "prompt": prompt, "echo": True, "logprobs": 1, "skip_special_tokens": skip}
    whole = post(url, "/v1/completions", body).json()["choices"][0]
    text, found = whole["text"], whole["logprobs"]
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert 0 <= offset <= len(text)
        special = skip and token.startswith("<|")
        # A part of a character reads as U+FFFD, wherever the character stands.
        assert special or "\ufffd" in token or text.startswith(token, offset), (token, offset)
    pieces = [event["choices"][0] for event in stream(url, "/v1/completions", **body)]
    together = [offset for piece in pieces for offset in piece["logprobs"]["text_offset"]]
    assert together == found["text_offset"]


def test_token_strings_are_the_vocabularys(llama: Fleet, url: str) -> None:
    body = {"model": "tiny", "prompt": "<|im_start|>the café 🙂", "return_token_strs": True}
    answer = post(url, "/tokenize", body).json()
    assert answer["token_strs"] == tokenizer_of(llama.path).convert_ids_to_tokens(answer["tokens"])
    assert any("Ġ" in token for token in answer["token_strs"])


@pytest.mark.parametrize("asked", [True, False, 0, 3])
def test_prompt_logprobs_and_embeddings_are_not_compatible(
    url: str, llama: Fleet, asked: Any
) -> None:
    data = saved(embeds_of(llama))
    forms: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt_embeds": data}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "prompt_embeds", "data": data}]}]}),
    ]  # fmt: skip
    for path, body in forms:
        found = error(post(url, path, {**SETTINGS, **body, "prompt_logprobs": asked}))
        assert found["param"] == "prompt_logprobs"
        assert "prompt_logprobs is not compatible with prompt embeds" in found["message"]


@pytest.mark.parametrize("given", [{}, {"max_tokens": None}])
def test_a_completion_without_max_tokens_has_16_and_a_chat_fills_the_context(
    url: str, given: dict[str, Any]
) -> None:
    settings = {"temperature": 0, "ignore_eos": True, **given}
    for prompt in ({"prompt": TEXT}, {"prompt_embeds": constant(0.5, rows=7)}):
        answer = post(url, "/v1/completions", {**settings, **prompt}).json()
        assert answer["usage"]["completion_tokens"] == 16
        assert answer["choices"][0]["finish_reason"] == "length"
    usage = post(url, "/v1/chat/completions", {**settings, "messages": MESSAGES}).json()["usage"]
    assert usage["total_tokens"] == 512


def test_a_completion_without_max_tokens_has_less_where_less_fits(url: str) -> None:
    body: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "prompt": [[5] * 507, [5] * 20]}
    answer = post(url, "/v1/completions", {**body, "return_token_ids": True}).json()
    assert [len(choice["token_ids"]) for choice in answer["choices"]] == [5, 16]
    refused = httpx.post(
        url + "/v1/completions", json={"prompt": TEXT, "min_tokens": 17}, timeout=60
    )
    assert "at most max_tokens (16)" in error(refused)["message"]
