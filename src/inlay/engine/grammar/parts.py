"""Parts of a JSON schema, compiled one by one: which of them is refused, and what is left of it."""

import time
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

from llguidance import LLMatcher

from inlay.base.errors import InvalidRequestError
from inlay.engine.grammar.schemas import check_schema
from inlay.render.json_schema import part_at, place_of, pointer

MAX_SECONDS = 0.25
"""Processor time for the search; where it ends, a larger part is named or dropped."""

_MAX_LOOSENED = 16
"""Parts of one definition that are loosened; then all of it is."""

_LAST = ("required", "enum", "const", "type", "items", "properties", "$ref")
"""Keywords that are left out last, in this order."""

_Place = tuple[str, ...]


class SchemaParts:
    """Compiles parts of one schema without a tokenizer."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._whole = _moved(schema, pointer(("$defs", "whole")))
        self._until = time.thread_time() + MAX_SECONDS

    def refusal(self, place: _Place) -> str | None:
        """Return why a part is refused; None if it is not.

        Raises `ValueError` for a schema with numbers that the library does not take.
        """
        try:
            check_schema(part_at(self._schema, place))
            alone = {"$defs": {"whole": self._whole}, "$ref": pointer(("$defs", "whole", *place))}
            return LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(alone)) or None
        except InvalidRequestError as error:
            return str(error)

    def culprit(self, place: _Place = (), *, any_reason: bool = False) -> _Place:
        """Return the smallest part that is refused for the same reason as the one at `place`.

        Or, with `any_reason`, for another.
        """
        why, seen = self.refusal(place), {place}
        found = True
        while found and why is not None:
            found = False
            for below in self._below(place):
                if time.thread_time() > self._until:
                    return place
                if below in seen:
                    continue
                seen.add(below)
                refused = self.refusal(below)
                if refused is not None and (any_reason or refused == why):
                    place, found = below, True
                    break
        return place

    def _below(self, place: _Place) -> Iterator[_Place]:
        """Yield the parts directly in a part, and what its reference names."""
        part = part_at(self._schema, place)
        if not isinstance(part, Mapping):
            return
        there = place_of(self._schema, part.get("$ref"))
        if there is not None:
            yield there
        for keyword, value in part.items():
            if keyword in ("properties", "patternProperties") and isinstance(value, Mapping):
                yield from ((*place, keyword, name) for name in value)
            elif isinstance(value, list) and keyword not in ("enum", "required", "type"):
                yield from ((*place, keyword, str(index)) for index in range(len(value)))
            elif keyword in ("items", "additionalProperties"):
                yield (*place, keyword)
        if not place and isinstance(part.get("$defs"), Mapping):
            yield from (("$defs", name) for name in part["$defs"])


def explained(schema: Any, error: InvalidRequestError) -> InvalidRequestError:
    """Return the error of a schema with the place of what is refused, where it can be found."""
    try:
        place = SchemaParts(schema).culprit()
    except (ValueError, RecursionError):
        return error
    if not place:
        return error
    return InvalidRequestError(f"{error.message}, at {pointer(place)}", param=error.param)


def loosened(schema: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return a schema whose definitions of `names` compile, as much of each as can be kept.

    Each definition refers to parts of itself alone.
    """
    definitions, until = dict(schema["$defs"]), time.thread_time() + 2 * MAX_SECONDS
    for name in (name for name in names if name in definitions):
        try:
            definitions[name] = _loosened(name, definitions[name], until)
        except ValueError:
            definitions[name] = {"type": "object"}
    return {**schema, "$defs": definitions}


def _loosened(name: str, definition: Any, until: float) -> Any:
    place = ("$defs", name)
    whole = {"$defs": {name: definition}}
    if SchemaParts(whole).refusal(place) is None:
        return definition
    whole = deepcopy(whole)
    for _ in range(_MAX_LOOSENED):
        if time.thread_time() > until:
            break
        culprit = SchemaParts(whole).culprit(place, any_reason=True)
        holder, last = part_at(whole, culprit[:-1]), culprit[-1]
        _simplify(whole, culprit, holder, int(last) if isinstance(holder, list) else last)
        if SchemaParts(whole).refusal(place) is None:
            return whole["$defs"][name]
    return {"type": "object"}


def _simplify(whole: Any, place: _Place, holder: Any, key: Any) -> None:
    """Leave out the one keyword of a part for which it is refused; else all but its type."""
    part = holder[key]
    if isinstance(part, dict):
        for left_out in (
            *sorted(part.keys() - set(_LAST)),
            *(name for name in _LAST if name in part),
        ):
            holder[key] = {keyword: part[keyword] for keyword in part if keyword != left_out}
            if SchemaParts(whole).refusal(place) is None:
                return
        holder[key] = {"type": part["type"]} if "type" in part else True
        if SchemaParts(whole).refusal(place) is None:
            return
    holder[key] = True


def _moved(schema: Any, there: str) -> Any:
    """Return a schema that stood alone for a document in which it stands at `there`."""
    if isinstance(schema, list):
        return [_moved(item, there) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: f"{there}{value[1:]}"
        if key == "$ref" and isinstance(value, str) and value[:2] in ("#", "#/")
        else _moved(value, there)
        for key, value in schema.items()
    }
