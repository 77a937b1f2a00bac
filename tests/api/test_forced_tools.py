"""Tools that must be called, by a model whose weights are random.

That its calls are calls is the grammar's doing.
"""

import json
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


SET = {
    "type": "object",
    "properties": {"a": {"type": "array", "uniqueItems": True, "maxItems": 0}},
    "required": ["a"],
    "additionalProperties": False,
}


def function(parameters: object, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_strict_functions_schema_that_cannot_be_held_to_is_told_by_tool_and_place(
    url: str, blanks: dict[str, float], choice: object
) -> None:
    for schema, says in {
        "uniqueItems": (SET, "a grammar cannot hold uniqueItems, at #/properties/a/uniqueItems"),
        "overlapping": (
            {"properties": {"a": {"patternProperties": {"^x": {}, "y$": {"type": "null"}}}}},
            "are not disjoint, at #/$defs/f/properties/a",
        ),
    }.values():
        tools = [*TOOLS, function(schema, strict=True)]
        response = post(
            url, "/v1/chat/completions", fields(blanks, 0, tools=tools, tool_choice=choice)
        )
        said = error(response)
        assert (response.status_code, said["param"]) == (400, "tools")
        assert says in said["message"]
        assert "f" in said["message"]


@pytest.mark.parametrize("strict", [{}, {"strict": False}, {"strict": None}])
@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        (SET, {"a": []}),
        ({"properties": {"a": {"not": {}}}, "additionalProperties": False}, {}),
        ({"type": "object", "properties": None, "additionalProperties": False}, {}),
        (
            {
                "type": "object",
                "properties": {"a": {"enum": ["x"], "format": "password", "required": True}},
                "required": ["a"],
                "additionalProperties": False,
            },
            {"a": "x"},
        ),
    ],
)
def test_a_function_that_is_not_strict_is_held_as_far_as_possible(
    client: Any, blanks: dict[str, float], parameters: Any, arguments: Any, strict: dict[str, Any]
) -> None:
    choice = {"type": "function", "function": {"name": "f"}}
    hopeless = {"type": "object", "properties": {"a": {"pattern": "(a{1000}){1000}"}}}
    tools = [*TOOLS, function(parameters, **strict)]
    tools.append({"type": "function", "function": {"name": "hopeless", "parameters": hopeless}})
    named = client.chat.completions.create(**fields(blanks, 0, tools=tools, tool_choice=choice))
    (call,) = named.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == arguments
    any_of_them = fields(blanks, 0, tools=tools[-2:-1], tool_choice="required", max_tokens=60)
    (call, *_) = client.chat.completions.create(**any_of_them).choices[0].message.tool_calls
    assert call.function.name == "f"
    mixed = fields(blanks, 0, tools=tools, tool_choice="required", max_tokens=1)
    assert client.chat.completions.create(**mixed).choices[0].finish_reason == "length"


def test_responses_and_messages_name_the_tool_that_cannot_be_held_too(
    url: str, blanks: dict[str, float]
) -> None:
    says = (
        "the tool 'f' is strict, and its schema cannot be held: a grammar cannot hold uniqueItems"
    )
    tool = {"type": "function", "name": "f", "parameters": SET, "strict": True}
    asked: dict[str, Any] = {
        "model": "tiny",
        "input": TEXT,
        "tools": [tool],
        "tool_choice": "required",
    }
    response = post(url, "/v1/responses", asked)
    assert (response.status_code, error(response)["param"]) == (400, "tools")
    assert says in error(response)["message"]
    asked["tools"] = [{**tool, "strict": False}]
    assert post(url, "/v1/responses", {**asked, "max_output_tokens": 16}).status_code == 200
    asked = {
        "model": "tiny",
        "messages": CHAT,
        "max_tokens": 5,
        "tools": [{"name": "f", "input_schema": SET, "strict": True}],
        "tool_choice": {"type": "any"},
    }
    response = post(url, "/v1/messages", asked)
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]
    asked["tools"] = [{"name": "f", "input_schema": SET}]
    assert post(url, "/v1/messages", asked).status_code == 200


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
