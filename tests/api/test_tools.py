"""Tools and reasoning through the real client and a real server, whose model says what its last message says.

The engine repeats its prompt, and the chat template writes the last message alone; so the text of
that message is the model's output, token by token, and everything behind it is the server's doing.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessage

from inlay.demo import model_dir
from tests.live import Fleet, fleet
from tests.models import TURN_END
from tests.payloads import error, post

SAYS = (
    "{# calls between <tool_call> tags, thoughts before </think> #}{{ messages[-1]['content'] }}"
    + TURN_END
)
OPENS = "{# </think> #}{{ messages[-1]['content'] }}" + TURN_END + "<think>\n"

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris <b>"}}\n</tool_call>'


@pytest.fixture(scope="module")
def echo() -> Iterator[Fleet]:
    with fleet(model_dir(), engine="echo") as running:
        yield running


@pytest.fixture(scope="module")
def says(echo: Fleet, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A frontend whose model says its last message."""
    template = tmp_path_factory.mktemp("says") / "says.jinja"
    template.write_text(SAYS)
    return echo.serve(chat_template=str(template))


@pytest.fixture(scope="module")
def client(says: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=says + "/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **more}


def test_a_tool_is_called_and_its_result_is_answered(client: openai.OpenAI) -> None:
    """The two turns of OpenAI's guide to function calling."""
    messages: list[Any] = [{"role": "user", "content": f"Let me see.\n{CALL}"}]
    first = client.chat.completions.create(model="tiny", messages=messages, tools=[WEATHER])
    choice = first.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "get_weather",
        {"city": "Paris <b>"},
    )
    messages += [
        choice.message,
        {"role": "tool", "tool_call_id": call.id, "content": "It rains in Paris."},
    ]
    second = client.chat.completions.create(model="tiny", messages=messages, tools=[WEATHER])
    assert (second.choices[0].finish_reason, second.choices[0].message.content) == (
        "stop",
        "It rains in Paris.",
    )
    assert second.choices[0].message.tool_calls is None


def test_only_calls_leave_no_content_and_ids_are_each_their_own(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ask(f"{CALL}\n{CALL}\n"), tools=[WEATHER], n=2)
    calls = [call for choice in answer.choices for call in choice.message.tool_calls or []]
    assert [choice.message.content for choice in answer.choices] == [None, None]
    assert len({call.id for call in calls}) == 4
    alone = client.chat.completions.create(
        **ask(f"{CALL}\n{CALL}"), tools=[WEATHER], parallel_tool_calls=False
    )
    assert len(alone.choices[0].message.tool_calls or []) == 1


def gathered(
    client: openai.OpenAI, body: dict[str, Any], index: int = 0
) -> tuple[dict[str, Any], str | None]:
    """A streamed message put together by hand, as the guides do it, and its finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": {}}
    reason = None
    for chunk in client.chat.completions.create(**body, stream=True):
        for choice in chunk.choices:
            if choice.index != index:
                continue
            reason = choice.finish_reason or reason
            message["content"] += choice.delta.content or ""
            extra = choice.delta.model_extra or {}
            assert extra.get("reasoning") == extra.get("reasoning_content")
            message["reasoning"] += extra.get("reasoning") or ""
            for piece in choice.delta.tool_calls or []:
                assert piece.function is not None
                if piece.index not in message["tool_calls"]:
                    assert (piece.type, bool(piece.id)) == ("function", True)
                    message["tool_calls"][piece.index] = [piece.function.name, ""]
                message["tool_calls"][piece.index][1] += piece.function.arguments or ""
    return message, reason


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        (f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}\n{CALL}", "Let me see.", "Hm.", 2),
        (CALL, "", "", 1),
        ("<tool_call> is a tag", "<tool_call> is a tag", "", 0),
        ("<think>Hm, é🙂", "", "Hm, é🙂", 0),
    ],
)
def test_a_stream_says_what_the_whole_says(
    client: openai.OpenAI, text: str, content: str, reasoning: str, calls: int
) -> None:
    body = {**ask(text), "tools": [WEATHER], "n": 2, "logprobs": True}
    whole = client.chat.completions.create(**body)
    for index in range(2):
        streamed, reason = gathered(client, body, index)
        message = whole.choices[index].message
        assert whole.choices[index].finish_reason == reason == ("tool_calls" if calls else "stop")
        assert (message.content or "", (message.model_extra or {})["reasoning"] or "") == (
            content,
            reasoning,
        )
        assert (streamed["content"], streamed["reasoning"]) == (content, reasoning)
        assert [tuple(call) for call in streamed["tool_calls"].values()] == [
            (call.function.name, call.function.arguments)
            for call in message.tool_calls or []
            if call.type == "function"
        ]
        assert len(streamed["tool_calls"]) == calls
        logprobs = whole.choices[index].logprobs
        assert logprobs is not None
        assert whole.usage is not None
        assert 2 * len(logprobs.content or []) == whole.usage.completion_tokens


def test_the_clients_own_stream_helper_puts_calls_together(client: openai.OpenAI) -> None:
    strict: Any = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    with client.chat.completions.stream(**ask(CALL), tools=[strict]) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        message: ChatCompletionMessage = stream.get_final_completion().choices[0].message
    assert [(event.name, event.parsed_arguments) for event in done] == [
        ("get_weather", {"city": "Paris <b>"})
    ]
    assert message.content in (None, "")


def said(message: dict[str, Any]) -> dict[str, Any]:
    """The fields of a message that are not null."""
    return {name: value for name, value in message.items() if value is not None}


def test_reasoning_has_both_names_and_may_be_left_out(says: str) -> None:
    for prefix in ("", "\n"):
        text = f"{prefix}<think>\nHm.\n</think>"
        body = ask(f"{text}\n\nYes.")
        answer = post(says, "/v1/chat/completions", body).json()
        message = answer["choices"][0]["message"]
        assert (message["content"], message["reasoning"], message["reasoning_content"]) == (
            "Yes.",
            "Hm.",
            "Hm.",
        )
        hidden = post(says, "/v1/chat/completions", {**body, "include_reasoning": False}).json()
        assert said(hidden["choices"][0]["message"]) == {"role": "assistant", "content": "Yes."}


def test_a_prompt_that_opens_the_reasoning_starts_the_output_in_it(
    echo: Fleet, tmp_path: Path
) -> None:
    template = tmp_path / "opens.jinja"
    template.write_text(OPENS)
    url = echo.serve(chat_template=str(template))
    message = post(url, "/v1/chat/completions", ask("Hm.</think>\n\nYes.")).json()["choices"][0][
        "message"
    ]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Yes.")
    message = post(url, "/v1/chat/completions", ask("Hm, no end")).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm, no end", None)


def test_stop_strings_and_lengths_end_a_call_where_they_end_the_text(says: str) -> None:
    body = ask(CALL, tools=[WEATHER])
    cut = post(says, "/v1/chat/completions", {**body, "stop": "Par"}).json()["choices"][0]
    assert cut["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'
    assert (cut["finish_reason"], cut["stop_reason"]) == ("tool_calls", "Par")
    short = post(says, "/v1/chat/completions", {**body, "max_tokens": 12}).json()["choices"][0]
    assert short["finish_reason"] == "length"


def test_without_tools_tags_are_text(says: str) -> None:
    for more in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        choice = post(says, "/v1/chat/completions", ask(CALL, **more)).json()["choices"][0]
        assert (said(choice["message"]), choice["finish_reason"]) == (
            {"role": "assistant", "content": CALL},
            "stop",
        )


def test_parsers_are_named_by_flags(echo: Fleet, tmp_path: Path) -> None:
    template = tmp_path / "says.jinja"
    template.write_text(SAYS)
    url = echo.serve(
        chat_template=str(template), tool_call_parser="mistral", reasoning_parser="none"
    )
    text = '<think>[TOOL_CALLS]get_weather{"city": "Rome"}'
    message = post(url, "/v1/chat/completions", ask(text, tools=[WEATHER])).json()["choices"][0][
        "message"
    ]
    assert message["content"] == "<think>"
    assert len(message["tool_calls"][0]["id"]) == 9
    url = echo.serve(enable_auto_tool_choice=False)
    found = error(post(url, "/v1/chat/completions", ask(text, tools=[WEATHER])))
    assert "--no-enable-auto-tool-choice" in found["message"]


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": None, "tool_choice": "auto"}, "tool_choice", "only allowed when tools"),
    ({"tool_choice": "any"}, "tool_choice", "got 'any'"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "'f', which is not one of the tools"),
    ({"tool_choice": {"type": "function"}}, "tool_choice", "'required' or"),
    ({"tool_choice": "required"}, "tool_choice", "it has no structured output"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"title": "x" * 300_000}}}],
      "tool_choice": "required"}, "tools", "have 3"),
    ({"tools": [WEATHER] * 1025}, "tools", "tools has 1025 entries; at most 1024"),
    ({"tools": [{"type": "x" * 200}]}, "tools[0].type", "got '" + "x" * 60 + "'..."),
    ({"tools": [{"type": "custom"}]}, "tools[0].type", "got 'custom'"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "got nothing beside 'type'"),
    ({"tools": [WEATHER, {"type": "function", "function": {"name": ""}}]}, "tools[1].function.name", "1 to 256"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters", "got a list of 0"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "phrase"), BAD)
def test_what_is_wrong_with_tools_is_named(
    says: str, fields: dict[str, Any], param: str, phrase: str
) -> None:
    response = post(says, "/v1/chat/completions", {**ask("x"), "tools": [WEATHER], **fields})
    found = error(response)
    assert (response.status_code, found["param"]) == (400, param), found
    assert phrase in found["message"]


def test_a_model_without_a_form_of_calls_is_not_asked_for_them(url: str) -> None:
    found = error(post(url, "/v1/chat/completions", ask("x", tools=[WEATHER])))
    assert (found["param"], "--tool-call-parser" in found["message"]) == ("tool_choice", True)
