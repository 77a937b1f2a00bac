"""Fuzz the bounds on JSON's structure.

They refuse what passes them, wherever it stands, and leave all other JSON alone.

    python -m tests.fuzz.fuzz_structure --executions 1000000 [--seed 1]
    python -m tests.fuzz.fuzz_structure --atheris FOLDER -runs=100000 -max_len=128

An input is a byte that says how much is looked at in one go, and texts with bytes of 255 between
them. The second form is guided by coverage and takes libFuzzer's options; FOLDER receives what
reaches something new. `atheris` keeps the result of every comparison of arrays, about 1 GB in
100,000 executions: most is done by the first form, for which the few edges there are is enough.
"""

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.fuzz.guided import Mutation, instrumented, run
from tests.fuzz.json_mutation import JsonMutation
from tests.fuzz.mutation import mutated

CORPUS = Path(__file__).parent / "corpus" / "structure"
LIMITS = {
    "MAX_CONTAINERS": 9, "MAX_KEYS": 6, "MAX_STRINGS": 10, "MAX_ESCAPES": 12, "MAX_SPACES": 14,
}  # fmt: skip
"""Lowered so that small texts reach them.

That of keys stays the least: texts of no more bytes are not looked at.
"""
_BLOCKS = (2, 5, 16, 31, 64, 64, 4096, 4096)
_SPACE = bytes(range(33))
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_READABLE = re.compile(rb'(?:[^"\\]++|' + _STRING.pattern + rb")*+", re.DOTALL)
_BETWEEN = b"\xff"

WORDS = (
    b"{", b"}", b"[", b"]", b":", b",", b'"', b"\\", b'\\"', b"\\\\", b"\\u0041", b" ", b" " * 15,
    b"\t", b"\n", b"[" * 10, b"[{:\\\\]}", b'"a":', b'"",' * 11,
    b'"a":1,' * 7, b'"\\\\"', b"\\" * 13, b'"[[[[[[[[[["', b"\xff", b"\xc3\xa9", b"null", b"1.5",
)  # fmt: skip


@cache
def _parts() -> Any:
    """What is fuzzed: imported late, so that it can be instrumented."""
    from inlay.base.errors import InvalidRequestError
    from inlay.http.bodies import structure

    return SimpleNamespace(refused=InvalidRequestError, structure=structure)


@contextmanager
def small_limits() -> Iterator[None]:
    """While it is entered, the limits above hold."""
    structure = _parts().structure
    before = {name: getattr(structure, name) for name in (*LIMITS, "_BLOCK")}
    try:
        _set(structure, LIMITS)
        yield
    finally:
        _set(structure, before)


def _set(owner: Any, values: Mapping[str, int]) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


def counted(text: bytes) -> tuple[Counter[str], bool]:
    """The structure of a text, its strings taken out, and whether it may be JSON.

    What has a backslash outside of strings is none: it is counted up to there, where a parser ends.
    """
    readable = _READABLE.match(text)
    assert readable is not None
    end = readable.end()
    begun = text[end : end + 1] == b'"'
    may_be_json = begun or end == len(text)
    rest, strings = _STRING.subn(b"", text[:end])
    found = {
        "MAX_CONTAINERS": rest.count(b"[") + rest.count(b"{"),
        "MAX_KEYS": rest.count(b":"),
        "MAX_ESCAPES": text.count(b"\\", 0, len(text) if may_be_json else end),
        "MAX_SPACES": len(rest) - len(rest.translate(None, _SPACE)),
        "quotes": 2 * strings + begun,
    }
    return Counter(found), may_be_json


def check(data: bytes) -> bool:
    """Check texts of one request together, or a single one also by what was counted of it.

    Returns:
        Whether they were let pass together.

    Raises:
        AssertionError: what passes a bound was let pass, or what is within them all refused.
        Exception: anything but an `InvalidRequestError` came out.
    """
    how = data[0] if data else 0
    _parts().structure._BLOCK = _BLOCKS[how % len(_BLOCKS)]
    texts = data[1:].split(_BETWEEN)
    for text in texts:
        _check_counts(text)
    return _compare(texts, known=len(texts) == 1 and how & 64 == 0)


def _compare(texts: Sequence[bytes], *, known: bool) -> bool:
    """Compare what is said of `texts` with what they hold; whether they were let pass."""
    structure = _parts().structure
    counts = structure.count(texts[0]) if known else None
    message = None
    try:
        structure.check_structure(*map(bytearray, texts), counted=counts, where="it")
    except _parts().refused as refusal:
        message = refusal.message
    found: Counter[str] = Counter()
    for text in texts:
        more, is_json = counted(text)
        found += more
        if not is_json:
            # Of what follows, all or nothing may count: none of it is parsed.
            assert message is not None or not _passed(found), (found, message)
            return message is None
    passed = _passed(found)
    assert (message is not None) == bool(passed), (found, message)
    assert message is None or any(f"more than {LIMITS[name]} " in message for name in passed)
    return message is None


def _passed(found: Mapping[str, int]) -> list[str]:
    totals = {**found, "MAX_STRINGS": found.get("quotes", 0) // 2}
    return [name for name, most in LIMITS.items() if totals.get(name, 0) > most]


def _check_counts(text: bytes) -> None:
    """Every character counts, wherever it stands."""
    counts = _parts().structure.count(text)
    plain = (len(text), *(text.count(character) for character in b'{[:,"\\'))
    assert tuple(counts)[:7] == plain
    assert counts.spaces == len(text) - len(text.translate(None, _SPACE))
    assert counts.wide == (not text.isascii() or b"\\u" in text)


@cache
def seeds() -> list[bytes]:
    """Texts just within each bound and just beyond it: where mutation starts."""
    texts: list[bytes] = []
    for extra in (0, 1):
        values: list[Any] = [
            [[]] * (LIMITS["MAX_CONTAINERS"] - 1 + extra),
            {str(number): number for number in range(LIMITS["MAX_KEYS"] + extra)},
            ["a"] * (LIMITS["MAX_STRINGS"] + extra),
            ['"'] * (LIMITS["MAX_ESCAPES"] // 2 - 2) + ["\\"] * 2 + ['"'] * extra,
        ]
        texts += [json.dumps(value, separators=(",", ":")).encode() for value in values]
        texts.append(b"[" + b" \t\n\r" * 3 + b" " * (2 + extra) + b"1]")
    texts += [
        json.dumps({"a": "[{: " * 12, "b": 'é\\\\"'}, ensure_ascii=False).encode(),
        b'{"a":1}' + _BETWEEN + b'{"b":[' + b'"",' * 4 + b'""]}',
        b'["a\\\\","\\\\\\"' + b"[" * 12 + b'"]',
        b'\\"[[[[[[[[[[[[[[',
        b'"' + b"[" * 12,
        b"",
        _BETWEEN * 3,
        b'["\\u00e9"]',
    ]
    return [bytes((number * 37 % 128,)) + text for number, text in enumerate(texts)]


def corpus() -> list[bytes]:
    """The inputs in the repository."""
    return [path.read_bytes() for path in sorted(CORPUS.iterdir())]


def fuzz(executions: int, seed: int) -> int:
    """Check `executions` mutations of the corpus; how many were let pass."""
    rng = random.Random(seed)
    inputs = corpus()
    passed = 0
    with small_limits():
        for number in range(executions):
            data = _MUTATIONS[number % 2](rng.choice(inputs), rng)[:96]
            try:
                passed += check(data)
            except BaseException:
                Path("crash.bin").write_bytes(data)
                raise
    return passed


_restructured = JsonMutation([b'{"a":[{"b":"c"}],"d":{"e":"\\n"}}'], ())
_MUTATIONS: tuple[Mutation, ...] = (
    lambda data, rng: mutated(data, seeds(), WORDS, rng),
    lambda data, rng: data[:1] + _restructured(data[1:], rng),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the module's docstring says."""
    parser = argparse.ArgumentParser(description="Fuzz the bounds on JSON's structure.")
    parser.add_argument("--executions", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--atheris", nargs=argparse.REMAINDER, help="libFuzzer's arguments")
    options = parser.parse_args(arguments)
    if options.atheris is None:
        passed = fuzz(options.executions, options.seed)
        print(f"{options.executions} executions, {passed} let pass")
        return
    with instrumented("inlay.http.bodies.structure"):
        _parts()
    with small_limits():
        run(check, _MUTATIONS, options.atheris, [CORPUS])


if __name__ == "__main__":
    main()
