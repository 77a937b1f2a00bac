"""Descriptions of the fields of request and response types, from their docstrings."""

import inspect
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import msgspec

_FIELD = re.compile(r" {4}(\w+): (.*)")


@cache
def field_descriptions(kind: type) -> Mapping[str, str]:
    """Return what the "Attributes:" of a type and of its bases say, by field."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        name = ""
        _, _, attributes = inspect.cleandoc(one.__dict__.get("__doc__") or "").partition(
            "\nAttributes:\n"
        )
        for line in attributes.split("\n"):
            if begins := _FIELD.fullmatch(line):
                name, found[begins[1]] = begins[1], begins[2]
            elif name and line.strip():
                found[name] += " " + line.strip()
    return found


def summary(kind: type) -> str:
    """Return the docstring of a type without its attributes."""
    return inspect.cleandoc(kind.__doc__ or "").partition("\nAttributes:\n")[0].strip()


def struct_types(kinds: Iterable[Any]) -> Mapping[str, type]:
    """Return the struct types that make up `kinds`, by their name in a JSON schema."""
    found: dict[str, set[type]] = {}
    pending: list[Any] = list(msgspec.inspect.multi_type_info(kinds))
    while pending:
        info = pending.pop()
        if isinstance(info, msgspec.inspect.StructType):
            named = found.setdefault(info.cls.__name__, set())
            if info.cls in named:
                continue
            named.add(info.cls)
        for name in getattr(info, "__struct_fields__", ()):
            value = getattr(info, name)
            pending.extend(value if isinstance(value, tuple) else [value])
    return {
        name if len(named) == 1 else f"{kind.__module__}.{kind.__qualname__}": kind
        for name, named in found.items()
        for kind in named
    }


__all__ = ["field_descriptions", "struct_types", "summary"]
