"""Thinking and tools in `/v1/messages`, with an engine that outputs given text."""

import json
from typing import Any

import anthropic
import pytest

from tests.api.saying import Says

TOOLS: list[Any] = [
    {
        "name": name,
        "description": f"{name} at a place",
        "input_schema": {"type": "object", "properties": {"at": {"type": "integer"}}},
    }
    for name in ("look", "listen")
]
CALLS = "".join(
    f'<tool_call>\n{{"name": "{name}", "arguments": {{"at": {at}}}}}\n</tool_call>'
    for name, at in (("look", 1), ("listen", 2))
)
SAID = f"<think>hm</think>I look. {CALLS}"


HERMES = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}


@pytest.fixture(scope="module")
def client(says: Says) -> Any:
    return says.anthropic(**HERMES)


@pytest.fixture(scope="module")
def whole(says: Says) -> Any:
    return says.anthropic("{{ {'tools': tools, 'said': messages} | tojson }}<|im_end|>", **HERMES)


def ask(client: Any, text: str, **fields: Any) -> Any:
    asked: dict[str, Any] = {"max_tokens": 500, **fields}
    return client.messages.create(
        model="tiny", messages=[{"role": "user", "content": text}], **asked
    )


def test_thinking_text_and_calls_are_blocks_and_go_back_as_input(client: Any, whole: Any) -> None:
    message = ask(client, SAID, tools=TOOLS)
    thinking, text, *calls = message.content
    assert (thinking.type, thinking.thinking, thinking.signature) == ("thinking", "hm", "")
    assert text.text.strip() == "I look."
    assert [(call.type, call.name, call.input) for call in calls] == [
        ("tool_use", "look", {"at": 1}),
        ("tool_use", "listen", {"at": 2}),
    ]
    assert message.stop_reason == "tool_use"
    assert len({call.id for call in calls}) == 2

    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": call.id, "content": "seen", "is_error": bool(number)}
        for number, call in enumerate(calls)
    ]
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, *message.content]},
        {"role": "user", "content": [*results, {"type": "text", "text": "and?"}]},
    ]  # fmt: skip
    answer = whole.messages.create(
        model="tiny", max_tokens=4000, messages=messages, tools=TOOLS, thinking={"type": "disabled"}
    )
    seen = json.loads(answer.content[0].text)
    assert [said["role"] for said in seen["said"]] == ["user", "assistant", "tool", "tool", "user"]
    turn = seen["said"][1]
    assert (turn["reasoning_content"], turn["content"].strip()) == ("hm", "I look.")
    assert [call["id"] for call in turn["tool_calls"]] == [call.id for call in calls]
    assert [call["function"]["arguments"] for call in turn["tool_calls"]] == [{"at": 1}, {"at": 2}]
    assert [said["tool_call_id"] for said in seen["said"][2:4]] == [call.id for call in calls]
    assert "is_error" not in seen["said"][2]
    assert seen["said"][3]["is_error"] is True
    functions = [tool["function"] for tool in seen["tools"]]
    assert [function["description"] for function in functions] == [
        "look at a place",
        "listen at a place",
    ]
    assert functions[0]["parameters"] == TOOLS[0]["input_schema"]


def test_every_kind_of_block_is_streamed_from_its_beginning_to_its_end(client: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 500, "tools": TOOLS}
    asked["messages"] = [{"role": "user", "content": SAID}]
    events = list(client.messages.create(**asked, stream=True))
    kinds: dict[int, list[str]] = {}
    for event in events[1:-2]:
        kinds.setdefault(event.index, []).append(event.type)
    assert list(kinds) == [0, 1, 2, 3]
    for found in kinds.values():
        assert list(dict.fromkeys(found)) == [
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
        ]
    assert events[-2].delta.stop_reason == "tool_use"
    with client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    told = ask(client, SAID, tools=TOOLS)
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    for streamed, block in zip(final.content, told.content, strict=True):
        for field in ("text", "thinking", "name", "input"):
            assert getattr(streamed, field, None) == getattr(block, field, None)


@pytest.mark.parametrize(
    ("thinking", "shown"),
    [
        ({"type": "adaptive"}, True),
        ({"type": "enabled", "budget_tokens": 400}, True),
        ({"type": "adaptive", "display": "omitted"}, False),
        ({"type": "disabled"}, False),
    ],
)
def test_thinking_is_shown_where_it_is_wanted(client: Any, thinking: Any, shown: bool) -> None:
    message = ask(client, "<think>hm</think>so", thinking=thinking)
    assert [block.type for block in message.content] == ["thinking"] * shown + ["text"]
    assert message.content[-1].text == "so"


def test_thinking_and_effort_go_to_templates_that_read_them(says: Says) -> None:
    said = says.anthropic("{{ reasoning_effort }} {{ enable_thinking }}<|im_end|>", **HERMES)
    for thinking, switched in (("adaptive", "True"), ("disabled", "False")):
        message = ask(said, "x", thinking={"type": thinking}, output_config={"effort": "low"})
        assert message.content[0].text == f"low {switched}"


def test_an_answer_without_a_word_is_an_empty_text(client: Any) -> None:
    for text in ("", "<think>hm</think>"):
        asked: dict[str, Any] = {"thinking": {"type": "adaptive", "display": "omitted"}}
        (block,) = ask(client, text, **asked).content
        assert (block.type, block.text) == ("text", "")
        kinds = [event.type for event in ask(client, text, stream=True, **asked)]
        assert kinds[1:3] == ["content_block_start", "content_block_delta"]
        assert kinds[3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_calls_may_be_forbidden_or_one_at_most(client: Any) -> None:
    none = ask(client, SAID, tools=TOOLS, tool_choice={"type": "none"})
    assert {block.type for block in none.content} == {"thinking", "text"}
    assert none.stop_reason == "end_turn"
    one = ask(
        client, SAID, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True}
    )
    assert [block.name for block in one.content if block.type == "tool_use"] == ["look"]


def test_arguments_that_are_no_object_are_given_as_they_are(client: Any) -> None:
    cut = ask(client, SAID[:-20], tools=TOOLS)
    (call,) = (block for block in cut.content if block.type == "tool_use" and block.name != "look")
    assert list(call.input) == ["unparsed"]


def test_an_error_in_a_stream_is_raised_by_the_client(client: Any) -> None:
    # On a slow machine it may come before the stream, and is the same.
    with pytest.raises(anthropic.APIStatusError, match="longer than") as failed:
        for _ in client.messages.create(
            model="tiny", max_tokens=4_000_000, stream=True,
            messages=[{"role": "user", "content": "again and again "}],
            extra_body={"ignore_eos": True}, extra_headers={"x-request-timeout": "2"},
        ):  # fmt: skip
            pass
    assert failed.value.type == "timeout_error"
