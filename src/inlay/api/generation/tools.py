"""Tools of a request, and whether the model may, must or must not call one."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

import msgspec

from inlay.api.generation.schemas import held
from inlay.base.errors import InvalidRequestError
from inlay.http.quoting import shown_at, shown_value
from inlay.messages.request import MAX_GRAMMAR, Grammar
from inlay.render.json_schema import pointer
from inlay.render.parsers.calls import CallsParser, NamedParser, RequiredParser, Tools

MAX_NAME = 256
"""Characters in a function's name at most."""

MAX_TOOLS = 1024

_CHOICES = "'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}"


class ToolChoice(Enum):
    """Kind of `tool_choice`."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of a request, and how they may be called.

    Attributes:
        choice: kind of `tool_choice`.
        schemas: JSON Schema of each function's arguments, by name.
        name: name of the function that must be called, if one is named.
        parallel: True if an answer may have several calls.
        grammar: grammar of calls that must be made: a list of objects with name and parameters, or
            the arguments of the named function. None if none must be made.
    """

    choice: ToolChoice = ToolChoice.NONE
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    name: str | None = None
    parallel: bool = True
    grammar: Grammar | None = None

    @classmethod
    def of(
        cls,
        tools: Sequence[Mapping[str, Any]] | None,
        tool_choice: object,
        parallel_tool_calls: bool | None,
    ) -> "ToolUse":
        """Read and check the tools of a chat. The caller has checked the nesting.

        Args:
            tools: `{"type": "function", "function": {"name", "description", "parameters",
                "strict"}}` each.
            tool_choice: "none", "auto", "required", `{"type": "function", "function": {"name"}}`,
                or None for "auto".
            parallel_tool_calls: False allows at most one call.

        Raises:
            InvalidRequestError: malformed tools or `tool_choice`.
        """
        if tools is not None and len(tools) > MAX_TOOLS:
            raise InvalidRequestError(
                f"tools has {len(tools)} entries; at most {MAX_TOOLS}", param="tools"
            )
        functions = [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())]
        schemas = {name: schema for name, schema, _ in functions}
        strict = {name for name, _, is_strict in functions if is_strict}
        parallel = parallel_tool_calls is not False
        if tool_choice in (None, "none"):
            choice = ToolChoice.AUTO if schemas and tool_choice is None else ToolChoice.NONE
            return cls(choice, schemas, None, parallel)
        if not schemas:
            raise InvalidRequestError(
                "tool_choice is only allowed when tools are given", param="tool_choice"
            )
        if tool_choice == "auto":
            return cls(ToolChoice.AUTO, schemas, None, parallel)
        if tool_choice == "required":
            use = cls(ToolChoice.REQUIRED, schemas, None, parallel)
        else:
            use = cls(ToolChoice.NAMED, schemas, _named(tool_choice, schemas), parallel)
        return replace(use, grammar=_forced(use, strict))

    def forced_parser(self, tools: Tools) -> CallsParser:
        """Return the parser of an output that `grammar` binds."""
        return RequiredParser(tools) if self.name is None else NamedParser(tools, self.name)


NO_TOOLS = ToolUse()
"""The tools of a request without any."""


def _function(tool: Mapping[str, Any], where: str) -> tuple[str, Mapping[str, Any], bool]:
    """Return the name and the schema of one tool, and True if it is strict."""
    if tool.get("type") != "function":
        raise InvalidRequestError(
            f"{where}.type must be 'function', got {shown_at(tool, 'type')}", param=f"{where}.type"
        )
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequestError(
            f"{where}.function must be an object, got {shown_at(tool, 'function')}",
            param=f"{where}.function",
        )
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise InvalidRequestError(
            f"{where}.function.name must be a string of 1 to {MAX_NAME} characters, got "
            f"{shown_at(function, 'name')}",
            param=f"{where}.function.name",
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidRequestError(
            f"{where}.function.parameters must be a JSON Schema, an object, got "
            f"{shown_value(parameters)}",
            param=f"{where}.function.parameters",
        )
    strict = function.get("strict") is True
    said = {key: value for key, value in (parameters or {}).items() if value is not None}
    if "$ref" in said:
        return name, said, strict
    # A schema without a type would accept any value.
    return name, {"type": "object", "properties": {}, **said}, strict


def _named(tool_choice: object, schemas: Mapping[str, object]) -> str:
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if (
        not isinstance(tool_choice, Mapping)
        or tool_choice.get("type") != "function"
        or not isinstance(name, str)
    ):
        raise InvalidRequestError(
            f"tool_choice must be {_CHOICES}, got {shown_value(tool_choice)}", param="tool_choice"
        )
    if name not in schemas:
        raise InvalidRequestError(
            f"tool_choice names {name[:MAX_NAME]!r}, which is not one of the tools: "
            f"{', '.join(map(repr, list(schemas)[:8]))}",
            param="tool_choice",
        )
    return name


def _forced(use: ToolUse, strict: Collection[str]) -> Grammar:
    """Return the grammar of forced calls.

    The schemas of the functions are definitions, by their names, so that errors name them.
    """
    names = list(use.schemas) if use.name is None else [use.name]
    _check_length(sum(len(msgspec.json.encode(use.schemas[name])) for name in names))
    definitions = {
        name: held(
            use.schemas[name],
            loose=name not in strict,
            refuse=partial(_unheld, name),
            at=("$defs", name),
        )
        for name in names
    }
    whole = _call_of(use.name) if use.name is not None else _calls(names, use.parallel)
    source = json.dumps({**whole, "$defs": definitions})
    _check_length(len(source))
    loose = tuple(name for name in names if name not in strict)
    return Grammar("json_schema", source, loose=loose)


def _check_length(characters: int) -> None:
    if characters > MAX_GRAMMAR:
        raise InvalidRequestError(
            f"the schemas of tools that must be called have {characters} characters; at most "
            f"{MAX_GRAMMAR} are allowed",
            param="tools",
        )


def _unheld(name: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the tool {name[:MAX_NAME]!r} is strict, and its schema cannot be held: {why}; without "
        "strict it is held as far as possible",
        param="tools",
    )


def _call_of(name: str) -> dict[str, Any]:
    return {"$ref": pointer(("$defs", name))}


def _calls(names: Sequence[str], parallel: bool) -> dict[str, Any]:
    """The schema of a list of calls, as vLLM words it."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "enum": [name]},
                "parameters": _call_of(name),
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name in names
    ]
    most = {} if parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}
