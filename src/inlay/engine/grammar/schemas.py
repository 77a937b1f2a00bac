"""The cost of a JSON schema, read and not run.

Its nesting, properties, divisors and expressions.
"""

import math
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from inlay.base.errors import InvalidRequestError
from inlay.engine.grammar.cost import (
    MAX_INTERSECTION,
    Cost,
    check_all,
    check_intersection,
    check_rules,
    sequence,
)
from inlay.engine.grammar.regex import MAX_DEPTH, check_regex

MAX_PROPERTIES = 5_000
"""Of all objects in a JSON schema, as many as OpenAI takes."""

MAX_PROPERTIES_OF_ONE = 2_000
"""Of one object. Building takes the square of them: about 0.5 s for so many."""

MAX_PATTERN_PROPERTIES = 64
"""Of one object: a hundred take 0.1 s, and three hundred 14 s."""

MAX_DIVISOR = 10_000
"""Common multiple of the divisors of all `multipleOf` in a schema, without their powers of ten."""

MAX_DIGITS = 40
"""Digits of a `multipleOf`."""

_FORMAT_WIDTH = 8
"""States that the expression of a `format` can be in at once, about."""


def check_schema(schema: Any) -> list[Cost]:
    """Refuse a JSON schema that is nested too deeply, or holds what would cost too much.

    Returns:
        The costs of its expressions.

    Raises:
        InvalidRequestError: it does; the message says what.
    """
    multiple, count = 1, 0
    costs: dict[str, Cost] = {}
    together = _Together(schema, costs)
    for node in _nodes(schema):
        properties = max(_length(node.get("properties")), _length(node.get("required")))
        count += properties
        if properties > MAX_PROPERTIES_OF_ONE or count > MAX_PROPERTIES:
            raise InvalidRequestError(
                f"the schema has too many properties: at most {MAX_PROPERTIES} are allowed in all "
                "its objects together, "
                f"and at most {MAX_PROPERTIES_OF_ONE} in one"
            )
        if _length(node.get("patternProperties")) > MAX_PATTERN_PROPERTIES:
            raise InvalidRequestError(
                f"the schema has too many patternProperties: at most {MAX_PATTERN_PROPERTIES} are "
                "allowed in one object"
            )
        for expression in _expressions(node):
            if expression not in costs:
                costs[expression] = check_regex(expression)
        divisor = node.get("multipleOf")
        if isinstance(divisor, int | float) and not isinstance(divisor, bool):
            multiple = math.lcm(multiple, _divisor(divisor))
            if multiple > MAX_DIVISOR:
                raise InvalidRequestError(
                    f"multipleOf {divisor} is too fine: the divisors of a schema may have a "
                    "common multiple of at most "
                    f"{MAX_DIVISOR}, powers of ten aside"
                )
    for node in _nodes(schema):
        together.check(node)
    check_all(costs.values())
    _check_choices(schema)
    return list(costs.values())


def _check_choices(schema: Any) -> None:
    """Refuse a schema whose choices lead to each other in too many ways.

    `anyOf` and `oneOf` are rules, and so is what `$ref` names.
    """
    alternatives: Counter[str] = Counter()
    uses: Counter[str] = Counter()
    for node in _nodes(schema):
        named = [choice.get("$ref") for choice in _choices(node) if isinstance(choice, dict)]
        uses.update(name for name in named if isinstance(name, str))
    for name in uses:
        alternatives[name] = max(1, len(_choices(_dict(_named(schema, name)))))
    check_rules(alternatives, uses, sum(len(_choices(node)) for node in _nodes(schema)))


def _choices(node: dict[str, Any]) -> list[Any]:
    return _list(node.get("anyOf")) + _list(node.get("oneOf"))


def _expressions(node: dict[str, Any]) -> Iterator[str]:
    """The regular expressions of one object of a schema."""
    pattern, properties, own = (
        node.get(key) for key in ("pattern", "patternProperties", "x-guidance")
    )
    if isinstance(pattern, str):
        yield pattern
    if isinstance(properties, dict):
        yield from properties
    # llguidance's options for a schema: separators and white space are expressions as well.
    if isinstance(own, dict):
        yield from (value for value in own.values() if isinstance(value, str))


class _Together:
    """Which expressions of a schema must match together.

    Those of one node, of its `allOf`, and of what its `$ref` names.
    """

    def __init__(self, schema: Any, costs: dict[str, Cost]) -> None:
        self._schema = schema
        self._costs = costs
        self._widths: dict[int, int] = {}

    def check(self, node: Any, depth: int = 0) -> int:
        """States that the expressions can be in at once.

        Raises `InvalidRequestError` when they are too many.
        """
        if not isinstance(node, dict):
            return 1
        if id(node) in self._widths:
            return self._widths[id(node)]
        if depth > MAX_DEPTH:
            raise InvalidRequestError(
                "the schema is nested too deeply: $ref and allOf lead to each other over more "
                f"than {MAX_DEPTH} steps"
            )
        self._widths[id(node)] = 1  # one that leads back to itself is counted once
        widths = [self._width(name) for name in _dict(node.get("patternProperties"))]
        pattern = node.get("pattern")
        if isinstance(pattern, str):
            widths.append(self._width(pattern))
        if "format" in node:
            widths.append(_FORMAT_WIDTH)
        widths += [self.check(part, depth + 1) for part in _list(node.get("allOf"))]
        for key in ("anyOf", "oneOf"):
            widths.append(
                max((self.check(part, depth + 1) for part in _list(node.get(key))), default=1)
            )
        widths.append(self.check(_named(self._schema, node.get("$ref")), depth + 1))
        self._widths[id(node)] = min(check_intersection(widths), MAX_INTERSECTION)
        return self._widths[id(node)]

    def _width(self, expression: str) -> int:
        cost = self._costs[expression]
        if not expression.startswith("^"):  # it may begin anywhere
            cost = sequence([Cost.literal().repeated(0, None), cost])
        return cost.width


def _named(schema: Any, reference: Any) -> Any:
    """The part of a schema that `$ref` names, if it is one."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found = schema
    for name in reference[1:].split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdigit():
            found = found[int(name)] if int(name) < len(found) else None
        else:
            found = _dict(found).get(name)
    return found


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


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
    raise InvalidRequestError(
        f"the schema is nested too deeply: at most {MAX_DEPTH} levels are allowed"
    )


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
