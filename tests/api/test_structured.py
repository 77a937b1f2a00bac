"""Structured output through real servers and the real client.

The model's weights are random, so the grammar does all of it.
"""

import http.client
import json
import re
import select
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any, Literal

import openai
import pydantic
import pytest

from inlay.render import Renderer
from tests.live import Fleet, until
from tests.payloads import TEXT, embeds_of, error, post, saved

ASK: list[dict[str, Any]] = [{"role": "user", "content": TEXT}]


class Lantern(pydantic.BaseModel):
    """Schema that the tests use."""

    model_config = pydantic.ConfigDict(extra="forbid")
    colour: Literal["red", "green"]
    count: int = pydantic.Field(ge=0, le=99)
    lit: bool


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_openai_client_parses_a_pydantic_model(client: Any, blanks: dict[str, float]) -> None:
    answer = client.chat.completions.parse(
        model="tiny",
        messages=ASK,
        response_format=Lantern,
        max_tokens=200,
        n=2,
        temperature=1.0,
        seed=3,
        logit_bias=blanks,
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Lantern)


def test_a_streamed_chat_is_the_same_json(client: Any, blanks: dict[str, float]) -> None:
    schema = {"name": "lantern", "strict": True, "schema": Lantern.model_json_schema()}
    options: dict[str, Any] = {
        "model": "tiny",
        "messages": ASK,
        "max_tokens": 200,
        "temperature": 0,
        "logit_bias": blanks,
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    whole = client.chat.completions.create(**options).choices[0].message.content
    Lantern.model_validate_json(whole)
    chunks = client.chat.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": "[A-F]{2}[0-9]"}, "[A-F]{2}[0-9]"),
        ({"choice": ["left", "right"]}, "left|right"),
        ({"grammar": 'root ::= "go " ("north" | "south")'}, "go (north|south)"),
        ({"grammar": 'start: "go " ("north" | "south")'}, "go (north|south)"),
        ({"json": Lantern.model_json_schema()}, None),
        ({"json": json.dumps(Lantern.model_json_schema())}, None),
    ],
)
def test_every_kind_of_structured_outputs(
    client: Any, blanks: dict[str, float], asked: dict[str, Any], pattern: str | None
) -> None:
    answer = client.completions.create(
        model="tiny",
        prompt=TEXT,
        max_tokens=200,
        temperature=1.0,
        logit_bias=blanks,
        extra_body={"structured_outputs": asked},
    )
    text = answer.choices[0].text
    assert answer.choices[0].finish_reason == "stop"
    if pattern is None:
        Lantern.model_validate_json(text)
    else:
        assert re.fullmatch(pattern, text)


def test_a_prompt_of_rows_is_answered_by_the_same_json_as_its_text(
    llama: Fleet, url: str, blanks: dict[str, float]
) -> None:
    fields = {
        "model": "tiny",
        "max_tokens": 200,
        "temperature": 0,
        "logit_bias": blanks,
        "structured_outputs": {"json": Lantern.model_json_schema()},
    }
    by_text = post(url, "/v1/completions", {**fields, "prompt": TEXT}).json()["choices"][0]["text"]
    by_rows = post(
        url, "/v1/completions", {**fields, "prompt_embeds": saved(embeds_of(llama))}
    ).json()
    assert by_rows["choices"][0]["text"] == by_text
    Lantern.model_validate_json(by_text)


def test_json_mode_says_an_object_or_is_cut_off_in_one(client: Any) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=ASK,
        response_format={"type": "json_object"},
        max_tokens=100,
        temperature=1.0,
    )
    text = answer.choices[0].message.content
    assert text.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


# As instructor 1.17.0 sends them for a model with a name and an age, in its modes JSON and MD_JSON
# (recorded; the library wants another `openai` than these tests). It parses what comes back,
# without a fence or inside of one.
INSTRUCTOR = (
    "\n            As a genius expert, your task is to understand the content and provide\n            the parsed objects in json that"
    ' match the following json_schema:\n\n\n            {\n  "properties": {\n    "name": {\n      "title": "Name",\n      "type":'
    ' "string"\n    },\n    "age": {\n      "title": "Age",\n      "type": "integer"\n    }\n  },\n  "required": [\n    "name",\n    "age"\n'
    '  ],\n  "title": "User",\n  "type": "object"\n}\n\n            Make sure to return an instance of the JSON, not the schema itself\n'
)
FENCED = '```json\n{"name": "Jason", "age": 25}\n```'


@pytest.mark.parametrize(
    ("question", "fields", "content"),
    [
        ("Extract: Jason is 25 years old", {"response_format": {"type": "json_object"}}, "{}"),
        (
            "Extract: Jason is 25 years old\n\nReturn the correct JSON response within a ```json codeblock. not the JSON_SCHEMA",
            {"structured_outputs": {"choice": [FENCED]}},
            FENCED,
        ),
    ],
    ids=["JSON", "MD_JSON"],
)
def test_what_the_model_says_in_instructors_json_modes_reaches_it_whole(
    url: str, llama: Fleet, question: str, fields: dict[str, Any], content: str
) -> None:
    # Both modes send the same system message. With the longer question it would leave no room in
    # this model's context.
    system = [{"role": "system", "content": INSTRUCTOR}] if content == "{}" else []
    messages = [*system, {"role": "user", "content": question}]
    renderer = Renderer.load(llama.path)
    # These modes hold the model to no schema. What it would have to say is made likely by other
    # means.
    likely = {
        str(id_): 100
        for text in ("{", "{}", "}")
        for id_ in renderer.encode(text, add_special_tokens=False)
    }
    options = {"model": "tiny", "temperature": 0, "logit_bias": likely}
    answer = post(url, "/v1/chat/completions", {"messages": messages, **options, **fields}).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == content


def test_a_stop_string_ends_a_structured_output_too(client: Any) -> None:
    answer = client.completions.create(
        model="tiny",
        prompt=TEXT,
        max_tokens=50,
        stop="c",
        extra_body={"structured_outputs": {"regex": "abcd"}},
    )
    assert answer.choices[0].text == "ab"


HOSTILE: dict[str, dict[str, Any]] = {
    "repetition": {"regex": "(a{1000}){1000}"},
    "exponential": {"regex": ".*[a-m].{40}x"},
    "divisor": {"json": {"type": "integer", "multipleOf": 1_000_003}},
    "enum": {"json": {"enum": [f"value number {index}" for index in range(9000)]}},
    "nesting": {"regex": "(" * 5000 + "a" + ")" * 5000},
    "products": {"json": {"allOf": [{"anyOf": [{"properties": {f"p{i}": {"type": kind}}} for kind in ("string", "integer")]} for i in range(20)]}},
    "itself": {"json": {"$ref": "#"}},
    "elsewhere": {"json": {"$ref": "http://127.0.0.1:9/schema"}},
}  # fmt: skip


def test_hostile_schemas_are_refused_or_cut_while_others_are_answered(url: str) -> None:
    statuses: dict[str, int] = {}

    def attack(name: str) -> None:
        body = {
            "model": "tiny",
            "prompt": TEXT,
            "max_tokens": 20,
            "structured_outputs": HOSTILE[name],
        }
        statuses[name] = post(url, "/v1/completions", body).status_code

    threads = [threading.Thread(target=attack, args=(name,)) for name in HOSTILE]
    fields = {
        "model": "tiny",
        "prompt": TEXT,
        "max_tokens": 10,
        "temperature": 0,
        "return_token_ids": True,
    }
    before = post(url, "/v1/completions", fields).json()["choices"][0]["token_ids"]
    for thread in threads:
        thread.start()
    during = [
        post(url, "/v1/completions", fields).json()["choices"][0]["token_ids"] for _ in range(5)
    ]
    for thread in threads:
        thread.join()
    assert during == [before] * 5
    assert set(statuses.values()) <= {200, 400}
    refused = {"repetition", "divisor", "nesting", "products", "itself", "elsewhere"}
    assert all(statuses[name] == 400 for name in refused)


CHAIN = "a?" * 5000 + "a" * 5000
CALL = {
    "name": "f",
    "parameters": {"type": "object", "properties": {"a": {"type": "string", "pattern": CHAIN}}},
}
ASKING: dict[str, tuple[str, dict[str, Any]]] = {
    "regex": ("structured_outputs", {"structured_outputs": {"regex": CHAIN}}),
    "pattern": ("structured_outputs", {"structured_outputs": {"json": {"pattern": CHAIN}}}),
    "lark": ("structured_outputs", {"structured_outputs": {"grammar": f"start: /{CHAIN}/"}}),
    "gbnf": (
        "structured_outputs",
        {"structured_outputs": {"grammar": 'root ::= x "b"\nx ::= ' + '"a"? ' * 5000}},
    ),
    "format": (
        "response_format",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"pattern": CHAIN}}}},
    ),
    "required call": ("tools", {"tools": [{"type": "function", "function": CALL}], "tool_choice": "required"}),
    "named call": (
        "tools",
        {
            "tools": [{"type": "function", "function": CALL}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKING)
def test_the_chain_of_optionals_is_refused_wherever_it_stands(url: str, name: str) -> None:
    param, fields = ASKING[name]
    answer = post(
        url, "/v1/chat/completions", {"model": "tiny", "messages": ASK, "max_tokens": 4, **fields}
    )
    assert answer.status_code == 400
    assert error(answer)["param"] == param
    assert "transitions; at most 100000" in error(answer)["message"]


def test_a_key_with_costly_schemas_delays_no_other_key_s(llama: Fleet) -> None:
    url = llama.serve(api_key=["hostile", "good"])
    host, _, port = url.removeprefix("http://").partition(":")
    with ExitStack() as stack:
        asked = []
        for letter in "abcdefghij":  # each takes half a second or more
            schema = {
                "properties": {f"{letter}{index}": {"type": "integer"} for index in range(1900)}
            }
            body = json.dumps(
                {
                    "model": "tiny",
                    "prompt": TEXT,
                    "max_tokens": 1,
                    "structured_outputs": {"json": schema},
                }
            )
            connection = stack.enter_context(
                closing(http.client.HTTPConnection(host, int(port), timeout=180))
            )
            connection.request(
                "POST",
                "/v1/completions",
                body,
                {"Authorization": "Bearer hostile", "Content-Type": "application/json"},
            )
            asked.append(connection)
        until(lambda: llama.apps[url].server.inflight.count == len(asked))
        fields = {
            "model": "tiny",
            "prompt": TEXT,
            "max_tokens": 9,
            "structured_outputs": {"regex": "[a-d]{2}"},
        }
        answer = post(url, "/v1/completions", fields, Authorization="Bearer good")
        assert re.fullmatch("[a-d]{2}", answer.json()["choices"][0]["text"])
        # In the order of coming all of them would have been compiled first.
        answered, _, _ = select.select([connection.sock for connection in asked], [], [], 0)
        assert len(answered) < len(asked)


def test_what_is_wrong_with_a_schema_is_said_by_the_field_it_came_in(url: str) -> None:
    schema = {"name": "x", "schema": {"type": "objekt"}}
    body = {
        "model": "tiny",
        "messages": ASK,
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    response = post(url, "/v1/chat/completions", body)
    assert response.status_code == 400
    said = error(response)
    assert said["param"] == "response_format"
    assert "objekt" in said["message"]


UNIQUE = {
    "type": "object",
    "properties": {"tags": {"type": "array", "uniqueItems": True, "maxItems": 0}},
    "required": ["tags"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("asked", "path"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": UNIQUE}}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": UNIQUE}}},
            "response_format",
        ),
        ({"structured_outputs": {"json": UNIQUE}}, "structured_outputs"),
    ],
)  # fmt: skip
def test_what_a_schema_asserts_and_no_grammar_holds_is_refused_with_its_place(
    url: str, asked: dict[str, Any], path: str
) -> None:
    prompts: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": {"messages": ASK},
    }
    for route, prompt in prompts.items():
        response = post(url, route, {"model": "tiny", **prompt, **asked})
        assert (response.status_code, error(response)["param"]) == (400, path)
        said = error(response)["message"]
        assert "a grammar cannot hold uniqueItems, at #/properties/tags/uniqueItems" in said


def test_a_schema_that_is_not_strict_or_says_lenient_is_held_as_far_as_possible(
    url: str, blanks: dict[str, float]
) -> None:
    loose = {"name": "x", "strict": False, "schema": UNIQUE}
    lenient = {**UNIQUE, "x-guidance": {"lenient": True}}
    kinds: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": loose}},
        {"structured_outputs": {"json": lenient}},
    ]
    for asked in kinds:
        body = {"model": "tiny", "messages": ASK, "logit_bias": blanks, **asked}
        answer = post(url, "/v1/chat/completions", body).json()
        assert json.loads(answer["choices"][0]["message"]["content"]) == {"tags": []}


def test_annotations_of_a_strict_schema_are_ignored(url: str, blanks: dict[str, float]) -> None:
    names = ["password", "path", "binary", "regex", "ipv4network", "byte", "url", "phone"]
    properties = {
        "kind": {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "discriminator": {}},
        **{name: {"const": "x", "format": name, "deprecated": True} for name in names},
    }
    schema = {
        "$schema": "https://json-schema.org/draft/next/schema",
        "$id": "https://schemas.test/x",
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        "propertyNames": {"type": "string"},
        "$defs": {"A": {"const": "a", "default": 10**30}, "B": {"const": "b", "examples": None}},
    }
    wanted = {"name": "x", "strict": True, "schema": schema}
    body = {
        "model": "tiny",
        "messages": ASK,
        "logit_bias": blanks,
        "max_tokens": 300,
        "response_format": {"type": "json_schema", "json_schema": wanted},
    }
    answer = post(url, "/v1/chat/completions", body).json()
    said = json.loads(answer["choices"][0]["message"]["content"])
    assert said.pop("kind") in ("a", "b")
    assert said == dict.fromkeys(names, "x")


def test_a_bad_word_is_never_said(llama: Fleet, client: Any) -> None:
    ids = Renderer.load(llama.path).encode("lantern", add_special_tokens=False)
    assert len(ids) > 1
    options: dict[str, Any] = {
        "model": "tiny",
        "prompt": TEXT,
        "max_tokens": 200,
        "temperature": 1.0,
        "seed": 1,
        "extra_body": {"allowed_token_ids": list(ids)},
    }
    assert "lantern" in client.completions.create(**options).choices[0].text
    options["extra_body"]["bad_words"] = ["lantern"]
    assert "lantern" not in client.completions.create(**options).choices[0].text
