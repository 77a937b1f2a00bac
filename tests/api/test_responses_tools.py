"""Reasoning and function calls in `/v1/responses`, with an engine that outputs given text."""

import json
from typing import Any

import openai
import pydantic
import pytest

from tests.api.saying import Says
from tests.payloads import error, post

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "name": name,
        "description": f"{name} at a place",
        "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}},
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
    return says.openai(**HERMES)


def test_reasoning_text_and_calls_are_items_and_go_back_as_input(says: Says, client: Any) -> None:
    response = client.responses.create(model="tiny", input=SAID, tools=TOOLS)
    reasoning, message, *calls = response.output
    assert (reasoning.type, reasoning.summary, reasoning.content[0].text) == ("reasoning", [], "hm")
    assert response.output_text.strip() == message.content[0].text.strip() == "I look."
    assert [(call.type, call.name, json.loads(call.arguments)) for call in calls] == [
        ("function_call", "look", {"at": 1}),
        ("function_call", "listen", {"at": 2}),
    ]
    assert len({call.call_id for call in calls}) == 2
    assert {item.status for item in response.output} == {"completed"}
    assert [(tool.name, tool.description) for tool in response.tools] == [
        (tool["name"], tool["description"]) for tool in TOOLS
    ]

    whole = says.openai("{{ messages | tojson }}<|im_end|>", **HERMES)
    outputs = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "seen"}
        for call in calls
    ]
    items = [{"role": "user", "content": "go"}, *response.output, *outputs]
    messages = json.loads(whole.responses.create(model="tiny", input=items).output_text)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    assert messages[1]["reasoning_content"] == "hm"
    assert [call["id"] for call in messages[1]["tool_calls"]] == [call.call_id for call in calls]


def test_every_kind_of_item_is_streamed_from_its_beginning_to_its_end(client: Any) -> None:
    events = list(client.responses.create(model="tiny", input=SAID, tools=TOOLS, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds: dict[int, list[str]] = {}
    text: dict[tuple[int, str], str] = {}
    for event in events[2:-1]:
        kind = event.type.removeprefix("response.")
        kinds.setdefault(event.output_index, []).append(kind)
        if kind.endswith(".delta"):
            text[event.output_index, kind] = text.get((event.output_index, kind), "") + event.delta
    spoken = [
        "output_item.added",
        "content_part.added",
        "{0}.delta",
        "{0}.done",
        "content_part.done",
        "output_item.done",
    ]
    called = ["output_item.added", "{0}.delta", "{0}.done", "output_item.done"]
    assert [list(dict.fromkeys(found)) for found in kinds.values()] == [
        [kind.format(name) for kind in shape]
        for shape, name in (
            (spoken, "reasoning_text"),
            (spoken, "output_text"),
            (called, "function_call_arguments"),
            (called, "function_call_arguments"),
        )
    ]
    done = events[-1].response.output
    assert events[-1].type == "response.completed"
    assert done == [event.item for event in events if event.type == "response.output_item.done"]
    assert text[0, "reasoning_text.delta"] == done[0].content[0].text
    assert text[1, "output_text.delta"] == done[1].content[0].text
    assert [text[index, "function_call_arguments.delta"] for index in (2, 3)] == [
        item.arguments for item in done[2:]
    ]
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [item.id for item in added] == [item.id for item in done]
    assert {item.status for item in added} == {"in_progress"}


class Look(pydantic.BaseModel):
    at: int


def test_the_clients_helper_reads_calls_into_types(client: Any) -> None:
    tool = openai.pydantic_function_tool(Look, name="look")
    said = CALLS[: CALLS.index("</tool_call>") + len("</tool_call>")]
    response = client.responses.parse(model="tiny", input=said, tools=[tool])
    assert [item.parsed_arguments for item in response.output] == [Look(at=1)]
    with client.responses.stream(model="tiny", input=said, tools=[tool]) as stream:
        for event in stream:
            if event.type == "response.function_call_arguments.delta":
                assert event.snapshot.endswith(event.delta)
        (call,) = stream.get_final_response().output
    assert call.parsed_arguments == Look(at=1)


def test_without_tools_a_call_is_text(client: Any) -> None:
    for asked in (
        {},
        {"tools": TOOLS, "tool_choice": "none"},
        {"tool_choice": "auto", "tools": []},
    ):
        (message,) = client.responses.create(model="tiny", input=CALLS, **asked).output
        assert message.content[0].text == CALLS


def test_calls_are_one_where_they_may_not_be_parallel(client: Any) -> None:
    response = client.responses.create(
        model="tiny", input=CALLS, tools=TOOLS, parallel_tool_calls=False
    )
    assert [item.name for item in response.output if item.type == "function_call"] == ["look"]
    assert response.parallel_tool_calls is False


def test_the_model_is_told_only_of_the_tools_it_may_call(says: Says) -> None:
    client = says.openai("{{ tools | tojson }}<|im_end|>", **HERMES)
    chosen = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "listen"}],
    }
    response = client.responses.create(model="tiny", input="x", tools=TOOLS, tool_choice=chosen)
    (told,) = json.loads(response.output_text)
    fields = {name: value for name, value in TOOLS[1].items() if name != "type"}
    assert told == {"type": "function", "function": fields}


def test_a_call_cut_short_is_incomplete(client: Any) -> None:
    response = client.responses.create(model="tiny", input=CALLS, tools=TOOLS, max_output_tokens=40)
    assert response.status == "incomplete"
    assert response.output[-1].status == "incomplete"
    assert all(item.status == "completed" for item in response.output[:-1])


def test_a_choice_that_needs_tools_is_refused_without_them(client: Any) -> None:
    url = str(client.base_url).removesuffix("/v1/")
    for choice in ("required", {"type": "function", "name": "look"}):
        found = error(post(url, "/v1/responses", {"input": "x", "tool_choice": choice}))
        assert found["param"] == "tool_choice"
