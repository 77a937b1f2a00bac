"""Types of parameters that are written without any, as `qwen3_coder` reads them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.render import ParsedOutput
from inlay.render.formats import TOOL_FORMS, ToolForm
from inlay.render.json_schema import TYPES, SchemaTypes, place_of, pointer
from inlay.render.parsers.calls import Tools

PAGE = {"type": "object", "properties": {"page_id": {"type": "string"}}}
DEFS: dict[str, Any] = {
    "Page": PAGE,
    "Alias": {"$ref": "#/$defs/Page"},
    "Limit": {"type": "integer", "minimum": 1},
    "Level": {"enum": [1, 2, 3]},
    "Mode": {"enum": ["1", "2"]},
    "Node": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "array"}]},
    "Loop": {"$ref": "#/$defs/Loop"},
    "a/b c": {"type": "boolean"},
    "Anchored": {"$anchor": "anchored", "type": "number"},
    "Named": {"$id": "https://schemas.test/named", "type": "integer"},
}


def argument(schema: Any, text: str, **more: Any) -> Any:
    """What a tool gets for its parameter `a` when the model writes `text`."""
    tool = {"type": "object", "properties": {"a": schema}, "$defs": DEFS, **more}
    written = f"<tool_call><function=f><parameter=a>\n{text}\n</parameter></function></tool_call>"
    form = TOOL_FORMS["qwen3_coder"]
    assert isinstance(form, ToolForm)
    for pieces in ([written], list(written)):
        parser = form.parser(Tools({"f": tool}))
        deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.flush()
        (call,) = ParsedOutput.of(deltas).tool_calls
        found = json.loads(call.arguments)
        assert set(found) == {"a"}
    return found["a"]


OBJECT, LIST = '{"page_id": "7"}', '["x", 1]'


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"$ref": "#/$defs/Page"}, OBJECT, {"page_id": "7"}),
        ({"$ref": "#/$defs/Alias", "description": "of it"}, OBJECT, {"page_id": "7"}),
        ({"allOf": [{"$ref": "#/$defs/Page"}], "default": None}, OBJECT, {"page_id": "7"}),
        ({"allOf": [{"type": ["string", "object"]}, {"type": "object"}]}, OBJECT, {"page_id": "7"}),
        ({"anyOf": [{"$ref": "#/$defs/Page"}, {"type": "null"}]}, OBJECT, {"page_id": "7"}),
        ({"anyOf": [{"$ref": "#/$defs/Page"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"$ref": "#/$defs/Page"}, {"type": "string"}]}, OBJECT, {"page_id": "7"}),
        ({"anyOf": [{"$ref": "#/$defs/Page"}, {"type": "string"}]}, "12", "12"),
        ({"oneOf": [{"$ref": "#/$defs/Limit"}, {"type": "string"}]}, "12", 12),
        ({"oneOf": [{"$ref": "#/$defs/Limit"}, {"type": "string"}]}, "1.5", "1.5"),
        ({"properties": {"page_id": {"type": "string"}}}, OBJECT, {"page_id": "7"}),
        ({"additionalProperties": {"type": "string"}}, OBJECT, {"page_id": "7"}),
        ({"prefixItems": [{"type": "string"}, {"type": "integer"}]}, LIST, ["x", 1]),
        ({"items": {}}, LIST, ["x", 1]),
        ({"$ref": "#/$defs/Limit"}, "12", 12),
        ({"$ref": "#/$defs/Level"}, "2", 2),
        ({"$ref": "#/$defs/Mode"}, "2", "2"),
        ({"const": 5}, "5", 5),
        ({"const": "5"}, "5", "5"),
        ({"const": {"a": 1}}, '{"a": 1}', {"a": 1}),
        ({"enum": [True, False]}, "True", True),
        ({"enum": ["on", None]}, "None", None),
        ({"enum": ["on", None]}, "on", "on"),
        ({"type": "string", "enum": ["null"]}, "null", "null"),
        ({"type": ["integer", "null"]}, "7", 7),
        ({"type": ["string", "null"]}, "7", "7"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": "number"}, "7", 7),
        ({"type": "integer"}, "7.0", 7.0),
        ({"type": "boolean"}, "FALSE", False),
        ({"type": "int"}, "7", 7),
        ({"type": "dict"}, OBJECT, {"page_id": "7"}),
        ({"minLength": 1}, "12", "12"),
        ({"format": "date"}, "2024", "2024"),
        # No type at all: any value.
        ({}, OBJECT, {"page_id": "7"}),
        ({"description": "a value"}, "5", 5),
        ({"description": "a value"}, "true", True),
        ({"description": "a value"}, "null", None),
        ({"description": "a value"}, "five", "five"),
        ({"description": "a value"}, '"five"', '"five"'),
        ({"description": "a value"}, "NaN", "NaN"),
        (True, LIST, ["x", 1]),
        ({"$ref": "#/$defs/None"}, LIST, ["x", 1]),
        ({"$ref": "https://elsewhere.test/x"}, "five", "five"),
        ({"$ref": "#/$defs/Loop"}, LIST, ["x", 1]),
        ({"$ref": "#/$defs/Node"}, LIST, ["x", 1]),
        ({"$ref": "#/$defs/a~1b%20c"}, "true", True),
        ({"$ref": "#anchored"}, "1.5", 1.5),
        ({"$ref": "https://schemas.test/named"}, "3", 3),
        ({"type": "array", "items": {"$ref": "#/$defs/Page"}}, f"[{OBJECT}]", [{"page_id": "7"}]),
        (False, "x", "x"),
    ],
)  # fmt: skip
def test_a_value_has_the_type_that_the_schema_gives(
    schema: Any, text: str, expected: object
) -> None:
    found = argument(schema, text)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    "more",
    [
        {"properties": None, "$ref": "#/$defs/Arguments"},
        {"properties": {}, "allOf": [{"$ref": "#/$defs/Arguments"}]},
        {"properties": {}, "anyOf": [{"$ref": "#/$defs/Arguments"}, {"properties": {"b": {}}}]},
        {"properties": {}, "additionalProperties": {"$ref": "#/$defs/Page"}},
    ],
)
def test_a_parameter_may_be_declared_behind_the_schemas_own_reference(more: Any) -> None:
    arguments = {"type": "object", "properties": {"a": {"$ref": "#/$defs/Page"}}}
    more["$defs"] = {**DEFS, "Arguments": arguments}
    assert argument({}, OBJECT, **more) == {"page_id": "7"}


def test_a_parameter_that_the_schema_does_not_declare_is_a_string() -> None:
    assert argument({}, "5", properties={"b": {"type": "integer"}}) == "5"


def test_many_references_to_the_same_parts_are_read_once() -> None:
    definitions: dict[str, Any] = {"d0": {"type": "integer"}}
    for level in range(1, 300):
        both = {"$ref": f"#/$defs/d{level - 1}"}
        definitions[f"d{level}"] = {"anyOf": [both, dict(both)], "allOf": [dict(both)]}
    types = SchemaTypes({"$defs": definitions})
    assert types.of({"$ref": "#/$defs/d20"}) == {"integer"}
    assert types.of({"$ref": "#/$defs/d299"}) <= TYPES


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.just("#/$defs/a"),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["type", "$ref", "anyOf", "allOf", "enum", "const", "properties", "$defs", "a", "items"]),
        inner, max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@given(_json, st.text(max_size=6))
def test_whatever_stands_in_a_schema_arguments_are_json(schema: Any, text: str) -> None:
    argument(schema, text.replace("<", ""), **({"$defs": {"a": schema}}))
    assert SchemaTypes({"properties": {"a": schema}}).of(schema) <= TYPES


def test_a_reference_leads_to_its_part_or_nowhere() -> None:
    root = {"$id": "https://schemas.test/a", "items": [{"type": "null"}], "$defs": {"a/b %": {}}}
    assert place_of(root, "https://schemas.test/a#/items/0") == ("items", "0")
    assert place_of(root, "#") == ()
    assert place_of(root, pointer(("$defs", "a/b %"))) == ("$defs", "a/b %")
    for nowhere in ("#/items/1", "#/items/00000000009", "#/items/x", "#/a/b", "#b", "c", 5, None):
        assert place_of(root, nowhere) is None


def test_parts_are_apart_only_where_that_is_certain() -> None:
    def keyed(value: object, **more: Any) -> dict[str, Any]:
        properties = {"k": {"const": value}}
        return {"type": "object", "properties": properties, "required": ["k"], **more}

    root = {"$defs": {"a": keyed("a"), "b": keyed("b"), "free": {"type": "object"}}}
    a, b, free = ({"$ref": f"#/$defs/{name}"} for name in root["$defs"])

    def apart(choices: list[Any]) -> bool:
        whole = {**root, "oneOf": choices}
        return SchemaTypes(whole, hints=False).apart(choices)

    assert apart([a, b, {"type": "string"}, {"type": ["null", "integer"]}])
    assert apart([{"enum": [0, "x"]}, {"enum": [False, "y"]}, {"const": []}])
    assert apart([a, keyed("c", required=[])])
    cases: list[list[Any]] = [
        [a, a],
        [a, free],
        [{"type": "number"}, {"type": "integer"}],
        [{"enum": [1, 2]}, {"const": 2.0}],
        [{"properties": {"k": {}}}, {"type": "string"}],
        [keyed("a", required=[]), keyed("b", required=[])],
        [keyed("a", type=["object", "null"]), keyed("b", type=["object", "null"])],
        [True, {"type": "string"}],
    ]
    for overlapping in cases:
        assert not apart(overlapping)
    many = [{"enum": [*range(2000 * index, 2000 * index + 2000)]} for index in range(3)]
    assert not apart(many)  # not compared for so long
