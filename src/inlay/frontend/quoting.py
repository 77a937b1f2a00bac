"""What errors quote of a request.

Short, made in no time whatever it is, and never its texts in full.
"""

from collections.abc import Mapping

import msgspec

_CHARACTERS = 60
"""Of a client's value."""
_KEYS = 8
"""Of a client's object that are named, each of up to `_KEY` characters."""
_KEY = 40


def shown_value(value: object) -> str:
    """A client's value; of an object its keys."""
    if isinstance(value, str):
        return repr(value[:_CHARACTERS]) + ("..." if len(value) > _CHARACTERS else "")
    if isinstance(value, Mapping):
        return f"an object with {_keys(value)}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return msgspec.json.encode(value).decode()[:_CHARACTERS]


def shown_at(value: Mapping[str, object], key: str) -> str:
    """What a client's object has at `key`.

    Where that is nothing, the keys it has, of which one may be meant.
    """
    if key in value:
        return shown_value(value[key])
    return f"nothing beside {_keys(value)}" if value else "nothing"


def _keys(value: Mapping[str, object]) -> str:
    named = [repr(str(key)[:_KEY]) for _, key in zip(range(_KEYS), value, strict=False)]
    return ", ".join([*named, *(["..."] if len(value) > _KEYS else [])]) or "no fields"


__all__ = ["shown_at", "shown_value"]
