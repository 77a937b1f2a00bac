"""JSON schemas of clients, made into what grammars hold outputs to.

What is an annotation in JSON Schema, or a habit that means nothing, is left out. An assertion that
no grammar can hold is left out of a loose schema, and refused in a strict one (the table in
docs/api.md has both by keyword).
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any, Literal, TypeAlias

from inlay.base.errors import InvalidRequestError
from inlay.http.quoting import shown_value
from inlay.render.json_schema import (
    TYPE_NAMES,
    TYPES,
    SchemaTypes,
    part_at,
    place_of,
    pointer,
)

FORMATS = frozenset(
    {
        "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
    }
)  # fmt: skip
"""Values of `format` that are held to; others are annotations."""

_UNHELD = frozenset(
    {
        "not", "if", "contains", "dependentRequired", "dependentSchemas", "dependencies",
        "uniqueItems", "unevaluatedProperties", "unevaluatedItems", "propertyNames", "$dynamicRef",
        "$recursiveRef",
    }
)  # fmt: skip
"""Assertions that a grammar cannot hold."""

_MERGED = frozenset(
    {"additionalProperties", "allOf", "anyOf", "oneOf", "$ref", "if", "not", "dependentSchemas"}
)
"""Keywords beside which `unevaluatedProperties` is not `additionalProperties`."""

_EVERYTHING: tuple[Any, ...] = (True, {})
"""Schemas that allow everything."""

_ANNOTATIONS = frozenset({"type", "title", "description", "format", "$comment", "examples"})
"""Keywords of a property's name, a string, that do not assert anything; `format` may."""

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_MAX_NUMBER = 2**63

# Escapes and classes are read whole, so that what is found is no part of them.
_PIECE = re.compile(r"\\(.)|\[(?:\\.|[^\]\\])*+\]|\(\?(<?[=!])", re.DOTALL)
_NO_ESCAPES = frozenset("123456789bBkZG")

_Place: TypeAlias = tuple[str | int, ...]
_Keyword: TypeAlias = tuple[str, Any]


def held(
    schema: Mapping[str, Any],
    *,
    loose: bool,
    refuse: Callable[[str], InvalidRequestError],
    at: _Place = (),
) -> dict[str, Any] | bool:
    """Return a schema that grammars hold, whose references lead to its own parts at `at`.

    Args:
        schema: as it came; it is not changed.
        loose: leave out what cannot be held.
        refuse: makes the error of a text that names a keyword and its place.
        at: steps from the top of the document that the result will stand in.

    Raises:
        InvalidRequestError: it cannot be held, and is not loose.
    """
    return _SchemaReader(schema, loose, refuse, at).read()


class _SchemaReader:
    """Reads one schema."""

    def __init__(
        self,
        root: Mapping[str, Any],
        loose: bool,
        refuse: Callable[[str], InvalidRequestError],
        at: _Place,
    ) -> None:
        self._root = root
        self._loose = loose
        self._error = refuse
        self._at = at
        self._types = SchemaTypes(root, hints=False)
        self._targets: list[tuple[str, ...]] = []
        self._done: set[tuple[str, ...]] = set()

    def read(self) -> dict[str, Any] | bool:
        whole = self._schema(self._root, ())
        # References may lead to where schemas are not expected (`#/components/schemas/Page`).
        while self._targets:
            place = self._targets.pop()
            if place in self._done:
                continue
            *above, last = place
            holder: Any = whole
            for step in above:
                if isinstance(holder, dict):
                    holder = holder.setdefault(step, {})
                elif isinstance(holder, list):
                    holder = holder[int(step)]
            if isinstance(holder, dict):
                holder[last] = self._schema(part_at(self._root, place), place)
        return whole

    def _refuse(self, place: _Place, why: str) -> None:
        if not self._loose:
            raise self._error(f"{why}, at {pointer(place)}")

    def _schema(self, schema: Any, place: _Place) -> dict[str, Any] | bool:
        self._done.add(tuple(map(str, place)))
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            if schema is not None:
                self._refuse(
                    place, f"a schema is an object or a boolean, got {shown_value(schema)}"
                )
            return True
        if schema.get("not") in ({}, True) and "not" in schema:
            return False
        if schema.get("propertyNames") is not None:
            return self._by_name(schema, place)
        return self._keywords(schema, place)

    def _keywords(self, schema: Mapping[str, Any], place: _Place) -> dict[str, Any]:
        return {
            name: item
            for keyword, value in schema.items()
            if value is not None or keyword == "const"
            for name, item in self._keyword(schema, keyword, value, (*place, keyword))
        }

    def _keyword(
        self, schema: Mapping[str, Any], keyword: str, value: Any, here: _Place
    ) -> Iterable[_Keyword]:
        """Return what stands for a keyword and its value, if anything does."""
        read = _READERS.get(keyword)
        return () if read is None else read(self, schema, keyword, value, here)

    def _one(
        self, schema: Mapping[str, Any], keyword: str, value: Any, here: _Place
    ) -> Iterable[_Keyword]:
        if keyword == "items" and isinstance(value, list):
            return self._list(schema, keyword, value, here)
        return ((keyword, self._schema(value, here)),)

    def _ref(
        self, schema: Mapping[str, Any], keyword: str, value: Any, here: _Place
    ) -> Iterator[_Keyword]:
        there = place_of(self._root, value)
        if there is None:
            self._refuse(here, f"no part of the schema is named by $ref {shown_value(value)}")
        else:
            self._targets.append(there)
            yield keyword, pointer((*self._at, *there))

    def _format(
        self, schema: Mapping[str, Any], keyword: str, value: Any, here: _Place
    ) -> Iterator[_Keyword]:
        if _is_held(value):
            yield keyword, value

    def _expression(
        self, schema: Mapping[str, Any], keyword: str, value: Any, here: _Place
    ) -> Iterator[_Keyword]:
        if self._pattern(value, here):
            yield keyword, value

    def _enum(
        self, schema: Mapping[str, Any], keyword: str, value: Any, here: _Place
    ) -> Iterator[_Keyword]:
        values = [value] if keyword == "const" else value
        if not isinstance(values, list) or not values:
            self._refuse(here, f"enum must be a list of values, got {shown_value(value)}")
        elif any(isinstance(each, int) and abs(each) >= _MAX_NUMBER for each in values):
            self._refuse(here, f"{keyword} has a number of more than 64 bits")
        else:
            yield keyword, deepcopy(value)  # a reference may lead into it

    def _options(
        self, schema: Mapping[str, Any], keyword: str, value: Any, here: _Place
    ) -> Iterator[_Keyword]:
        if schema is self._root:
            yield keyword, deepcopy(value)

    def _map(
        self, schema: Mapping[str, Any], keyword: str, value: Any, here: _Place
    ) -> Iterator[_Keyword]:
        if value == []:  # an empty object, as PHP writes it
            return
        if not isinstance(value, Mapping):
            self._refuse(here, f"{keyword} must be an object, got {shown_value(value)}")
            return
        patterns = keyword == "patternProperties"
        yield (
            keyword,
            {
                name: self._schema(part, (*here, name))
                for name, part in value.items()
                if not patterns or self._pattern(name, (*here, name))
            },
        )

    def _list(
        self, schema: Mapping[str, Any], keyword: str, value: Any, here: _Place
    ) -> Iterator[_Keyword]:
        if not isinstance(value, list) or (not value and keyword in ("anyOf", "oneOf")):
            self._refuse(here, f"{keyword} must be a list of schemas, got {shown_value(value)}")
            return
        made = [self._schema(part, (*here, index)) for index, part in enumerate(value)]
        if (
            keyword == "oneOf"
            and "anyOf" not in schema
            and (self._loose or self._types.apart(value))
        ):
            keyword = "anyOf"
        yield keyword, made

    def _type(
        self, schema: Mapping[str, Any], keyword: str, value: Any, here: _Place
    ) -> Iterator[_Keyword]:
        names = value if isinstance(value, list) else [value]
        if names and all(isinstance(name, str) and name in TYPES for name in names):
            yield "type", value
            return
        self._refuse(
            here, f"type {shown_value(value)} is none of JSON's: {', '.join(sorted(TYPES))}"
        )
        known = [TYPE_NAMES.get(str(name).lower(), TYPES) for name in names] or [TYPES]
        types = frozenset().union(*known)
        if types != TYPES:
            yield "type", sorted(types - {"integer"} if "number" in types else types)

    def _required(
        self, schema: Mapping[str, Any], keyword: str, value: Any, here: _Place
    ) -> Iterator[_Keyword]:
        if isinstance(value, bool):  # of a property itself, as in drafts before the fourth
            return
        names = [name for name in value if isinstance(name, str)] if isinstance(value, list) else []
        if not isinstance(value, list) or len(names) < len(value):
            self._refuse(here, f"required must be a list of names, got {shown_value(value)}")
        yield "required", names

    def _pattern(self, value: Any, here: _Place) -> bool:
        """Return True if an expression can be held."""
        if isinstance(value, str):
            for escaped, ahead in _PIECE.findall(value):
                if ahead or escaped in _NO_ESCAPES:
                    what = "look-around" if ahead else f"\\{escaped}"
                    self._refuse(
                        here, f"a grammar cannot hold pattern {shown_value(value)}: {what}"
                    )
                    return False
            return True
        self._refuse(here, f"pattern must be a regular expression, got {shown_value(value)}")
        return False

    def _number(
        self, schema: Mapping[str, Any], keyword: str, value: Any, here: _Place
    ) -> Iterator[_Keyword]:
        if isinstance(value, float) and value.is_integer() and keyword in _COUNTS:
            value = int(value)
        switch = isinstance(value, bool) and keyword.startswith("exclusive")
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        fits = plain and math.isfinite(value) and abs(value) < _MAX_NUMBER
        if not switch and not fits:
            self._refuse(here, f"{keyword} must be a number of 64 bits, got {shown_value(value)}")
        elif keyword in _COUNTS and (not isinstance(value, int) or value < 0):
            self._refuse(here, f"{keyword} must be a count, got {shown_value(value)}")
        elif keyword in ("minProperties", "maxProperties") and not _countable(schema):
            self._refuse(here, f"{keyword} cannot be held where properties are optional")
        else:
            yield keyword, value

    def _unheld(
        self, schema: Mapping[str, Any], keyword: str, value: Any, here: _Place
    ) -> Iterable[_Keyword]:
        """Refuse an assertion, unless it asserts nothing, or what another keyword does."""
        if keyword == "unevaluatedProperties" and not _MERGED & schema.keys():
            return (("additionalProperties", self._schema(value, here)),)
        nothing = {
            "not": value is False,
            "uniqueItems": value is False,
            "unevaluatedProperties": value in _EVERYTHING,
            "unevaluatedItems": value in _EVERYTHING,
            "if": not {"then", "else"} & schema.keys(),
            "contains": schema.get("minContains") == 0,
        }
        if not nothing.get(keyword, keyword.startswith("depend") and not value):
            self._refuse(here, f"a grammar cannot hold {keyword}")
        return ()

    def _by_name(self, schema: Mapping[str, Any], place: _Place) -> dict[str, Any]:
        """Return a schema with other keywords in place of `propertyNames`, where they say it."""
        names = _names(self._types.target(schema["propertyNames"]))
        if names is True:
            return self._keywords(_without(schema, "propertyNames"), place)
        if names is None or {"properties", "patternProperties"} & schema.keys():
            return self._keywords(schema, place)
        made = self._keywords(_without(schema, "propertyNames", "additionalProperties"), place)
        value = self._schema(schema.get("additionalProperties"), (*place, "additionalProperties"))
        if isinstance(names, str):
            if not self._pattern(names, (*place, "propertyNames", "pattern")):
                return {**made, "additionalProperties": value}
            return {**made, "patternProperties": {names: value}, "additionalProperties": False}
        if value and value is not True:  # stands there once, however many names there are
            made["x-value"] = value
            value = {"$ref": pointer((*self._at, *place, "x-value"))}
        return {**made, "properties": dict.fromkeys(names, value), "additionalProperties": False}


def _without(schema: Mapping[str, Any], *keywords: str) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in keywords}


_Read: TypeAlias = Callable[
    [_SchemaReader, Mapping[str, Any], str, Any, _Place], Iterable[_Keyword]
]
_READERS: Mapping[str, _Read] = {
    **dict.fromkeys(("items", "additionalProperties", "additionalItems"), _SchemaReader._one),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _SchemaReader._list),
    **dict.fromkeys(
        ("properties", "patternProperties", "$defs", "definitions"), _SchemaReader._map
    ),
    **dict.fromkeys((*_COUNTS, *_NUMBERS), _SchemaReader._number),
    **dict.fromkeys(_UNHELD, _SchemaReader._unheld),
    "$ref": _SchemaReader._ref,
    "type": _SchemaReader._type,
    "format": _SchemaReader._format,
    "pattern": _SchemaReader._expression,
    "required": _SchemaReader._required,
    "enum": _SchemaReader._enum,
    "const": _SchemaReader._enum,
    "x-guidance": _SchemaReader._options,
}
"""Readers by keyword; other keywords assert nothing."""


def _names(schema: Any) -> list[str] | str | Literal[True] | None:
    """Return what `propertyNames` allows: True for all, names, or an expression.

    None if it asserts more.
    """
    if not isinstance(schema, Mapping):
        return True if schema is True else []
    asserted = schema.keys() - _ANNOTATIONS
    if _is_held(schema.get("format")):
        return None
    if not asserted:
        return True
    if asserted == {"pattern"} and isinstance(schema["pattern"], str):
        return str(schema["pattern"])
    values = [schema["const"]] if asserted == {"const"} else schema.get("enum")
    if asserted <= {"const", "enum"} and isinstance(values, list):
        return [value for value in values if isinstance(value, str)]
    return None


def _is_held(value: Any) -> bool:
    """Return True if a value of `format` is held to."""
    return isinstance(value, str) and value in FORMATS


def _countable(schema: Mapping[str, Any]) -> bool:
    """Return True if the number of an object's properties can be held."""
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return False
    if all(name in required for name in properties):
        return True
    least, most = schema.get("minProperties") or 0, schema.get("maxProperties")
    if not isinstance(least, int | float) or not isinstance(most, int | float | None):
        return False
    if most is None and least <= len(required):
        return True
    alone = schema.get("additionalProperties") is False and "patternProperties" not in schema
    return alone and least <= len(required) + 1 and most in (None, len(required) + 1)
