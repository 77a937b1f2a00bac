"""Fuzz the readers of multipart bodies: a request with its tensors, and fields with one file.

Framing has one reading, in whatever pieces a body comes, and all else is refused.

    python -m tests.fuzz.fuzz_multipart FOLDER -runs=10000000 -max_len=512

The arguments are libFuzzer's; FOLDER receives what reaches something new. Needs `atheris`. An input
is a byte that says into which pieces the body is cut and whether its length is known, the boundary,
a line's end, and the body.
"""

import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.fuzz.guided import instrumented, run
from tests.fuzz.mutation import mutated

CORPUS = Path(__file__).parent / "corpus" / "multipart"
MAX_BYTES, MAX_REQUEST_BYTES, MAX_HEADER_BYTES, MAX_FILES, FIRST = 128, 48, 96, 3, 32
MAX_TEXT_BYTES, MAX_FIELDS = 80, 4
"""The limits, and the memory a part of unknown length begins with.

Lowered so that small bodies reach them.
"""
_SIZES = (1, 3, 8, 13, 19, 26, 33, 41, 50, 60, 71, 83, 97, 113, 150, 4096)
"""Bytes of the pieces that a body may come in."""

WORDS = (
    b"\r\n", b"\r", b"\n", b"--", b"\r\n\r\n", b"\r\n--b", b"\r\n--b--", b"--b\r\n", b"\0", b'name="request"', b"name=request", b'name="a"', b"; ",
    b"form-data", b'Content-Disposition: form-data; name="request"\r\n\r\n', b'Content-Disposition: form-data; name="a"\r\n\r\n', b'\\"', b'"',
    b'; filename="b"', b"Content-Transfer-Encoding: binary\r\n", b"Content-Transfer-Encoding: base64\r\n", b"Content-Type: a/b\r\n", b"\xff", b"\xc3\xa9",
    b"A" * 32, b"A" * 100, b":", b"a: b\r\n", b"name*=a", b"=",
)  # fmt: skip


@cache
def _parts() -> Any:
    """What is fuzzed: imported late, so that it can be instrumented."""
    from inlay.base.errors import InlayError
    from inlay.http.bodies import form, framing, memory, multipart
    from inlay.tensors import ReadLimits

    return SimpleNamespace(
        InlayError=InlayError,
        memory=memory,
        multipart=multipart,
        form=form,
        framing=framing,
        limits=ReadLimits(max_bytes=MAX_BYTES),
    )


@contextmanager
def small_limits() -> Iterator[None]:
    """While it is entered, bodies are read under the limits above."""
    parts = _parts()
    lowered = [
        (parts.multipart, "MAX_REQUEST_BYTES", MAX_REQUEST_BYTES),
        (parts.multipart, "MAX_FILES", MAX_FILES),
        (parts.form, "MAX_FIELD_BYTES", MAX_REQUEST_BYTES),
        (parts.form, "MAX_TEXT_BYTES", MAX_TEXT_BYTES),
        (parts.form, "MAX_FIELDS", MAX_FIELDS),
        (parts.framing, "MAX_HEADER_BYTES", MAX_HEADER_BYTES),
        (parts.memory, "_FIRST", FIRST),
    ]
    before = [getattr(module, name) for module, name, _ in lowered]
    try:
        for module, name, low in lowered:
            setattr(module, name, low)
        yield
    finally:
        for (module, name, _), value in zip(lowered, before, strict=True):
            setattr(module, name, value)


class _Form:
    """A request and its tensors."""

    def __init__(self, boundary: str, declared: int | None) -> None:
        self.read = _parts().multipart.Form(boundary, declared, _parts().limits)

    def found(self) -> Any:
        files = {name: bytes(data.view) for name, data in self.read.parts.items()}
        return self.read.size, (self.read.request, files)


class _Fields:
    """Fields and one file, which is "a"."""

    def __init__(self, boundary: str, declared: int | None) -> None:
        self.spool = io.BytesIO()
        self.read = _parts().form.FieldForm(
            boundary, "a", self.spool, max_file_bytes=MAX_BYTES, flag="--max"
        )

    def found(self) -> Any:
        assert self.read.file_bytes == len(self.spool.getvalue())
        texts = [text.encode() for _, text in self.read._fields]
        return self.read._framing.size, (texts, self.spool.getvalue(), self.read.filename)


def _outcome(
    kind: Callable[[str, int | None], _Form | _Fields],
    boundary: str,
    body: bytes,
    declared: int | None,
    pieces: Sequence[bytes | bytearray],
) -> tuple[str, Any]:
    """ "form" and what it holds, or an error's name and what it says."""
    try:
        form = kind(boundary, declared)
        for piece in pieces:
            form.read.feed(piece)
            assert len(form.read._framing._pending) <= MAX_HEADER_BYTES + 4
        form.read.close()
    except _parts().InlayError as error:
        return _refusal(error)
    size, found = form.found()
    assert size == len(body)
    return "form", found


def _refusal(error: Any) -> tuple[str, Any]:
    assert 400 <= error.status < 500
    assert len(error.message) < 1000
    return type(error).__name__, (error.message, error.param)


def check(data: bytes) -> bool:
    """Read `data` in one piece, and in several, of known or unknown length: both must end alike.

    Returns:
        Whether it was accepted.

    Raises:
        AssertionError: they differ, or what was accepted does not say what it was taken for.
        Exception: anything but an `InlayError` of 400 to 499 came out.
    """
    head, _, body = data[1:].partition(b"\n")
    boundary = head.decode("latin-1")
    how = data[0] if data else 0
    size, first = _SIZES[how & 15], how >> 4 & 7
    pieces = [
        body[:first],
        *(body[start : start + size] for start in range(first, len(body), size)),
    ]
    accepted = False
    checks: list[tuple[type[_Form] | type[_Fields], Callable[..., None]]]
    checks = [(_Form, _check_form), (_Fields, _check_fields)]
    for kind, right in checks:
        outcome = _outcome(kind, boundary, body, len(body), [bytearray(body)])
        other = _outcome(kind, boundary, body, len(body) if how & 128 else None, pieces)
        # A field may reach its own limit first, or that of all fields.
        too_large = kind is _Fields and {outcome[0], other[0]} == {"BodyTooLargeError"}
        assert too_large or _alike(outcome, other), (outcome, other)
        if outcome[0] == "form":
            right(_contents(boundary.encode(), body), *outcome[1])
            accepted = True
    return accepted


def _alike(one: tuple[str, Any], other: tuple[str, Any]) -> bool:
    # How much of what is too large had come is all that may differ.
    return one == other or (
        one[0] == other[0] != "form" and _unnumbered(one[1]) == _unnumbered(other[1])
    )


def _unnumbered(error: tuple[str, str | None]) -> tuple[str, str | None]:
    return re.sub(r"\d+", "#", error[0]), error[1]


def _contents(boundary: bytes, body: bytes) -> list[bytes]:
    """RFC 7578 read in the plainest way: the contents of all parts."""
    before, *parts, end = (b"\r\n" + body).split(b"\r\n--" + boundary)
    assert before == b""
    assert end in (b"--", b"--\r\n")
    contents = []
    for part in parts:
        start, (headers, blank, content) = part[:2], part[2:].partition(b"\r\n\r\n")
        assert start == b"\r\n"
        assert blank
        assert b"content-disposition" in headers.lower()
        contents.append(content)
    return contents


def _check_form(contents: list[bytes], request: bytes, files: Mapping[str, bytes]) -> None:
    assert contents == [request, *files.values()]
    assert "request" not in files
    assert len(request) <= MAX_REQUEST_BYTES
    assert len(files) <= MAX_FILES
    assert all(len(content) <= MAX_BYTES for content in files.values())


def _check_fields(contents: list[bytes], texts: list[bytes], file: bytes, filename: str) -> None:
    assert any(
        contents == [*texts[:place], file, *texts[place:]] for place in range(len(texts) + 1)
    )
    assert len(texts) <= MAX_FIELDS
    assert all(len(text) <= MAX_REQUEST_BYTES for text in texts)
    assert sum(map(len, texts)) <= MAX_TEXT_BYTES
    assert len(file) <= MAX_BYTES
    assert "/" not in filename
    assert len(filename) <= 255


def seeds() -> list[bytes]:
    """Bodies of many shapes, and some that are refused: where mutation starts."""

    def part(disposition: bytes, content: bytes, more: bytes = b"") -> bytes:
        return (
            b"--b\r\n"
            + more
            + b"Content-Disposition: "
            + disposition
            + b"\r\n\r\n"
            + content
            + b"\r\n"
        )

    request = part(b'form-data; name="request"', b'{"a":1}')
    file = part(b'form-data; name="a"; filename="a.npy"', b"\r\n--\0" * 4, b"Content-Type: a/b\r\n")
    other = part(b"form-data;name=c", b"", b"content-transfer-encoding: Binary\r\n")
    quoted = part(b'FORM-DATA; filename="\\";name=x" ;\tname="d\xc3\xa9"', b"A" * 64)
    bodies = [
        request + b"--b--\r\n",
        request + file + b"--b--",
        request + file + other + quoted + b"--b--\r\n",
        request + file * 2 + b"--b--",
        file + request + b"--b--",
        request + part(b'form-data; name="a"', b"A" * 129) + b"--b--",
        part(b'form-data; name="request"', b"A" * 49) + b"--b--",
        request
        + other
        + part(b"form-data; name=e", b"", b"Content-Transfer-Encoding: base64\r\n")
        + b"--b--",
        request + b"--b\r\na: " + b"A" * 96 + b"\r\n\r\n",
        request + b"--b--\r\nmore",
        request[:-2],
        b"--b--",
    ]
    return [bytes((number * 37 % 256,)) + b"b\n" + body for number, body in enumerate(bodies)] + [
        b"\7\n" + request,
        b"\7b\xe9\n" + request,
    ]


def main(options: Sequence[str]) -> None:
    """Run what the module's docstring says."""
    bodies = "inlay.http.bodies"
    with instrumented(*(f"{bodies}.{name}" for name in ("multipart", "memory", "form", "framing"))):
        _parts()
    inputs = seeds()
    with small_limits():
        run(check, [lambda data, rng: mutated(data, inputs, WORDS, rng)], options, [CORPUS])


if __name__ == "__main__":
    main(sys.argv[1:])
