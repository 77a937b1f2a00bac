"""Grammars that are cheap by their count alone, as most are. They need no trial."""

import json
from typing import Any

from inlay.engine.grammar.regex import cost_of_regex
from inlay.request import Grammar

MAX_SOURCE = 8 * 1024
"""Characters."""

MAX_PROPERTIES = 200
"""Of all objects together."""

MAX_COST = 500
"""States and transitions of a regular expression.

Twenty times as many states visited on the way to its shortest match.
"""

_NOTES = {
    "$schema",
    "$id",
    "title",
    "description",
    "default",
    "examples",
    "$comment",
    "readOnly",
    "writeOnly",
}
_VALUES = {"type", "required", "enum", "const", "minimum", "maximum", "minLength", "maxLength"}
_SCHEMAS = {"items", "additionalProperties"}
_NAMED = {"properties", "$defs", "definitions"}


def is_cheap(grammar: Grammar) -> bool:
    """True where compiling it takes less than 0.1 s.

    Raises:
        InvalidRequestError: it is nested too deeply.
    """
    if grammar.kind == "json_object":
        return True
    if len(grammar.source) > MAX_SOURCE:
        return False
    if grammar.kind == "choice":
        return True
    if grammar.kind == "regex":
        cost = cost_of_regex(grammar.source)
        return max(cost.states, cost.transitions, cost.width * cost.shortest // 20) <= MAX_COST
    if grammar.kind != "json_schema":
        return False
    try:
        return _properties(json.loads(grammar.source)) <= MAX_PROPERTIES
    except (ValueError, RecursionError):
        return False


def _properties(schema: Any) -> float:
    """Properties of a schema that has nothing in it but what is known to be cheap.

    Infinitely many of any other.
    """
    if not isinstance(schema, dict):
        return 0
    count = 0.0
    for key, value in schema.items():
        if key in _SCHEMAS:
            count += _properties(value)
        elif key in _NAMED and isinstance(value, dict):
            count += sum(map(_properties, value.values())) + (
                len(value) if key == "properties" else 0
            )
        elif key == "anyOf" and isinstance(value, list):
            count += sum(map(_properties, value))
        elif key != "$ref" and key not in _NOTES | _VALUES:
            return float("inf")
    return count
