"""`/v1/messages` through Anthropic's own client: the tokens of the same chat, and its refusals."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from tests.live import Fleet, until
from tests.payloads import TEXT, constant, embeds_of, post, saved

ASK: Any = [{"role": "user", "content": TEXT}]
SYSTEM = "count the lanterns of the harbour town, every night again"
"""With a question, more than one page of the cache."""
GREEDY: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def chat_of(url: str, messages: list[Any], **fields: Any) -> Any:
    body = {"model": "tiny", "temperature": 0, "max_tokens": 12, "messages": messages, **fields}
    return post(url, "/v1/chat/completions", body).json()


def said(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def refusal(response: httpx.Response, kind: str) -> str:
    """The message of an error, whose shape is checked."""
    body = response.json()
    assert list(body) == ["type", "error", "request_id"]
    assert (body["type"], list(body["error"])) == ("error", ["type", "message"])
    assert body["error"]["type"] == kind
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    return str(body["error"]["message"])


def test_a_message_says_what_the_chat_of_the_same_words_says(
    url: str, client: anthropic.Anthropic
) -> None:
    chat = chat_of(url, [{"role": "system", "content": SYSTEM}, *ASK])
    text: Any = {"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral"}}
    for words in (
        {"system": SYSTEM, "messages": ASK},
        {"system": [{"type": "text", "text": SYSTEM}], "messages": ASK},
        {"messages": [{"role": "system", "content": SYSTEM}, *ASK]},
        {"system": SYSTEM, "messages": [{"role": "user", "content": [text]}]},
    ):
        message: Any = client.messages.create(**GREEDY, **words, metadata={"user_id": "u"})
        assert said(message) == chat["choices"][0]["message"]["content"]
        usage = message.usage
        assert usage.input_tokens + usage.cache_read_input_tokens == chat["usage"]["prompt_tokens"]
        assert usage.output_tokens == chat["usage"]["completion_tokens"]
        counted = client.messages.count_tokens(model="tiny", **words)
        assert counted.input_tokens == chat["usage"]["prompt_tokens"]
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message.usage.cache_read_input_tokens > 0


def test_a_stream_says_what_the_whole_message_says(url: str, client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**GREEDY, messages=ASK)
    with client.messages.stream(**GREEDY, messages=ASK) as stream:
        kinds = [event.type for event in stream if event.type != "text"]
        final = stream.get_final_message()
    deltas = kinds.count("content_block_delta")
    assert kinds == [
        "message_start", "content_block_start", *["content_block_delta"] * deltas,
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert (said(final), final.stop_reason) == (said(whole), whole.stop_reason)
    assert final.usage.output_tokens == whole.usage.output_tokens
    body = {"messages": ASK, "max_tokens": 2, "stream": True}
    text = post(url, "/v1/messages", body, anthropic_version="2023-06-01").text
    events = [event.split("\n") for event in text.split("\n\n")]
    assert events.pop() == [""]
    names = [name.removeprefix("event: ") for name, _ in events]
    assert names[:2] == ["message_start", "ping"]
    assert [json.loads(data.removeprefix("data: "))["type"] for _, data in events] == names


def test_embeddings_are_blocks_by_value_by_reference_and_as_files(
    llama: Fleet, url: str, client: anthropic.Anthropic
) -> None:
    data = saved(embeds_of(llama))
    text = chat_of(url, ASK)["choices"][0]["message"]["content"]
    ref = post(url, "/v1/prompt_embeds", {"data": data}).json()["id"]
    for source in ({"data": data}, {"ref": ref}):
        turn: Any = {"role": "user", "content": [{"type": "prompt_embeds", **source}]}
        assert said(client.messages.create(**GREEDY, messages=[turn])) == text
        counted = client.messages.count_tokens(model="tiny", messages=[turn])
        assert counted == client.messages.count_tokens(model="tiny", messages=ASK)
    part = [{"type": "prompt_embeds", "part": "question"}]
    request = {"max_tokens": 12, "temperature": 0, "messages": [{"role": "user", "content": part}]}
    answer = httpx.post(
        url + "/v1/messages",
        files={"request": (None, json.dumps(request)), "question": ("q", base64.b64decode(data))},
    )
    assert answer.json()["content"] == [{"type": "text", "text": text}]
    result: Any = {"type": "tool_result", "tool_use_id": "c"}
    call: Any = {"type": "tool_use", "id": "c", "name": "f", "input": {"at": 1}}
    texts: list[str] = []
    for content in (
        TEXT,
        [{"type": "text", "text": TEXT}],
        [{"type": "prompt_embeds", "ref": ref}],
    ):
        turns: Any = [
            *ASK,
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [{**result, "content": content}]},
        ]
        texts.append(said(client.messages.create(**GREEDY, messages=turns)))
    assert texts[0] == texts[1] == texts[2] != ""


def test_a_last_turn_of_the_assistant_is_continued(url: str, client: anthropic.Anthropic) -> None:
    messages: Any = [*ASK, {"role": "assistant", "content": "It is"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    chat = chat_of(url, messages, **more)
    found = client.messages.create(**GREEDY, messages=messages)
    assert said(found) == chat["choices"][0]["message"]["content"]


def test_a_stop_sequence_is_named_and_what_follows_it_is_not_shown(
    url: str, client: anthropic.Anthropic
) -> None:
    whole = said(client.messages.create(**GREEDY, messages=ASK))
    asked: dict[str, Any] = {**GREEDY, "messages": ASK, "stop_sequences": [whole[3:5]]}
    found = client.messages.create(**asked)
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", whole[3:5])
    assert said(found) == whole[: whole.index(whole[3:5])]
    with client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", whole[3:5])
    assert said(final) == said(found)


def test_a_client_that_leaves_a_stream_ends_its_request(
    llama: Fleet, client: anthropic.Anthropic
) -> None:
    until(lambda: not llama.running())
    more = {"ignore_eos": True}
    stream: Any = client.messages.create(
        model="tiny", max_tokens=450, messages=ASK, stream=True, extra_body=more
    )
    next(iter(stream))
    stream.close()
    until(lambda: not llama.running())


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


TOOL: dict[str, Any] = {"name": "look", "input_schema": {"type": "object"}}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": []}, "messages must not be empty"),
    "no role": ({"messages": [{"content": "a"}]}, "messages[0].role must be 'user'"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content must be a string or a list"),
    "no blocks": ({"messages": [{"role": "user", "content": []}]}, "messages[0].content must be"),
    "another block": (block(type="document"), "messages[0].content[0].type must be one of text, image"),
    "a block that is a number": ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0].type"),
    "a call by the user": (block(type="tool_use"), "messages[0].content[0].type must be one of"),
    "a text that is none": (block(type="text", text=5), "messages[0].content[0].text must be a string"),
    "an image of nothing": (block(type="image", source={"type": "base64"}), "messages[0].content[0].source must be"),
    "an image": (block(type="image", source={"type": "url", "url": "https://a/b"}), "takes no images"),
    "bad embeddings": (block(type="prompt_embeds", data="%"), "prompt_embeds must be valid base64"),
    "embeddings that are not finite": (block(type="prompt_embeds", data=constant(float("nan"))), "must be finite"),
    "an empty result": (block(type="tool_result", tool_use_id="a", content=5), "messages[0].content[0].content must be"),
    "a result without an id": (block(type="tool_result"), "messages[0].content[0].tool_use_id must be a string"),
    "an input that is text": ({"messages": [{"role": "assistant", "content": [
        {"type": "tool_use", "id": "a", "name": "f", "input": "{}"}]}]}, "messages[0].content[0].input must be an object"),
    "a call without results": ({"messages": [{"role": "assistant", "content": [
        {"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]}, "messages[0]: the results of its tool_use blocks"),
    "a tool of a server": ({"tools": [{"type": "web_search_20250305", "name": "s"}]}, "tools[0].type must be 'custom'"),
    "a tool without a schema": ({"tools": [{"name": "look"}]}, "tools[0].input_schema must be a JSON Schema"),
    "a tool without a name": ({"tools": [{"input_schema": {}}]}, "tools[0].name must be a string of 1 to 256"),
    "another choice": ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice must be an object of type"),
    "a choice of no tool": ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice names 'x'"),
    "no tools to choose": ({"tool_choice": {"type": "any"}}, "tool_choice is only allowed when tools are given"),
    "no budget": ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens must be an integer"),
    "another thinking": ({"thinking": {"type": "between_tools"}}, "thinking.type must be one of enabled, adaptive"),
    "another display": ({"thinking": {"type": "adaptive", "display": "all"}}, "thinking.display must be"),
    "another format": ({"output_config": {"format": {"type": "xml"}}}, "output_config.format must be"),
    "no tokens": ({"max_tokens": 0}, "max_tokens must be at least 1"),
    "many tokens": ({"max_tokens": 600}, "maximum context length"),
    "a negative temperature": ({"temperature": -1}, "temperature must be at least 0"),
    "an empty stop": ({"stop_sequences": [""]}, "stop_sequences must not hold an empty string"),
    "servers of tools": ({"mcp_servers": [{"url": "a"}]}, "mcp_servers is not supported"),
    "deep tools": ({"tools": [{**TOOL, "input_schema": json.loads('{"a":' * 80 + "1" + "}" * 80)}]}, "tools is nested"),
    "a text for a number": ({"max_tokens": "5"}, "max_tokens: expected `int`"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_what_is_refused_is_named_in_the_words_of_this_api(url: str, bad: str) -> None:
    fields, phrase = BAD[bad]
    response = post(url, "/v1/messages", {"messages": ASK, "max_tokens": 2, **fields})
    assert response.status_code == 400
    assert phrase in refusal(response, "invalid_request_error")


def test_errors_have_the_classes_of_the_client(
    llama: Fleet, url: str, client: anthropic.Anthropic, tmp_path: Path
) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist") as missing:
        client.messages.create(model="other", max_tokens=1, messages=ASK)
    assert missing.value.type == "not_found_error"
    assert missing.value.request_id
    unread = httpx.post(url + "/v1/messages", content=b"{", headers={"content-type": "text/csv"})
    assert (unread.status_code, bool(refusal(unread, "invalid_request_error"))) == (415, True)
    assert httpx.get(url + "/v1/messages").status_code == 405
    refusal(httpx.get(url + "/v1/messages"), "invalid_request_error")
    version = post(url, "/v1/messages", {}, anthropic_version="2023-01-01")
    assert "2023-06-01 or 2026-10-21" in refusal(version, "invalid_request_error")
    small = llama.serve(max_body_bytes=1024)
    large = post(small, "/v1/messages", {"messages": ASK, "max_tokens": 1, "system": "a" * 2000})
    assert (large.status_code, bool(refusal(large, "request_too_large"))) == (413, True)

    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps([{"name": "a", "key": "one", "rate": 2}]), encoding="utf-8")
    keys.chmod(0o600)
    keyed = llama.serve(api_key_file=keys)
    body = {"messages": ASK, "max_tokens": 1}
    for headers in ({}, {"x_api_key": "two"}, {"authorization": "Bearer two", "x_api_key": "one"}):
        answer = post(keyed, "/v1/messages", body, **headers)
        assert (answer.status_code, bool(refusal(answer, "authentication_error"))) == (401, True)
    assert post(keyed, "/v1/messages", body, x_api_key="one").status_code == 200
    with anthropic.Anthropic(base_url=keyed, api_key="one", max_retries=0) as caller:
        caller.messages.count_tokens(model="tiny", messages=ASK)
        with pytest.raises(anthropic.RateLimitError) as over:
            caller.messages.create(model="tiny", max_tokens=1, messages=ASK)
    assert over.value.response.headers["retry-after"]
    assert over.value.type == "rate_limit_error"
    drained = llama.serve(max_inflight_requests=1)
    with llama.apps[drained].server.inflight:
        answer = post(drained, "/v1/messages", body)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    refusal(answer, "overloaded_error")
