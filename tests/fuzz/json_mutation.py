"""Random changes to what a JSON body says.

It stays JSON, so that what lies behind the parser is reached.
"""

import random
from collections.abc import Iterable
from typing import Any

import msgspec

_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 5, 128, 1 << 31, (1 << 63) - 1, 1 << 63, -(1 << 63), (1 << 64) - 1, 0.0, 0.5, 1.5, -2.5, 100.5, 1e308, 1e-308,
    "", "a", "0", "1", "auto", "none", "required", "text", "token_ids", "prompt_embeds", "function", "json_object", "json_schema", "user", "system",
    "assistant", "tool", "<|im_start|>", "<|im_end|>", "\0", "é", "𝄞", "A" * 64, "A" * 63 + "=", [], {}, [1, 2], ["a"], [[1]], {"type": "text"},
    {"type": "text", "text": "a"}, {"type": "token_ids", "token_ids": [1]}, {"ref": "pe-1"}, {"part": "a"},
)  # fmt: skip
_MOST = 200
"""Places looked at in one body; a few of the deepest are not missed."""


class JsonMutation:
    """Changes bodies at random, with names and values that others have.

    Args:
        bodies: valid JSON, where names and values are taken from.
        names: more names that may mean something.
    """

    def __init__(self, bodies: Iterable[bytes], names: Iterable[str]) -> None:
        self._values: dict[str, list[Any]] = {name: [] for name in names}
        for body in bodies:
            for container, key in _places([msgspec.json.decode(body)]):
                if isinstance(key, str):
                    self._values.setdefault(key, []).append(container[key])
        self._names = list(self._values)

    def __call__(self, body: bytes, rng: random.Random) -> bytes:
        """`body` with one to four changes, or as it is where it is no JSON."""
        try:
            tree = [msgspec.json.decode(body)]
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            return body

        def below(limit: int) -> int:
            return int(rng.random() * limit)

        for _ in range(1 << below(3)):
            places = _places(tree)
            container, key = places[below(len(places))]
            value = container[key]
            match below(8):
                case 0 | 1:
                    container[key] = self._value(key, below)
                case 2 if container is not tree:
                    del container[key]
                case 3 if isinstance(value, str):
                    container[key] = _retyped(value, self._value(key, below), below)
                case 3 if isinstance(value, int) and abs(value) < 1 << 60:
                    container[key] = value + below(5) - 2
                case 4:
                    container[key] = (
                        [value]
                        if below(2)
                        else value[0]
                        if isinstance(value, list) and value
                        else {"type": value}
                    )
                case 5 if isinstance(value, list) and value:
                    value.insert(below(len(value) + 1), value[below(len(value))])
                case _:
                    target = value if isinstance(value, dict | list) else container
                    name = self._names[below(len(self._names))]
                    if isinstance(target, dict):
                        target[name] = self._value(name, below)
                    elif target is not tree:
                        target.insert(below(len(target) + 1), self._value(key, below))
        return _encoded(tree[0], body)

    def _value(self, name: object, below: Any) -> Any:
        known = self._values.get(name) if isinstance(name, str) else None
        if known and below(4):
            return _copied(known[below(len(known))])
        if below(8) == 0:
            any_name = self._values[self._names[below(len(self._names))]]
            return _copied(any_name[below(len(any_name))]) if any_name else None
        return _copied(_VALUES[below(len(_VALUES))])


def _places(tree: list[Any]) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    open_: list[Any] = [tree]
    while open_ and len(found) < _MOST:
        container = open_.pop()
        for key in container if isinstance(container, dict) else range(len(container)):
            found.append((container, key))
            if isinstance(container[key], dict | list):
                open_.append(container[key])
    return found


def _retyped(text: str, other: Any, below: Any) -> str:
    at, end = sorted((below(len(text) + 1), below(len(text) + 1)))
    piece = other if isinstance(other, str) else str(other)
    return text[:at] + (piece if below(2) else "") + text[end if below(2) else at :]


def _copied(value: Any) -> Any:
    # What is changed later must not change what it was taken from.
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _encoded(value: Any, otherwise: bytes) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (OverflowError, RecursionError):
        # An integer or a nesting that only the decoder takes.
        return otherwise
