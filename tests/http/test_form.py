"""Forms of text fields and one file: in any order, in any pieces, within their bounds."""

import errno
import json
from io import BytesIO
from itertools import pairwise
from typing import Any, BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.base.errors import InlayError, OverloadedError
from inlay.http.bodies.form import MAX_FIELD_BYTES, MAX_FIELDS, FieldForm
from tests.http.recorded.record import FILE, LINE

RECORDED: list[dict[str, str]] = json.loads(FILE.read_text())
BOUNDARY = "b0und-ary"


def part(name: str, data: bytes, more: str = "") -> bytes:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
    return head.encode() + data + b"\r\n"


def body_of(*parts: bytes) -> bytes:
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


def read(
    body: bytes, boundary: str = BOUNDARY, cuts: list[int] | None = None, limit: int = 2000
) -> tuple[FieldForm, bytes]:
    spool = BytesIO()
    form = FieldForm(boundary, "file", spool, max_file_bytes=limit, flag="--max-file-bytes")
    edges = [0, *sorted(min(cut, len(body)) for cut in cuts or []), len(body)]
    for start, stop in pairwise(edges):
        form.feed(body[start:stop])
    form.close()
    assert form.file_bytes == len(spool.getvalue())
    return form, spool.getvalue()


def refusal(*parts: bytes, limit: int = 2000) -> tuple[int, str, str | None]:
    with pytest.raises(InlayError) as caught:
        read(body_of(*parts), limit=limit)
    return caught.value.status, caught.value.message, caught.value.param


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda item: item["client"])
@given(cuts=st.lists(st.integers(0, 900), max_size=8))
def test_the_form_of_every_client_is_read_in_whatever_pieces(
    recorded: dict[str, str], cuts: list[int]
) -> None:
    boundary = recorded["content_type"].partition("boundary=")[2].strip('"')
    form, file = read(recorded["body"].encode("latin-1"), boundary, cuts)
    assert file == LINE
    assert form.filename.endswith(".jsonl")
    if form.text("purpose") is None:
        assert form.text("model") == "m"
        assert form.many("timestamp_granularities") == ["word", "segment"]
    else:
        assert form.text("purpose") == "batch"
        expires = form.group("expires_after")
        assert expires in ({}, {"anchor": "created_at", "seconds": "3600"})
        assert bool(expires) == recorded["client"].startswith("openai")


def test_fields_before_and_after_the_file_give_the_same_form() -> None:
    file, purpose = part("file", b"{}", '; filename="a.jsonl"'), part("purpose", b"batch")
    for body in (body_of(file, purpose), body_of(purpose, file)):
        form, data = read(body)
        assert (data, form.filename, form.text("purpose")) == (b"{}", "a.jsonl", "batch")


def test_a_file_name_has_no_directories_and_may_hold_quotes() -> None:
    form, _ = read(body_of(part("file", b"", '; filename="C:\\\\x\\\\..\\\\a\\"b.jsonl"')))
    assert form.filename == 'a"b.jsonl'
    assert len(read(body_of(part("file", b"", f'; filename="{"a" * 3000}"')))[0].filename) == 255


def test_what_is_no_such_form_is_refused_by_name() -> None:
    file = part("file", b"x", '; filename="a"')
    assert refusal(part("purpose", b"batch")) == (
        400,
        "the form has no file; send it as its field 'file'",
        "file",
    )
    assert refusal(file, file)[1] == "the body has two files 'file'"
    assert "has a file in its field 'purpose'" in refusal(part("purpose", b"", '; filename="a"'))[1]
    assert refusal(part("a", b"\xff"), file)[1] == "field 'a' is not UTF-8"
    status, message, param = refusal(part("file", b"12345"), limit=4)
    assert (status, param) == (413, "file")
    assert message == "file is over the limit of 4 bytes (--max-file-bytes)"
    assert refusal(part("a", bytes(MAX_FIELD_BYTES + 1)), file)[0] == 413
    assert "more than 128 fields" in refusal(*[part("a", b"")] * (MAX_FIELDS + 1), file)[1]
    form, _ = read(body_of(part("purpose", b"a"), part("purpose", b"b"), file))
    with pytest.raises(InlayError, match="purpose was given 2 times"):
        form.text("purpose")


def test_a_full_disk_is_an_error_of_the_server_that_may_be_tried_again() -> None:
    class Full(BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    spool: BinaryIO = Full()
    form = FieldForm(BOUNDARY, "file", spool, max_file_bytes=9, flag="--max-file-bytes")
    with pytest.raises(OverloadedError, match="no room for the file"):
        form.feed(body_of(part("file", b"x")))
