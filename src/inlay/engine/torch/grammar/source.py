"""From a `Grammar` to llguidance's own form of it, after a look at what would cost too much.

The library bounds what a grammar may cost by fuel, which four things escape: an exact repetition costs as much as the text it
stands for, at the first token; so does the divisor of `multipleOf`, squared; an object's properties cost their number squared while
the grammar is built; and what is deeply nested is read by recursion. They are bounded here, by reading the source and not by running it.
"""

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from inlay.errors import InvalidRequestError
from inlay.protocol.work import MAX_GRAMMAR, Grammar

MAX_DEPTH = 64
"""Levels of nesting in a JSON schema, and of groups in a regular expression."""

MAX_REPEATED = 20_000
"""Characters a regular expression stands for at most when every `{m,n}` is written out: about 30 ms at its first token."""

MAX_PROPERTIES = 5_000
"""Of all objects in a JSON schema, as many as OpenAI takes. Building takes the square of an object's: about 6 s for so many."""

MAX_DIVISOR = 10_000
"""What the divisors of all `multipleOf` in a schema may have as their common multiple, without their powers of ten."""

MAX_DIGITS = 40
"""Digits of a `multipleOf`."""

_COUNT = re.compile(r"\{(\d{1,9})(?:(,)(\d{0,9}))?\}")
_LITERAL = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")
# Possessive, and a string or an expression without its end reaches as far as it was read: else a scan takes the square of its length.
_DEFINITION = re.compile(r"^[?!]?([A-Za-z_][\w-]*+)[^:\n\"/]*+:(?!:)", re.MULTILINE)
_LARK = re.compile(
    r'(?P<skip>//[^\n]*|\#[^\n]*|\s+|->\s*\w+)|(?P<string>"(?:\\[\s\S]|[^"\\])*+(?:"i?|\\?\Z))'
    r"|/(?P<regex>(?:\\.|[^/\\\n])++)(?:/\w*|(?=[\n\\])|\Z)"
    r"|%(?P<json>json)\b|(?P<count>\{\d{1,9}(?:,\d{0,9})?\})|~\s*(?P<tilde>\d{1,9}(?:\s*\.\.\s*\d{1,9})?)"
    r"|(?P<name>[A-Za-z_][\w-]*)|(?P<other>.)"
)


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
        return _json(_parsed(text))
    if grammar.kind == "choice":
        return str(LLMatcher.grammar_from_regex(_alternatives(_parsed(text))))
    if grammar.kind == "regex":
        _check_regex(text)
        return str(LLMatcher.grammar_from_regex(text))
    if grammar.kind == "grammar":
        try:
            lark = any_to_lark(text)
        except Exception as error:  # the converter raises whatever its scanner meets
            raise InvalidRequestError(f"the grammar cannot be read: {error}") from error
        _check_lark(lark)
        return str(LLMatcher.grammar_from_lark(lark))
    raise InvalidRequestError(f"a grammar of kind {grammar.kind!r} is not supported")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the schema is not JSON: {error}") from error


def _json(schema: Any) -> str:
    check_schema(schema)
    if schema is False:
        raise InvalidRequestError("the schema false matches nothing")
    schema = {} if schema is True else schema
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"the schema must be an object, got {type(schema).__name__}")
    # In one line. Where spaces and line breaks are free, a model that is unsure goes on with them until its tokens are
    # spent, and one that is sure pays for them.
    return str(
        LLMatcher.grammar_from_json_schema(
            schema,
            defaults={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
        )
    )


def _alternatives(choices: Any) -> str:
    if not isinstance(choices, list) or not choices or not all(isinstance(item, str) for item in choices):
        raise InvalidRequestError("choice must be a list of at least one string")
    return "(" + "|".join(_LITERAL.sub(r"\\\g<0>", item) for item in choices) + ")"


def check_schema(schema: Any) -> None:
    """Refuse a JSON schema that is nested too deeply, or holds what would cost too much.

    Raises:
        InvalidRequestError: it does; the message says what.
    """
    multiple, count = 1, 0
    for node in _nodes(schema):
        count += max(_length(node.get("properties")), _length(node.get("required")))
        if count > MAX_PROPERTIES:
            raise InvalidRequestError(
                f"the schema has too many properties: at most {MAX_PROPERTIES} are allowed in all its objects together"
            )
        pattern = node.get("pattern")
        if isinstance(pattern, str):
            _check_regex(pattern)
        properties = node.get("patternProperties")
        for key in properties if isinstance(properties, dict) else ():
            _check_regex(key)
        divisor = node.get("multipleOf")
        if isinstance(divisor, int | float) and not isinstance(divisor, bool):
            multiple = math.lcm(multiple, _divisor(divisor))
            if multiple > MAX_DIVISOR:
                raise InvalidRequestError(
                    f"multipleOf {divisor} is too fine: the divisors of a schema may have a common multiple of at most "
                    f"{MAX_DIVISOR}, powers of ten aside"
                )


def _length(value: Any) -> int:
    return len(value) if isinstance(value, dict | list) else 0


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object in a schema, whatever it means there."""
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        yield from (item for item in level if isinstance(item, dict))
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise InvalidRequestError(f"the schema is nested too deeply: at most {MAX_DEPTH} levels are allowed")


def _divisor(value: int | float) -> int:
    number = Decimal(repr(value)).copy_abs().normalize()
    if not number.is_finite() or not number:
        raise InvalidRequestError(f"multipleOf must be above 0, got {value}")
    _, digits, exponent = number.as_tuple()
    if len(digits) + abs(int(exponent)) > MAX_DIGITS:
        raise InvalidRequestError(f"multipleOf may have at most {MAX_DIGITS} digits")
    coefficient = int("".join(map(str, digits)))
    # A power of ten below the point only moves it; above, the remainder must be kept in full.
    power: int = 10 ** max(0, int(exponent))
    return coefficient * power


class _Expression:
    """The size of an expression when its repetitions are written out, read from left to right."""

    def __init__(self) -> None:
        self._totals = [0]
        self._last = 0

    def atom(self, size: int = 1) -> None:
        self._totals[-1] += self._last
        self._last = size

    def open(self) -> None:
        self.atom(0)
        self._totals.append(0)
        if len(self._totals) > MAX_DEPTH:
            raise InvalidRequestError(
                f"a regular expression is nested too deeply: at most {MAX_DEPTH} groups may lie in each other"
            )

    def close(self) -> None:
        total = self._totals.pop() + self._last if len(self._totals) > 1 else self._last
        self._last = total

    def repeat(self, low: int, high: int | None) -> None:
        self._last *= max(low, high or 0, 1)
        self._check(self._last)

    @property
    def size(self) -> int:
        size = sum(self._totals) + self._last
        self._check(size)
        return size

    def _check(self, size: int) -> None:
        if size > MAX_REPEATED:
            raise InvalidRequestError(
                "a regular expression is too large: with its repetitions written out it stands for more than "
                f"{MAX_REPEATED} characters"
            )


def _check_regex(regex: str) -> int:
    """Refuse a regular expression that stands for too much; otherwise, for how many characters it does.

    One that is not well formed passes: the library says best what is wrong with it.
    """
    expression = _Expression()
    place = 0
    while place < len(regex):
        character = regex[place]
        place += 1
        if character == "\\":
            braced = regex[place : place + 1] in set("pPxuU") and regex[place + 1 : place + 2] == "{"
            end = regex.find("}", place) if braced else -1
            place = end + 1 if end >= 0 else place + 1
            expression.atom()
        elif character == "[":
            place = _class_end(regex, place)
            expression.atom()
        elif character == "(":
            expression.open()
        elif character == ")":
            expression.close()
        elif character == "{" and (count := _COUNT.match(regex, place - 1)):
            low, comma, high = count.groups()
            expression.repeat(int(low), int(high) if comma and high else None)
            place = count.end()
        elif character not in "*+?|":
            expression.atom()
    return expression.size


def _class_end(regex: str, place: int) -> int:
    """The place behind the character class whose `[` is before `place`."""
    depth = 1
    if regex.startswith("^", place):
        place += 1
    if regex.startswith("]", place):
        place += 1
    while place < len(regex) and depth:
        character = regex[place]
        place += 2 if character == "\\" else 1
        depth += (character == "[") - (character == "]")
    return place


def _check_lark(lark: str) -> None:
    """Refuse a Lark grammar whose terminals stand for too much; each is as large as what it names."""
    definitions = list(_DEFINITION.finditer(lark))
    bodies: dict[str, str] = {}
    for index, found in enumerate(definitions):
        end = definitions[index + 1].start() if index + 1 < len(definitions) else len(lark)
        bodies[found[1]] = bodies.get(found[1], "") + " " + lark[found.end() : end]
    sizes: dict[str, int] = {}
    for name in bodies:
        _size_of(name, bodies, sizes, 0)


def _size_of(name: str, bodies: dict[str, str], sizes: dict[str, int], depth: int) -> int:
    if name in sizes or name not in bodies:
        return sizes.get(name, 1)
    if depth > MAX_DEPTH:
        raise InvalidRequestError(f"the grammar's names lead to each other over more than {MAX_DEPTH} steps")
    sizes[name] = 1  # what names itself is counted once
    body, expression, place = bodies[name], _Expression(), 0
    while place < len(body):
        found = _LARK.match(body, place)
        if found is None:
            break
        place = found.end()
        kind, text = found.lastgroup, found[0]
        if kind == "string":
            expression.atom(len(text))
        elif kind == "regex":
            expression.atom(_check_regex(found["regex"]))
        elif kind == "json":
            place = _skip_schema(body, place)
            expression.atom()
        elif kind == "name":
            expression.atom(_size_of(text, bodies, sizes, depth + 1) if text.isupper() else 1)
        elif kind in ("count", "tilde"):
            low, *high = re.findall(r"\d+", text)
            expression.repeat(int(low), int(high[0]) if high else None)
        elif text in "([":
            expression.open()
        elif text in ")]":
            expression.close()
    sizes[name] = max(1, expression.size)
    return sizes[name]


def _skip_schema(body: str, place: int) -> int:
    start = body.find("{", place)
    if start < 0:
        return place
    try:
        schema, end = json.JSONDecoder().raw_decode(body, start)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the schema after %json is not JSON: {error}") from error
    check_schema(schema)
    return end


__all__ = ["MAX_DEPTH", "MAX_DIVISOR", "MAX_PROPERTIES", "MAX_REPEATED", "check_schema", "source_of"]
