"""Values of a request as error messages quote them.

A quote is short, costs little whatever the value is, and never holds a long text in full.
"""

from collections.abc import Mapping

import msgspec

_CHARACTERS = 60
"""Maximum characters of a quoted value."""
_KEYS = 8
"""Maximum number of keys of an object that are named, each of up to `_KEY` characters."""
_KEY = 40


def shown_value(value: object) -> str:
    """Return a client's value in short form; of an object, its keys."""
    if isinstance(value, str):
        return repr(value[:_CHARACTERS]) + ("..." if len(value) > _CHARACTERS else "")
    if isinstance(value, Mapping):
        return f"an object with {_keys(value)}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return msgspec.json.encode(value).decode()[:_CHARACTERS]


def shown_at(value: Mapping[str, object], key: str) -> str:
    """Return the value of a client's object at `key` in short form.

    If the key is missing, name the keys the object has: one may be a misspelling.
    """
    if key in value:
        return shown_value(value[key])
    return f"nothing beside {_keys(value)}" if value else "nothing"


def _keys(value: Mapping[str, object]) -> str:
    named = [repr(str(key)[:_KEY]) for _, key in zip(range(_KEYS), value, strict=False)]
    return ", ".join([*named, *(["..."] if len(value) > _KEYS else [])]) or "no fields"
