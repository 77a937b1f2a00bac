"""From a `Grammar` to llguidance's own form of it, after a look at what would cost too much.

The library bounds what a grammar may cost by fuel, which some things escape (`cost`, `schemas`).
They are bounded before it, by reading the source and not by running it.
"""

import json
import re
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from inlay.base.errors import InvalidRequestError
from inlay.engine.grammar.lark import check_lark
from inlay.engine.grammar.parts import explained, loosened
from inlay.engine.grammar.regex import check_regex
from inlay.engine.grammar.schemas import check_schema
from inlay.messages.request import MAX_GRAMMAR, Grammar

# As the library tells them apart, but white space is read once.
_LARK = re.compile(r"^[^\S\n]*+(?:%llguidance\b|start\s*+:)", re.MULTILINE)
_LITERAL = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")


def source_of(grammar: Grammar) -> str:
    """The grammar as llguidance reads it.

    Raises:
        InvalidRequestError: it is not one, or would cost too much.
    """
    text = grammar.source
    if len(text) > MAX_GRAMMAR:
        raise InvalidRequestError(
            f"the grammar has {len(text)} characters; at most {MAX_GRAMMAR} are allowed"
        )
    if grammar.kind == "json_object":
        return _json({"type": "object"})
    if grammar.kind == "json_schema":
        return _schema(grammar)
    if grammar.kind == "choice":
        return str(LLMatcher.grammar_from_regex(_alternatives(_parsed(text))))
    if grammar.kind == "regex":
        check_regex(text)
        return str(LLMatcher.grammar_from_regex(text))
    if grammar.kind == "grammar":
        try:
            lark = text if _LARK.search(text) else gbnf_to_lark(text)
        except Exception as error:  # the converter raises whatever its scanner meets
            raise InvalidRequestError(f"the grammar cannot be read: {error}") from error
        check_lark(lark)
        return str(LLMatcher.grammar_from_lark(lark))
    raise InvalidRequestError(f"a grammar of kind {grammar.kind!r} is not supported")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the schema is not JSON: {error}") from error


def schema_in(source: str) -> dict[str, Any]:
    """The JSON schema in what `source_of` made of one."""
    schema = json.loads(source)["grammars"][0]["json_schema"]
    return {key: value for key, value in schema.items() if key != "x-guidance"}


def _schema(grammar: Grammar) -> str:
    schema = _parsed(grammar.source)
    definitions = schema.get("$defs") if isinstance(schema, dict) else None
    loose = bool(grammar.loose) and isinstance(definitions, dict)
    try:
        source = _json(schema)
        if not loose or not LLMatcher.validate_grammar(source):
            return source
    except InvalidRequestError as error:
        # What costs too much is left out where others can be called, and else refused.
        if not loose or len(schema["$defs"]) == 1:
            raise explained(schema, error) from None
    schema = loosened(schema, grammar.loose)
    try:
        return _json(schema)
    except InvalidRequestError as error:
        raise explained(schema, error) from None


def _json(schema: Any) -> str:
    check_schema(schema)
    if schema is False:
        raise InvalidRequestError("the schema false matches nothing")
    schema = {} if schema is True else schema
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"the schema must be an object, got {type(schema).__name__}")
    try:
        # In one line. Where spaces and line breaks are free, a model that is unsure goes on with
        # them until its tokens are spent, and one that is sure pays for them.
        return str(
            LLMatcher.grammar_from_json_schema(
                schema,
                defaults={
                    "whitespace_flexible": False,
                    "item_separator": ", ",
                    "key_separator": ": ",
                },
            )
        )
    except ValueError as error:  # numbers of more than 64 bits
        raise InvalidRequestError(f"the schema cannot be read: {str(error)[:200]}") from error


def _alternatives(choices: Any) -> str:
    if (
        not isinstance(choices, list)
        or not choices
        or not all(isinstance(item, str) for item in choices)
    ):
        raise InvalidRequestError("choice must be a list of at least one string")
    return "(" + "|".join(_LITERAL.sub(r"\\\g<0>", item) for item in choices) + ")"
