"""Real tool definitions: their grammars are sampled, and what comes out is valid and read back."""

import json
import math
import random
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from inlay.api.generation.tools import ToolUse
from inlay.base.errors import InvalidRequestError
from inlay.engine.grammar.matchers import compiled, matcher_of
from inlay.engine.grammar.source import source_of
from inlay.render import ParsedOutput
from inlay.render.formats import TOOL_FORMS, ToolForm
from inlay.render.json_schema import TYPES, SchemaTypes, part_at, place_of, type_of
from inlay.render.parsers.calls import CallsParser, RequiredParser, Tools
from tests.tool_definitions import HABITS, PYDANTIC, TOOLS

SAMPLES = 6
LOOSENED = {*HABITS, "two_patterns", "dependent", "dashboards", "zod_email_with_look_ahead"}
"""Definitions whose assertions are not all held."""

REFUSED_IF_STRICT = {
    "pydantic_collections": "uniqueItems, at #/properties/tags/uniqueItems",
    "zod_email_with_look_ahead": "look-around, at #/properties/to/pattern",
    "zod_set": "uniqueItems, at #/properties/tags/uniqueItems",
    "dashboards": "contains, at #/properties/panels/contains",
    "dependent": "dependentRequired, at #/dependentRequired",
    "at_least_one": "oneOf constraints are not supported",
    "two_patterns": "are not disjoint",
    "python_types": "type 'int' is none of JSON's",
    "numbers_as_text": "minLength must be a number of 64 bits, got '1', at #/properties/a/minLength",
    "empty_enum": "enum must be a list of values, got a list of 0, at #/properties/a/enum",
    "enum_of_another_type": "'a' is unsatisfiable",
    "dangling": "is named by $ref '#/$defs/Gone', at #/properties/a/$ref",
    "schemas_as_text": "got 'string', at #/properties/a",
    "huge_numbers": "at #/properties/a/maximum",
    "too_costly": "has 1000000 states; at most 20000 are allowed, at #/$defs/too_costly/properties/a",
    "no_expression": "unclosed group",
    "a_word_boundary": "\\b, at #/properties/a/pattern",
    "circular_with_siblings": "circular references with sibling keys",
}
"""What is said about each that cannot be held in full."""


def tool(name: str, parameters: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def sampled(matcher: LLMatcher, rng: random.Random) -> str:
    """An output at random, byte by byte; what closes is likelier the longer it is."""
    output = bytearray()
    while not matcher.is_stopped():
        mask = matcher.compute_bitmask()
        allowed = [id_ for id_ in range(256) if mask[id_ // 8] >> (id_ % 8) & 1]
        if not allowed or (matcher.is_accepting() and rng.random() < 0.5):
            break
        plain = [id_ for id_ in allowed if 32 <= id_ < 127] or allowed
        closing = [id_ for id_ in plain if chr(id_) in '"]}']
        again = closing and rng.random() < (0.3 if len(output) < 300 else 0.95)
        id_ = rng.choice(closing if again else plain)
        matcher.consume_token(id_)
        output.append(id_)
        assert len(output) < 20_000
    assert not matcher.is_error(), matcher.get_error()
    return output.decode()


def violations(value: Any, schema: Any, root: Any) -> Iterator[str]:
    """What a value violates of the keywords that grammars hold."""
    if schema is False:
        yield "false"
    if not isinstance(schema, Mapping):
        return
    if (place := place_of(root, schema.get("$ref"))) is not None:
        yield from violations(value, part_at(root, place), root)
    kind = type_of(value)
    names = schema.get("type", [*TYPES])
    names = names if isinstance(names, list) else [names]
    if kind not in names and not (kind == "integer" and "number" in names):
        yield f"type {names}: {value!r}"
    if "const" in schema and value != schema["const"]:
        yield f"const: {value!r}"
    if value not in schema.get("enum", [value]):
        yield f"enum: {value!r}"
    for part in schema.get("allOf", ()):
        yield from violations(value, part, root)
    for keyword in ("anyOf", "oneOf"):
        parts = schema.get(keyword)
        if parts and all(any(violations(value, part, root)) for part in parts):
            yield f"{keyword}: {value!r}"
    if isinstance(value, dict):
        yield from _of_object(value, schema, root)
    elif isinstance(value, list):
        yield from _of_list(value, schema, root)
    elif isinstance(value, str):
        yield from _of_text(value, schema)
    elif kind in ("integer", "number"):
        yield from _of_number(value, schema)


def _of_object(value: dict[str, Any], schema: Mapping[str, Any], root: Any) -> Iterator[str]:
    if not schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", math.inf):
        yield f"{len(value)} properties"
    for name in schema.get("required", ()):
        if name not in value:
            yield f"required: {name}"
    properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    others = schema.get("additionalProperties", True)
    if schema.get("unevaluatedProperties") is False:
        others = False
    for name, item in value.items():
        matched = [part for pattern, part in patterns.items() if re.search(pattern, name)]
        if name in properties:
            matched.append(properties[name])
        for part in matched or [others]:
            yield from (f"{name}: {each}" for each in violations(item, part, root))
        named = schema.get("propertyNames", True)
        if not (isinstance(named, Mapping) and named.get("format")):
            yield from violations(name, named, root)


def _of_list(value: list[Any], schema: Mapping[str, Any], root: Any) -> Iterator[str]:
    first, others = schema.get("prefixItems", []), schema.get("items", True)
    if isinstance(others, list):
        first, others = others, True
    for index, item in enumerate(value):
        part = first[index] if index < len(first) else others
        yield from (f"[{index}]: {each}" for each in violations(item, part, root))
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", math.inf):
        yield f"{len(value)} items"


def _of_text(value: str, schema: Mapping[str, Any]) -> Iterator[str]:
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf):
        yield f"{len(value)} characters"
    if not re.search(schema.get("pattern", ""), value):
        yield f"pattern: {value!r}"


def _of_number(value: float, schema: Mapping[str, Any]) -> Iterator[str]:
    above, below = (schema.get(f"exclusive{end}") for end in ("Minimum", "Maximum"))
    least, most = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    if not least <= value <= most or (above is True and value <= least):
        yield f"{value} is out of bounds"
    if above not in (None, True) and value <= above:
        yield f"{value} is not above {above}"
    if below not in (None, True) and value >= below:
        yield f"{value} is not below {below}"
    if "multipleOf" in schema and value % schema["multipleOf"]:
        yield f"{value} is no multiple"


@pytest.mark.parametrize("name", TOOLS)
def test_what_is_sampled_of_a_tool_that_is_not_strict_is_valid_and_read_back_with_its_types(
    name: str, tokenizer: LLTokenizer
) -> None:
    use = ToolUse.of([tool("ring", {}), tool(name, TOOLS[name])], "required", False)
    assert use.grammar is not None
    matcher = matcher_of(tokenizer, source_of(use.grammar))
    rng = random.Random(name)
    for _ in range(SAMPLES):
        text = sampled(matcher.deep_copy(), rng)
        ((called, arguments),) = _read(RequiredParser(Tools()), text)
        assert called in ("ring", name)
        given = use.schemas[called]
        if called not in LOOSENED:
            assert list(violations(arguments, given, given)) == [], text
        for form in ("hermes", "llama3_json", "mistral", "deepseek_v31", "qwen3_coder"):
            written = _written(form, called, arguments, given)
            if written is not None:
                parser = TOOL_FORMS[form]
                assert isinstance(parser, ToolForm)
                made = parser.parser(Tools(dict(use.schemas)))
                assert list(_read(made, written)) == [(called, arguments)], (form, written)


def _read(parser: CallsParser, text: str) -> Iterator[tuple[str | None, Any]]:
    output = ParsedOutput.of(parser.push(text) + parser.flush())
    assert output.content == ""
    for call in output.tool_calls:
        yield call.name, json.loads(call.arguments)


def _written(form: str, name: str, arguments: Any, schema: Mapping[str, Any]) -> str | None:
    """A call as models write it; None if its text could be another call as well."""
    said = json.dumps(arguments)
    if "Infinity" in said:  # 1e999
        return None
    if form == "qwen3_coder":
        return _as_xml(name, arguments, SchemaTypes(schema))
    return {
        "hermes": f'<tool_call>\n{{"name": "{name}", "arguments": {said}}}\n</tool_call>',
        "llama3_json": f'{{"name": "{name}", "parameters": {said}}}',
        "mistral": f"[TOOL_CALLS]{name}{said}",
        "deepseek_v31": f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{said}<｜tool▁call▁end｜>",
    }[form]


def _as_xml(name: str, arguments: Any, types: SchemaTypes) -> str | None:
    parts = []
    for key, value in arguments.items():
        allowed = types.of_property(key)
        if allowed is None or "<" in key + str(value) or ">" in key:
            return None  # it is not declared, or holds what ends it
        text = value if isinstance(value, str) else json.dumps(value)
        if isinstance(value, str) and allowed != {"string"} and _is_json(text):
            return None
        parts.append(f"<parameter={key}>\n{text}\n</parameter>\n")
    return f"<tool_call>\n<function={name}>\n{''.join(parts)}</function>\n</tool_call>"


def _is_json(text: str) -> bool:
    try:
        return json.loads(text.strip().lower() or "0") is not None or True
    except ValueError:
        return text.strip().lower() == "none"


@pytest.mark.parametrize("name", TOOLS)
def test_of_a_strict_tool_all_is_held_or_the_error_names_the_tool_and_the_place(
    name: str, tokenizer: LLTokenizer
) -> None:
    def made(choice: object) -> LLMatcher:
        use = ToolUse.of([tool("ring", {}), tool(name, TOOLS[name], strict=True)], choice, False)
        assert use.grammar is not None
        return compiled(tokenizer, "json_schema", source_of(use.grammar))

    choices = ["required", {"type": "function", "function": {"name": name}}]
    for choice in choices:
        if name in REFUSED_IF_STRICT:
            with pytest.raises(InvalidRequestError) as refused:
                made(choice)
            assert REFUSED_IF_STRICT[name] in refused.value.message
            assert name in refused.value.message
        else:
            made(choice)


def test_one_tool_among_many_that_is_no_use_does_not_hold_up_the_others(
    tokenizer: LLTokenizer,
) -> None:
    use = ToolUse.of(
        [tool(name, parameters) for name, parameters in TOOLS.items()], "required", False
    )
    assert use.grammar is not None
    source = source_of(use.grammar)
    held = json.loads(source)["grammars"][0]["json_schema"]["$defs"]
    assert held["pydantic_numbers"]["properties"]["age"] == {
        "type": "integer", "minimum": 0, "exclusiveMaximum": 150,
    }  # fmt: skip
    assert held["too_costly"]["properties"] == {"a": {"type": "string"}, "b": {"type": "integer"}}
    assert held["circular_with_siblings"]["$defs"]["N"]["properties"]["n"]["$ref"]
    matcher = matcher_of(tokenizer, source)
    rng = random.Random(5)
    called = {
        next(_read(RequiredParser(Tools()), sampled(matcher.deep_copy(), rng)))[0] for _ in range(8)
    }
    assert called <= TOOLS.keys()


def test_there_are_many_definitions_and_pydantic_made_some() -> None:
    assert len(TOOLS) >= 60
    assert any("discriminator" in json.dumps(schema) for schema in PYDANTIC.values())


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
    | st.sampled_from(["object", "string", "int", "#/$defs/a", "#", "^a", "(?=a)", "(a", "date", "x"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            [
                "type", "properties", "items", "required", "$ref", "$defs", "anyOf", "oneOf", "allOf", "enum", "const", "not",
                "propertyNames", "additionalProperties", "patternProperties", "pattern", "format", "minLength", "minProperties",
                "maximum", "prefixItems", "uniqueItems", "unevaluatedProperties", "if", "$id", "$anchor", "a", "x",
            ]
        ), inner, max_size=4,
    ),
    max_leaves=16,
)  # fmt: skip


@given(
    st.dictionaries(st.sampled_from(["type", "properties", "$defs", "$ref", "allOf"]), _values),
    st.booleans(),
)
def test_whatever_a_tool_that_is_not_strict_has_for_a_schema_it_can_be_called(
    schema: dict[str, Any], named: bool
) -> None:
    tools = [tool("ring", {}), tool("f", schema), tool("s", {}, strict=True)]
    choice = {"type": "function", "function": {"name": "f"}} if named else "required"
    use = ToolUse.of(tools, choice, None)
    assert use.grammar is not None
    compiled(LLTokenizer("byte"), "json_schema", source_of(use.grammar))
    with suppress(InvalidRequestError):
        ToolUse.of([tool("f", schema, strict=True)], "required", None)


def test_what_is_said_of_many_is_not_written_out_for_each() -> None:
    deep: Any = {"type": "integer"}
    for _ in range(10):
        names = {"enum": [f"n{index}" for index in range(20)]}
        deep = {"type": "object", "propertyNames": names, "additionalProperties": deep}
    use = ToolUse.of([tool("f", {"properties": {"a": deep}})], "required", None)
    assert use.grammar is not None
    assert len(use.grammar.source) < 100_000
    wide = {f"p{index}": {"$ref": "#/$defs/w"} for index in range(1000)}
    part = {"type": "object", "required": list(wide), "properties": wide}
    either = {"oneOf": [{"$ref": "#/$defs/w"}, dict(part)], "$defs": {"w": part}}
    # Without a bound comparing them takes hours.
    assert ToolUse.of([tool("f", either, strict=True)], "required", None).grammar is not None
