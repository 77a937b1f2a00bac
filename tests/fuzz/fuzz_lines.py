"""Fuzz the reader of batch files: where lines begin and end, and what each of them asks for.

    python -m tests.fuzz.fuzz_lines --executions 1000000 [--seed 1]
    python -m tests.fuzz.fuzz_lines --atheris FOLDER -runs=10000000 -max_len=512

An input is a byte that says into which pieces the file is cut and at which of its lines reading
begins, and the file. The second form needs `atheris` and takes libFuzzer's options; FOLDER receives
what reaches something new.
"""

import json
import random
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.fuzz.guided import instrumented, run
from tests.fuzz.mutation import mutated

MAX_BYTES = 96
"""Of a line, lowered so that small files reach it."""
_SIZES = (3, 4, 5, 6, 8, 13, 21, 34, 40, 47, 55, 64, 89, 97, 144, 4096)
"""Bytes of the pieces that a file may be kept in."""

WORDS = (
    b"\n", b"\n\n\n", b"\r\n", b" ", b"\t", b"\xef\xbb\xbf", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"null", b"{}", b"[[],[]]", b"1e999", b"\xff",
    b'"custom_id":', b'"method":', b'"url":', b'"body":', b'"POST"', b'"/v1/a"', b'"\\u0061"', b'"\\ud800"', b'"seed":1', b'"body":{}', b"A" * 100,
)  # fmt: skip


@cache
def _parts() -> Any:
    """What is fuzzed: imported late, so that it can be instrumented."""
    from inlay_batches import lines, matrix
    from inlay_batches.records import Place

    return SimpleNamespace(lines=lines, matrix=matrix, Place=Place)


def check(data: bytes) -> bool:
    """Cut `data` into lines in several pieces and read each line; True if one may be run.

    Raises:
        AssertionError: a line is another than the plainest reader finds.
        Exception: anything but a `LineError` came out.
    """
    how, file = (data[0], data[1:]) if data else (0, b"")
    expected = _plain(file)
    begin = expected[how >> 4 & 7 : (how >> 4 & 7) + 1]
    first = begin[0] if begin else None
    found = _cut(file, _SIZES[how & 15], first)
    assert found == (expected if first is None else expected[expected.index(first) :])
    endpoint = "/v1/a" if how & 128 else None
    return bool(sum(_check_line(line, endpoint) for line in found))


def _plain(file: bytes) -> list[Any]:
    """The lines that are not blank, read in the plainest way."""
    found, offset = [], 0
    for number, whole in enumerate(file.split(b"\n")):
        end = offset + len(whole) + 1
        text = (whole.removeprefix(b"\xef\xbb\xbf") if number == 0 else whole).strip(b" \t\r")
        if len(whole) > MAX_BYTES:
            found.append(_parts().lines.Line(number, offset, end, None))
        elif text:
            found.append(_parts().lines.Line(number, offset, end, text))
        offset = end
    return found


def _cut(file: bytes, size: int, first: Any) -> list[Any]:
    parts = _parts()
    place = parts.Place() if first is None else parts.Place(first.number, first.offset)
    cutter = parts.lines._Cutter(place, MAX_BYTES)
    found = []
    # Of the pieces that end before it nothing is read.
    begins = [start for start in range(0, len(file), size) if start + size > place.offset]
    for start in begins:
        piece = file[max(start, place.offset) : start + size]
        found += cutter.lines(piece, start + size >= len(file))
    return found


def _check_line(line: Any, endpoint: str | None) -> bool:
    lines = _parts().lines
    try:
        asked = lines.read_line(line, endpoint, MAX_BYTES)
    except lines.LineError as error:
        _check_message(error.message)
        return False
    whole = _plainly(line.data)
    assert (whole["custom_id"], whole["method"]) == (asked.custom_id, "POST")
    assert asked.url == whole["url"] == (endpoint or asked.url)
    body = _plainly(asked.body)
    assert body == whole["body"]
    seeded = _plainly(lines.with_seed(asked.body, 5))
    assert seeded == {**body, "seed": 5}
    form = {"encoding_format": "base64", "embed_dtype": "float32"}
    assert _plainly(_parts().matrix.with_base64(asked.body)) == {**body, **form}
    return True


def _plainly(text: bytes) -> Any:
    # What is no UTF-8 is found where a body is read.
    return json.loads(text.decode("utf-8", "surrogateescape"))


def _check_message(message: str) -> None:
    assert len(message) < 1000, message
    assert message.isprintable(), message


def seeds() -> list[bytes]:
    """Files of several lines, and some that are refused: where mutation starts."""
    plain = b'{"custom_id":"a","method":"POST","url":"/v1/a","body":{}}'
    lines = (
        plain,
        b' {"body":{"seed":null },"url":"/v1/a","method":"POST","custom_id":"\\u00e9"} \r',
        b'{"custom_id":[[],[]],"method":"POST","url":"/v1/a","body":{}}',
        b'{"custom_id":"a","method":"GET","url":"/v1/a","body":{}}',
        b'{"custom_id":"a","method":"POST","url":"/v1/../a","body":{}}',
        b'{"custom_id":"a","method":"POST","url":"/v1/a","body":[1]}',
        b'{"custom_id":"","method":"POST","url":"/v1/a"}',
        b"A" * 97,
        b"[]",
    )
    files = [*lines, b"\n".join(lines), b"\xef\xbb\xbf" + plain + b"\n\n\n \n" + plain + b"\n"]
    return [bytes((number * 37 % 256,)) + file for number, file in enumerate(files)]


def fuzz(executions: int, seed: int) -> int:
    """Check `executions` mutations of the seeds; how many had a line that may be run."""
    rng, inputs, accepted = random.Random(seed), seeds(), 0
    for _ in range(executions):
        data = mutated(rng.choice(inputs), inputs, WORDS, rng)
        try:
            accepted += check(data)
        except BaseException:
            Path("crash.bin").write_bytes(data)
            raise
    return accepted


def main(arguments: Sequence[str]) -> None:
    """Run what the module's docstring says."""
    mode, *options = arguments
    if mode == "--executions":
        print(fuzz(int(options[0]), int(options[2]) if len(options) > 2 else 1), "accepted")
        return
    with instrumented("inlay_batches.lines"):
        _parts()
    inputs = seeds()
    with tempfile.TemporaryDirectory() as started:
        for number, data in enumerate(inputs):
            (Path(started) / str(number)).write_bytes(data)
        run(check, [lambda data, rng: mutated(data, inputs, WORDS, rng)], options, [Path(started)])


if __name__ == "__main__":
    main(sys.argv[1:])
