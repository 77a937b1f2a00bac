"""Fuzz the parsers of tool calls, and the types that schemas allow.

A model's text says the same whatever pieces it comes in, and a text without calls is the content.
The types of a schema and of a constant, either or both, hold the constant's, or nothing else.

    python -m tests.fuzz.fuzz_tools calls --executions 1000000 [--seed 1]
    python -m tests.fuzz.fuzz_tools types --atheris FOUND -runs=10000000 -max_len=512
"""

import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

from tests.fuzz.guided import instrumented, run
from tests.fuzz.mutation import mutated

VALUES: tuple[Any, ...] = (None, True, 1, 1.5, "a", "", [], [1, "a"], {}, {"a": 1})
SCHEMAS: tuple[Any, ...] = (
    {"type": ["string", "null"]},
    {"$defs": {"a": {"type": "integer"}}, "$ref": "#/$defs/a"},
    {"allOf": [{"anyOf": [{"type": "number"}, {"type": "array"}]}, {"not": {"type": "null"}}]},
    {"oneOf": [{"const": None}, {"enum": ["a", 1, 1.5]}], "definitions": {"b": True}},
    {"if": {"type": "object"}, "then": {"required": ["a"]}, "else": {"type": "string"}},
    {"properties": {"a": {"$ref": "#"}}, "additionalProperties": False, "minimum": 2},
    {"$id": "urn:a", "$defs": {"c": {"$anchor": "x", "items": {}}}, "$ref": "#x"},
)
_MAX_PIECES = 8


def check_calls(data: bytes) -> bool:
    """Parse a text by every parser, whole and in pieces; True if one of them finds a call."""
    from tests.render.test_parsers import MAKERS, read

    text = data.decode("utf-8", "replace")
    # Where it is cut is told by the text itself, so that an input says all.
    cuts = random.Random(crc32(data)).choices(range(len(text) + 1), k=_MAX_PIECES)
    pieces = [text[low:high] for low, high in pairwise(sorted({0, len(text), *cuts}))]
    found = False
    for number, make in enumerate(MAKERS):
        whole = read(make, [text])
        assert read(make, pieces) == whole, (number, pieces)
        if whole.tool_calls:
            found = True
        elif number < 5:
            assert whole.content == text, number
    return found


def check_types(data: bytes) -> bool:
    """Read the types of a schema; True if it is an object that leaves some types out."""
    from inlay.render.json_schema import TYPES, SchemaTypes, type_of

    try:
        schema = json.loads(data)
    except (ValueError, RecursionError):
        return False
    if not isinstance(schema, dict):
        return False
    for value in VALUES:
        const = {"const": value}
        either, both = {"anyOf": [schema, const]}, {"allOf": [schema, const]}
        assert type_of(value) in SchemaTypes(either, hints=False).of(either), value
        assert SchemaTypes(both, hints=False).of(both) <= {type_of(value)}, value
    types = SchemaTypes(schema).of(schema)
    declared = SchemaTypes(schema).of_property("a")
    assert types <= TYPES
    assert declared is None or declared <= TYPES
    SchemaTypes(schema).apart([schema, *schema.values()])
    return types < TYPES


WORDS = (
    b'"type":', b'"string"', b'"null"', b'"integer"', b'"$ref":', b'"#"', b'"#/$defs/a"', b'"allOf":[', b'"anyOf":[', b'"oneOf":[', b'"enum":[', b'"const":',
    b'"not":', b'"$defs":{', b"true", b"false", b"null", b"{}", b"[]", b'"nullable":true', b'"properties":{', b'"a":',
)  # fmt: skip


def words(target: str) -> tuple[bytes, ...]:
    """Pieces that mean something to a target."""
    if target == "types":
        return WORDS
    from tests.render.test_parsers import _WORDS as SAID

    return tuple(word.encode() for word in SAID)


def seeds(target: str) -> list[bytes]:
    """Inputs to begin with."""
    if target == "types":
        return [json.dumps(schema).encode() for schema in SCHEMAS]
    said = words(target)
    return [b"".join(said[start : start + 6]) for start in range(0, len(said), 3)]


TARGETS: dict[str, Callable[[bytes], bool]] = {"calls": check_calls, "types": check_types}


def fuzz(target: str, executions: int, seed: int) -> int:
    """Check `executions` mutations of the seeds; how many meant something."""
    rng, inputs, said = random.Random(seed), seeds(target), words(target)
    meant = 0
    for _ in range(executions):
        data = mutated(rng.choice(inputs), inputs, said, rng)
        try:
            meant += TARGETS[target](data)
        except BaseException:
            Path("crash.bin").write_bytes(data)
            raise
    return meant


def main(arguments: Sequence[str]) -> None:
    """Run what the module's docstring says."""
    target, mode, *options = arguments
    if mode == "--executions":
        seed = int(options[2]) if len(options) > 2 else 1
        print(fuzz(target, int(options[0]), seed), "meant something")
        return
    with instrumented("inlay.render.parsers", "inlay.render.json_schema"):
        import inlay.render.json_schema
        import inlay.render.parsers  # noqa: F401
    inputs, said = seeds(target), words(target)
    with tempfile.TemporaryDirectory() as started:
        for number, data in enumerate(inputs):
            (Path(started) / str(number)).write_bytes(data)
        run(
            TARGETS[target],
            [lambda data, rng: mutated(data, inputs, said, rng)],
            options,
            [Path(started)],
        )


if __name__ == "__main__":
    main(sys.argv[1:])
