"""Which parser reads an answer, where it begins to read, and what a grammar binds."""

import json
from typing import Any

import pytest

from inlay.api.generation.output_format import ModelFormats, output_format_for
from inlay.api.generation.tools import ToolUse
from inlay.http import FrontendSettings
from inlay.messages.prompt import Buffer, Prompt, Rows, Tokens
from inlay.messages.request import Grammar
from inlay.render import Begins, ParsedOutput, Renderer
from tests.render.directories import qwen_like

TREE = {
    "$ref": "#/$defs/node",
    "$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}}},
}


def tool(name: str, parameters: object = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("grow", TREE), tool("ring")]
NAMED = {"type": "function", "function": {"name": "grow"}}
JSON = Grammar("json_object")


def said(
    choice: object, text: str, *, prompt: str = "x", grammar: Grammar | None = None, **settings: Any
) -> Any:
    """(content, reasoning, calls, grammar) of an answer `text` to `prompt`."""
    renderer = Renderer.load(qwen_like())
    forms = ModelFormats.of(FrontendSettings(**settings), renderer)
    read, bound = output_format_for(
        forms,
        renderer,
        Prompt.of(Tokens(renderer.encode(prompt))),
        ToolUse.of(TOOLS, choice, None),
        grammar,
    )
    parser = read.parser()
    output = ParsedOutput.of(parser.push(text) + parser.flush())
    calls = [(call.name, call.arguments) for call in output.tool_calls]
    return output.content, output.reasoning, calls, bound


def followed(schema: Any, part: Any) -> Any:
    """What a part of `schema` stands for, behind references."""
    while "$ref" in part:
        found = schema
        for step in part["$ref"].removeprefix("#/").split("/"):
            found = found[step]
        part = found
    return part


def test_a_required_call_is_bound_to_the_tools_with_references_that_lead_where_they_did() -> None:
    content, reasoning, calls, grammar = said("required", '[{"name": "ring", "parameters": {}}]')
    assert (content, reasoning, calls) == ("", "", [("ring", "{}")])
    schema = json.loads(grammar.source)
    assert (grammar.kind, grammar.after, schema["minItems"], "maxItems" in schema) == (
        "json_schema",
        (),
        1,
        False,
    )
    grow, ring = schema["items"]["anyOf"]
    assert ring["properties"]["name"] == {"type": "string", "enum": ["ring"]}
    assert followed(schema, ring["properties"]["parameters"]) == {
        "type": "object",
        "properties": {},
    }
    tree = grow["properties"]["parameters"]
    # An error of the grammar's library names the tool by its place.
    assert tree["$ref"].startswith("#/$defs/grow")
    assert followed(schema, followed(schema, tree)["properties"]["next"]) == followed(schema, tree)
    one = ToolUse.of(TOOLS, "required", False).grammar
    assert one is not None
    assert json.loads(one.source)["maxItems"] == 1


def test_a_named_call_is_bound_to_its_arguments() -> None:
    content, _, calls, grammar = said(NAMED, '{"next": {}}')
    assert (content, calls) == ("", [("grow", '{"next": {}}')])
    schema = json.loads(grammar.source)
    tree = followed(schema, schema)
    assert tree["properties"].keys() == {"next"}
    assert followed(schema, tree["properties"]["next"]) == tree


@pytest.mark.parametrize("choice", ["required", NAMED, "none"])
def test_a_grammar_binds_behind_reasoning_that_the_prompt_leaves_open(choice: object) -> None:
    end = Renderer.load(qwen_like()).token_id("</think>")
    text = '[{"name": "ring", "parameters": {}}]' if choice == "required" else "{}"
    content, reasoning, calls, grammar = said(
        choice, f"Hm.\n</think>\n{text}", prompt="<think>\n", grammar=JSON
    )
    assert (reasoning, grammar.after) == ("Hm.", (end,))
    assert (content, len(calls)) == (("{}", 0) if choice == "none" else ("", 1))
    for prompt in ("x", "<think>\n\n</think>\n\n"):
        assert said(choice, text, prompt=prompt, grammar=JSON)[3].after == ()


def test_channels_leave_the_grammar_to_the_final_one() -> None:
    content, reasoning, _, grammar = said(
        "none",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>{}",
        grammar=JSON,
        reasoning_parser="openai_gptoss",
    )
    assert (content, reasoning) == ("{}", "Hm.")
    assert Renderer.load(qwen_like()).decode(grammar.after) == "<|channel|>final<|message|>"


def test_forms_are_the_models_unless_flags_name_others() -> None:
    call = '<tool_call>{"name": "ring", "arguments": {}}</tool_call>'
    thought = f"<think>Hm.</think>{call}"
    assert said("auto", thought)[:3] == ("", "Hm.", [("ring", "{}")])
    assert said("auto", thought, reasoning_parser="none")[:3] == (
        "<think>Hm.</think>",
        "",
        [("ring", "{}")],
    )
    assert said("auto", thought, tool_call_parser="none")[:3] == (call, "Hm.", [])
    assert said("auto", "Hm.", reasoning_parser="deepseek_r1")[:3] == ("", "Hm.", [])


def test_rows_at_the_end_of_a_prompt_open_nothing() -> None:
    renderer = Renderer.load(qwen_like())
    forms = ModelFormats.of(FrontendSettings(), renderer)
    rows = Rows(Buffer(b"\0" * 16), "float32", (2, 2))
    read, _ = output_format_for(forms, renderer, Prompt.of(rows), ToolUse(), None)
    assert read.reasoning is not None
    assert read.reasoning.begins is Begins.OPEN


def test_a_continued_message_goes_on_inside_its_own_reasoning() -> None:
    renderer = Renderer.load(qwen_like())
    forms = ModelFormats.of(FrontendSettings(), renderer)
    for content, begins in (
        ("<think>Hm", Begins.INSIDE),
        ([{"type": "text", "text": "<think>Hm"}, "</think>It"], Begins.BEHIND),
        (None, Begins.OPEN),
    ):
        read, _ = output_format_for(
            forms,
            renderer,
            Prompt.of(Tokens([5])),
            ToolUse(),
            None,
            continued=[{"role": "assistant", "content": content}],
        )
        assert read.reasoning is not None
        assert read.reasoning.begins is begins
