"""Tools that must be called, by a model whose weights are random.

That its calls are calls is the grammar's doing.
"""

from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.live import Fleet
from tests.payloads import TEXT, error, post

CHAT: list[dict[str, Any]] = [{"role": "user", "content": TEXT}]
SEEDS = range(3)


class Lamp(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    colour: Literal["red", "green"]
    lit: bool


class Hang(pydantic.BaseModel):
    """Its schema refers to a part of itself."""

    model_config = pydantic.ConfigDict(extra="forbid")
    street: str = pydantic.Field(max_length=5)
    lamps: list[Lamp] = pydantic.Field(max_length=2)


class Count(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    least: int = pydantic.Field(ge=-5, le=120)


FUNCTIONS: dict[str, type[pydantic.BaseModel]] = {"hang": Hang, "count": Count}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": function.model_json_schema()}}
    for name, function in FUNCTIONS.items()
]


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def fields(blanks: dict[str, float], seed: int, **more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": CHAT,
        "tools": TOOLS,
        "max_tokens": 300,
        "temperature": 1.0,
        "seed": seed,
        "logit_bias": blanks,
        **more,
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_a_required_call_names_a_function_and_fits_its_schema(
    client: Any, blanks: dict[str, float], seed: int
) -> None:
    asked = fields(blanks, seed, tool_choice="required", parallel_tool_calls=False)
    choice = client.chat.completions.create(**asked).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    FUNCTIONS[call.function.name].model_validate_json(call.function.arguments)


def test_of_many_required_calls_each_fits_its_schema(client: Any, blanks: dict[str, float]) -> None:
    asked = fields(blanks, 1, tool_choice="required", n=3)
    for choice in client.chat.completions.create(**asked).choices:
        calls = choice.message.tool_calls
        assert calls
        if choice.finish_reason == "length":
            calls = calls[:-1]
        for call in calls:
            FUNCTIONS[call.function.name].model_validate_json(call.function.arguments)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_named_function_is_called_with_arguments_of_its_schema(
    client: Any, blanks: dict[str, float], name: str
) -> None:
    asked = fields(blanks, 2, tool_choice={"type": "function", "function": {"name": name}}, n=3)
    for choice in client.chat.completions.create(**asked).choices:
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, call.function.name) == ("stop", name)
        FUNCTIONS[name].model_validate_json(call.function.arguments)


def test_a_streamed_call_is_the_same_call(client: Any, blanks: dict[str, float]) -> None:
    asked = fields(blanks, 0, tool_choice="required", parallel_tool_calls=False)
    (whole,) = client.chat.completions.create(**asked).choices[0].message.tool_calls
    pieces = [
        piece.function
        for chunk in client.chat.completions.create(**asked, stream=True)
        for choice in chunk.choices
        for piece in choice.delta.tool_calls or []
    ]
    assert pieces[0].name == whole.function.name
    assert "".join(piece.arguments for piece in pieces) == whole.function.arguments


def test_a_schema_without_a_type_still_gives_an_object(
    client: Any, blanks: dict[str, float]
) -> None:
    parameters = {
        "properties": {"lit": {"type": "boolean"}},
        "required": ["lit"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "light", "parameters": parameters}}]
    asked = fields(
        blanks, 0, tools=tools, tool_choice={"type": "function", "function": {"name": "light"}}
    )
    for seed in SEEDS:
        (call,) = (
            client.chat.completions.create(**{**asked, "seed": seed}).choices[0].message.tool_calls
        )
        assert call.function.arguments.replace(" ", "") in ('{"lit":true}', '{"lit":false}')


def test_a_forced_call_goes_before_a_format_and_otherwise_the_format_binds_the_whole_answer(
    client: Any, blanks: dict[str, float], llama: Fleet
) -> None:
    schema = {"name": "lamp", "schema": Lamp.model_json_schema()}
    shaped = {"response_format": {"type": "json_schema", "json_schema": schema}}
    named = {"type": "function", "function": {"name": "count"}}
    forced = client.chat.completions.create(
        **fields(blanks, 0, tool_choice=named, **shaped)
    ).choices[0]
    Count.model_validate_json(forced.message.tool_calls[0].function.arguments)
    url = llama.serve(tool_call_parser="hermes")
    for choice in ("none", "auto"):
        asked = fields(blanks, 0, tool_choice=choice, **shaped)
        (answer,) = post(url, "/v1/chat/completions", asked).json()["choices"]
        assert "tool_calls" not in answer["message"]
        Lamp.model_validate_json(answer["message"]["content"])


def test_a_functions_schema_that_cannot_be_held_to_is_told_as_the_tools(
    url: str, blanks: dict[str, float]
) -> None:
    tools = [
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}},
        }
    ]
    response = post(
        url, "/v1/chat/completions", fields(blanks, 0, tools=tools, tool_choice="required")
    )
    assert (response.status_code, error(response)["param"]) == (400, "tools")


def test_responses_parse_a_pydantic_model_and_call_what_they_must(
    client: Any, blanks: dict[str, float]
) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "input": TEXT,
        "max_output_tokens": 300,
        "temperature": 1.0,
        "extra_body": {"logit_bias": blanks, "seed": 4},
    }
    parsed = client.responses.parse(**asked, text_format=Hang)
    assert parsed.status == "completed"
    assert isinstance(parsed.output_parsed, Hang)
    tools = [
        {
            "type": "function",
            "name": tool["function"]["name"],
            "parameters": tool["function"]["parameters"],
        }
        for tool in TOOLS
    ]
    for choice in ("required", {"type": "function", "name": "hang"}):
        answer = client.responses.create(
            **asked, tools=tools, tool_choice=choice, parallel_tool_calls=False
        )
        (item,) = answer.output
        assert item.type == "function_call"
        FUNCTIONS[item.name].model_validate_json(item.arguments)
