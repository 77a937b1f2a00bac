"""JSON schemas as clients write them: where a `$ref` leads, and which types a value may have."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any
from urllib.parse import quote, unquote

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
"""All JSON types; whole numbers are "integer", and no "number"."""

TYPE_NAMES: Mapping[str, frozenset[str]] = {
    **{name: frozenset({name}) for name in TYPES},
    "number": frozenset({"number", "integer"}),
    "any": TYPES,
    "bool": frozenset({"boolean"}),
    **dict.fromkeys(("str", "text", "varchar", "char", "enum"), frozenset({"string"})),
    **dict.fromkeys(
        ("int", "int32", "int64", "uint", "uint32", "uint64", "long", "short", "unsigned"),
        frozenset({"integer"}),
    ),
    **dict.fromkeys(
        ("float", "float32", "float64", "double", "decimal"), frozenset({"number", "integer"})
    ),
    **dict.fromkeys(("dict", "map"), frozenset({"object"})),
    **dict.fromkeys(("arr", "list", "tuple", "set", "sequence"), frozenset({"array"})),
}
"""Types by the names in a `type`: JSON Schema's, and those that vLLM reads too."""

_HINTS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(
        ("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        frozenset({"object"}),
    ),
    **dict.fromkeys(
        ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"),
        frozenset({"array"}),
    ),
    **dict.fromkeys(("pattern", "format", "minLength", "maxLength"), frozenset({"string"})),
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        TYPE_NAMES["number"],
    ),
}
"""Types that a schema without a type means, by its other keywords."""

_MAX_DEFINITIONS = 256
"""Definitions that are searched for an `$id` or an `$anchor`."""

_MAX_COMPARED = 5_000
"""Pairs of schemas that are compared for `SchemaTypes.apart`."""

_MAX_STEPS = 64
"""Schemas in schemas, and references in a row, that are followed."""


def type_of(value: object) -> str:
    """Return the JSON type of a parsed value, one of `TYPES`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def place_of(root: Mapping[str, Any], reference: object) -> tuple[str, ...] | None:
    """Return the steps to the part of a schema that a `$ref` in it names; None if there is none.

    A reference is a pointer (`#/$defs/Page`), an `$anchor` or an `$id` of a definition, or one of
    these behind the schema's own `$id`.
    """
    if not isinstance(reference, str):
        return None
    base, _, fragment = reference.partition("#")
    if base and base != root.get("$id"):
        return _definition(root, "$id", base)
    if fragment and not fragment.startswith("/"):
        return _definition(root, "$anchor", fragment)
    steps = unquote(fragment).split("/")[1:]
    place = tuple(step.replace("~1", "/").replace("~0", "~") for step in steps)
    return None if part_at(root, place) is None else place


def part_at(root: Any, place: Iterable[str]) -> Any:
    """Return the part of a schema at some steps from its top; None if there is none."""
    found = root
    for step in place:
        if isinstance(found, list) and step.isdecimal():
            found = found[int(step)] if len(step) < 8 and int(step) < len(found) else None
        else:
            found = found.get(step) if isinstance(found, Mapping) else None
    return found


def pointer(place: Iterable[str | int]) -> str:
    """Return a JSON pointer as it stands in a `$ref`: `("$defs", "a/b")` is `#/$defs/a~1b`."""
    steps = (str(step).replace("~", "~0").replace("/", "~1") for step in place)
    return "#" + "".join("/" + quote(step, safe="~!$&'()*+,;=:@") for step in steps)


def _definition(root: Mapping[str, Any], keyword: str, value: str) -> tuple[str, ...] | None:
    for name in ("$defs", "definitions"):
        parts = root.get(name)
        items = parts.items() if isinstance(parts, Mapping) else ()
        for key, part in islice(items, _MAX_DEFINITIONS):
            if isinstance(part, Mapping) and part.get(keyword) == value:
                return name, key
    return None


class SchemaTypes:
    """The JSON types that parts of one schema allow. Each part is looked at once, by its `id`."""

    def __init__(self, root: Mapping[str, Any], *, hints: bool = True) -> None:
        """Look at `root`. With `hints`, `properties` without a type mean an object, and so on."""
        self._root = root
        self._hints = _HINTS if hints else {}
        self._known: dict[int, frozenset[str]] = {}
        self._compared = 0

    def of(self, schema: Any, steps: int = 0) -> frozenset[str]:
        """Return the types that a value under `schema`, a part of the whole, may have.

        All, if the schema does not tell; none, if nothing matches it.
        """
        if schema is False:
            return frozenset()
        if not isinstance(schema, Mapping) or steps > _MAX_STEPS:
            return TYPES
        if id(schema) not in self._known:
            self._known[id(schema)] = TYPES  # for what leads back to itself
            self._known[id(schema)] = self._read(schema, steps + 1)
        return self._known[id(schema)]

    def _read(self, schema: Mapping[str, Any], steps: int) -> frozenset[str]:
        allowed = TYPES
        for each in self._asserted(schema, steps):
            allowed &= each
        if allowed == TYPES:
            hints = [types for keyword, types in self._hints.items() if keyword in schema]
            return frozenset().union(*hints) if hints else TYPES
        return allowed | {"null"} if schema.get("nullable") is True else allowed

    def _asserted(self, schema: Mapping[str, Any], steps: int) -> Iterator[frozenset[str]]:
        """Yield the types that each keyword of a schema allows."""
        said = schema.get("type")
        names = said if isinstance(said, list) else [said]
        kinds = [
            TYPE_NAMES[name.lower()]
            for name in names
            if isinstance(name, str) and name.lower() in TYPE_NAMES
        ]
        if kinds:
            yield frozenset().union(*kinds)
        if "const" in schema:
            yield frozenset({type_of(schema["const"])})
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            yield frozenset(map(type_of, schema["enum"]))
        if (target := self.target(schema)) is not schema:
            yield self.of(target, steps)
        yield from (self.of(part, steps) for part in _schemas(schema.get("allOf")))
        for keyword in ("anyOf", "oneOf"):
            if choices := _schemas(schema.get(keyword)):
                yield frozenset().union(*(self.of(choice, steps) for choice in choices))

    def apart(self, choices: Sequence[Any]) -> bool:
        """Return True if it is certain that no value matches two of some parts."""
        self._compared = 0
        return all(
            self._disjoint(first, second, 0)
            for index, first in enumerate(choices)
            for second in choices[:index]
        )

    def _disjoint(self, first: Any, second: Any, steps: int) -> bool:
        self._compared += 1
        if self._compared > _MAX_COMPARED:
            return False
        first, second = self.target(first), self.target(second)
        if not self.of(first) & self.of(second):
            return True
        if not isinstance(first, Mapping) or not isinstance(second, Mapping) or steps > 2:
            return False
        values = _values(first), _values(second)
        if values[0] is not None and values[1] is not None:
            self._compared += len(values[0]) * len(values[1]) // 100
            return self._compared <= _MAX_COMPARED and not any(
                value in values[1] for value in values[0]
            )
        if not first.get("type") == second.get("type") == "object":
            return False
        ones, others = first.get("properties"), second.get("properties")
        if not isinstance(ones, Mapping) or not isinstance(others, Mapping):
            return False
        needed = [*_list(first.get("required")), *_list(second.get("required"))]
        self._compared += len(needed) // 10
        return any(
            self._disjoint(ones[name], others[name], steps + 1)
            for name in needed
            if isinstance(name, str) and name in ones and name in others
        )

    def target(self, schema: Any) -> Any:
        """Return the part that the `$ref` of a part names; the part itself without one."""
        place = place_of(self._root, schema.get("$ref")) if isinstance(schema, Mapping) else None
        return schema if place is None else part_at(self._root, place)

    def of_property(self, name: str) -> frozenset[str] | None:
        """Return the types of a property of the whole; None if the schema does not declare it."""
        return self._property(self._root, name, set())

    def _property(self, schema: Any, name: str, seen: set[int]) -> frozenset[str] | None:
        if not isinstance(schema, Mapping) or id(schema) in seen or len(seen) > 10 * _MAX_STEPS:
            return None
        seen.add(id(schema))
        properties, others = schema.get("properties"), schema.get("additionalProperties")
        found: frozenset[str] | None = None
        if isinstance(properties, Mapping) and name in properties:
            found = self.of(properties[name])
        elif isinstance(others, Mapping) and others:
            found = self.of(others)
        for part in (self.target(schema), *_schemas(schema.get("allOf"))):
            types = self._property(part, name, seen)
            if types is not None:
                found = types if found is None else found & types
        choices = [
            types
            for keyword in ("anyOf", "oneOf")
            for choice in _schemas(schema.get(keyword))
            if (types := self._property(choice, name, seen)) is not None
        ]
        if choices:
            either = frozenset().union(*choices)
            found = either if found is None else found & either
        return found


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the only values that a schema may have, if it has such; false is not 0."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    return [(type_of(value), value) for value in values]


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _schemas(value: object) -> list[Any]:
    """Return what may be schemas in the value of `anyOf` and the like."""
    return [part for part in _list(value) if isinstance(part, Mapping | bool)]
