"""Arguments of tool calls as objects, whatever the model wrote."""

from typing import Any

import msgspec

_DEPTH = 48
"""Levels of nesting beyond which arguments stay text: requests and templates have bounds."""

_TWICE = 64 * 1024
"""Characters of arguments that were encoded twice, beyond which they stay text."""


def read_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call as an object, which chat templates and clients read.

    No text and `null` are no arguments. An object that was encoded twice is that object. All else,
    as arguments that were cut off, is the only value, under `unparsed`: nothing of it is lost.
    """
    value = _decoded(text) if text.strip() else None
    if isinstance(value, str) and len(value) <= _TWICE:
        value = _decoded(value)
    if isinstance(value, dict) and not _deep(value):
        return value
    return {} if value is None else {"unparsed": text}


def _decoded(text: str) -> object:
    """Return the value of a JSON text, or the text itself."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return text


def _deep(value: dict[str, Any]) -> bool:
    level: list[dict[str, Any] | list[Any]] = [value]
    for _ in range(_DEPTH):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True
