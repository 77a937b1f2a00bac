"""Extraction of base64 strings never changes the meaning of a body."""

import json
import tracemalloc
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.api.openai.completions.route import in_completion
from inlay.api.openai.schema.completions import CompletionRequest
from inlay.base.errors import EmbeddingsError, InlayError, InvalidRequestError
from inlay.http.bodies import base64_extractor as lift
from inlay.http.bodies.embeds import tensor_data
from inlay.http.parsed_request import parse_body
from inlay.messages.prompt import Buffer
from inlay.tensors import ReadLimits

LIMITS = ReadLimits(max_bytes=1024 * 1024)
DECODER = msgspec.json.Decoder(CompletionRequest)


def strings(request: CompletionRequest) -> list[str]:
    return tensor_data(in_completion(request))


def base64_text(num_bytes: int, seed: int = 0) -> str:
    return b64encode(Random(seed).randbytes(num_bytes)).decode()


def cut(
    body: bytes, at: list[int] | None = None, expected: int | None = None
) -> lift.ExtractedBody:
    """`body` as it is when it comes in pieces that begin at the places `at`."""
    running = lift.Base64Extractor(expected)
    for start, stop in pairwise([0, *sorted(at or []), len(body)]):
        running.feed(bytearray(body[start:stop]))
    return running.close()


def parse(
    body: bytes | lift.ExtractedBody, limits: ReadLimits = LIMITS
) -> lift.Parsed[CompletionRequest]:
    return parse_body(body, DECODER, strings, limits=lambda: limits, files_in=files)


def files(request: CompletionRequest) -> list[str]:
    """The base64 of a data: URL where text is expected."""
    url = request.user
    return [] if url is None or url[:5] != "data:" or "," not in url else [url.split(",", 1)[1]]


def outcome(body: bytes | lift.ExtractedBody) -> Any:
    """Parse a body as the server does.

    The request with its tensor data decoded, or the error it answers.
    """
    try:
        parsed = parse(body)
        data = [parsed.data(text, limits=LIMITS) for text in strings(parsed.request)]
        data += [parsed.data(text, limits=LIMITS) for text in files(parsed.request)]
    except InlayError as error:
        return error.message, error.param
    fields = msgspec.structs.asdict(parsed.request)
    if files(parsed.request):
        fields["user"] = fields["user"].split(",", 1)[0]
    return [value for name, value in fields.items() if name != "prompt_embeds"], data


def full_outcome(body: bytes) -> Any:
    """The same where nothing is ever lifted."""
    run, lift.RUN = lift.RUN, 1 << 60
    try:
        return outcome(body)
    finally:
        lift.RUN = run


def test_a_large_string_is_decoded_straight_from_the_body() -> None:
    text = base64_text(100_000)
    parsed = parse(json.dumps({"prompt_embeds": text, "max_tokens": 3}).encode())
    assert parsed.request.max_tokens == 3
    (nonce,) = strings(parsed.request)
    assert len(nonce) < 50
    assert parsed.data(nonce, limits=LIMITS) == Buffer(Random(0).randbytes(100_000))


def test_several_large_strings_keep_their_order() -> None:
    texts = [base64_text(60_000, seed) for seed in range(4)]
    parsed = parse(json.dumps({"prompt_embeds": texts}).encode())
    assert len(parsed.lifted) == 4
    data = [parsed.data(text, limits=LIMITS) for text in strings(parsed.request)]
    assert data == [Buffer(Random(seed).randbytes(60_000)) for seed in range(4)]


@pytest.mark.parametrize("length", [lift.RUN - 4, lift.RUN, lift.RUN + 4, 3 * lift.RUN])
@pytest.mark.parametrize("before", [0, 1, 77, lift.RUN - 20, lift.RUN])
def test_every_run_long_enough_is_found_wherever_it_stands(length: int, before: int) -> None:
    body = b'{"user":"' + b"-" * before + b'","prompt_embeds":"' + b"A" * length + b'"}'
    assert bool(parse(body).lifted) == (length >= lift.RUN)


def test_the_base64_of_a_large_data_url_is_decoded_straight_from_the_body() -> None:
    for head in ("data:image/png;base64,", "DATA:;base64,", "data:image/svg+xml;x=y;base64,"):
        body = json.dumps({"user": head + base64_text(100_000)}).encode()
        for at in ([], [30], [9, 12, 70_000]):
            parsed = parse(cut(body, at, len(body)))
            assert len(parsed.lifted) == (head[:5] == "data:")
            if parsed.lifted:
                (nonce,) = files(parsed.request)
                assert parsed.request.user == head + nonce
                assert parsed.lifted[nonce] == Buffer(Random(0).randbytes(100_000))


def test_a_large_string_where_text_is_expected_stays_text() -> None:
    text = "A" * 100_000
    parsed = parse(json.dumps({"prompt": text, "prompt_embeds": text}).encode())
    assert parsed.request.prompt == text
    assert not parsed.lifted


def test_large_text_that_is_no_base64_is_not_lifted() -> None:
    body = json.dumps(
        {"prompt": "some words " * 20_000, "prompt_embeds": base64_text(90_000)}
    ).encode()
    assert len(parse(body).lifted) == 1


def test_a_string_behind_an_escaped_quote_is_read_whole() -> None:
    body = b'{"user":"\\"' + b"A" * 100_000 + b'"}'
    parsed = parse(body)
    assert parsed.request.user == '"' + "A" * 100_000
    body = b'{"user":"' + b"\\\\" * 3 + b'","prompt_embeds":"' + b"AAAA" * 30_000 + b'"}'
    assert parse(body).lifted


def test_data_over_the_limit_is_refused_before_it_is_decoded() -> None:
    body = json.dumps({"prompt_embeds": base64_text(200_001)}).encode()
    assert parse(body, ReadLimits(max_bytes=200_001)).lifted
    with pytest.raises(EmbeddingsError, match="exceeds maximum size of 200000 bytes"):
        parse(body, ReadLimits(max_bytes=200_000))


def test_what_refuses_the_request_is_heard_before_anything_is_decoded() -> None:
    def refuse(_: CompletionRequest) -> list[str]:
        raise InvalidRequestError("not here")

    with pytest.raises(InvalidRequestError, match="not here"):
        parse_body(
            json.dumps({"prompt_embeds": "A" * 100_000}).encode(),
            DECODER,
            refuse,
            limits=lambda: LIMITS,
        )


def test_a_body_of_nothing_but_backslashes_or_quotes_is_searched_quickly() -> None:
    for body in (
        b"\\" * 8_000_000,
        b'"' * 8_000_000,
        (b"\\" * 70_000 + b'"' + b"A" * 70_000 + b'"') * 50,
    ):
        lift.Base64Extractor(len(body)).feed(body)


# Bodies are put together from fragments, with the threshold lowered so that the cases are small.
FRAGMENTS = [
    '"', '\\"', "\\\\", "\\", "\\/", "\\u0041", "{", "}", "[", "]", ",", ":", " ", "\n", "null", "1", "true", "\x01", "é",
    '"prompt_embeds":', '"prompt":', '"user":', '"unknown":', '{"prompt_embeds":"', '"}', '","', "=", "A" * 6, "QUJD" * 4,
    "QUJD" * 16, "A" * 63, "A" * 64 + "=" * 4, "/+" * 32, "-" * 64,
]  # fmt: skip
VALUES = st.sampled_from(
    ["QUJD" * 16, "QUJD" * 40, "A" * 65, "QUI=" * 16, "QUJD" * 20 + "QQ==", "A\\/" * 24, "\\u0051UJD" * 20, "x\\\"" + "A" * 64,
     *("QUJD" * 10 + odd + "QUJD" * 10 for odd in ("\x1f", "é", "\\/", "\\u0041", "\\", " ", "=", "\\n", "-")),
     "data:;base64," + "QUJD" * 20, "data:a/b;base64," + "QUJD" * 16 + "QQ==", "data:a/b;base64," + "A" * 65,
     "data:a/b," + "QUJD" * 20, "data:,;base64," + "QUJD" * 20, "data\\u003aa;base64," + "QUJD" * 20, "xdata:a;base64," + "QUJD" * 20,
     "QUJD" * 16 + "\\", "ABC " * 20, "", "é" * 70, "\\\\" + "A" * 68, "QUJD" * 16 + "\x1f", "A" * 30 + "\\n" + "A" * 64]
)  # fmt: skip
KEYS = st.sampled_from(
    ["prompt_embeds", "prompt_embeds", "prompt", "user", "unknown", "A" * 64, "suffix"]
)


@st.composite
def objects(draw: st.DrawFn) -> bytes:
    """Objects of string members, duplicates and lists among them, some cut short."""
    members = []
    for _ in range(draw(st.integers(1, 4))):
        key, value = draw(KEYS), draw(VALUES)
        shape = draw(
            st.sampled_from(['"%s"', '["%s"]', '["%s","QUJD"]', '{"a":"%s"}', '[{"ref":"%s"}]'])
        )
        members.append(f'"{key}":{shape.replace("%s", value)}')
    space = draw(st.sampled_from(["", " ", "\n"]))
    body = ("{" + f",{space}".join(members) + "}").encode()
    return body[: draw(st.integers(0, len(body)))] if draw(st.integers(0, 5)) == 0 else body


@contextmanager
def small() -> Iterator[None]:
    """Within it short strings are lifted too, and few bytes looked at in one go."""
    names = {"RUN": 64, "_SAMPLE": 16, "STEP": 100, "_KEPT": 200}
    before = {name: getattr(lift, name) for name in names}
    try:
        for name, value in names.items():
            setattr(lift, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(lift, name, value)


def lowered(body: bytes, at: list[int] | None = None) -> Any:
    with small():
        return outcome(cut(body, at, len(body)))


@st.composite
def cut_up(draw: st.DrawFn) -> tuple[bytes, list[int]]:
    """Objects, and where the pieces begin in which they come."""
    body = draw(objects())
    return body, draw(st.lists(st.integers(0, len(body)), max_size=6))


@pytest.mark.thorough
@settings(max_examples=600)
@given(cut_up())
def test_a_lifted_body_says_what_the_full_parser_says_however_it_comes(
    case: tuple[bytes, list[int]],
) -> None:
    body, at = case
    assert lowered(body, at) == full_outcome(body)


@given(cut_up(), st.booleans())
def test_a_body_that_was_cut_up_can_be_put_together(
    case: tuple[bytes, list[int]], known: bool
) -> None:
    body, at = case
    with small():
        lifted = cut(body, at, len(body) if known else None)
    assert lifted.reassembled() == body
    assert len(lifted) == len(body)


def test_base64_whose_last_bits_mean_nothing_can_be_put_together() -> None:
    body = b'{"prompt":"' + b"QUJD" * 30_000 + b'QUJ=","user":"' + b"QUJD" * 30_000 + b'QR=="}'
    lifted = cut(body)
    assert len(lifted.runs) == 2
    assert lifted.reassembled() == body


def test_what_is_kept_of_a_body_is_what_it_decodes_to() -> None:
    data = Random(0).randbytes(3_000_000)
    body = json.dumps({"prompt_embeds": b64encode(data).decode(), "max_tokens": 3}).encode()
    tracemalloc.start()
    try:
        lifted = cut(body, list(range(0, len(body), 50_000)), len(body))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [run.data for run in lifted.runs] == [Buffer(data)]
    assert peak < len(data) + 2_000_000


def test_decoded_strings_go_where_they_are_told() -> None:
    rooms: list[memoryview] = []

    def room(num_bytes: int) -> memoryview:
        rooms.append(memoryview(bytearray(num_bytes)))
        return rooms[-1]

    data = Random(0).randbytes(100_000)
    body = json.dumps({"prompt_embeds": b64encode(data).decode()}).encode()
    running = lift.Base64Extractor(len(body), room)
    running.feed(body)
    (run,) = running.close().runs
    assert run.data == Buffer(data)
    assert run.data.view.obj is rooms[0].obj
    assert len(rooms[0]) < len(data) + 100


def test_a_string_that_goes_on_after_base64_is_read_whole() -> None:
    for odd in ("-", "\\n", "é", "=" * 4):
        text = "QUJD" * 100_000 + odd + "QUJD" * 100_000
        body = ('{"user":"' + text + '","prompt_embeds":"' + "QUJD" * 100 + '"}').encode()
        parsed = parse(cut(body, list(range(0, len(body), 70_001)), len(body)))
        assert parsed.request.user == text.replace("\\n", "\n")
        assert not parsed.lifted


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=24))
def test_a_jumble_says_what_the_full_parser_says(fragments: list[str]) -> None:
    body = "".join(fragments).encode()
    assert lowered(body) == full_outcome(body)


@given(st.binary(max_size=300))
def test_bytes_say_what_the_full_parser_says(body: bytes) -> None:
    assert lowered(body) == full_outcome(body)


def test_a_large_body_is_put_together_in_steps_between_which_others_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = json.dumps({"input": "a" * (8 * lift.STEP)}).encode()
    given_way = 0

    def give_way() -> None:
        nonlocal given_way
        given_way += 1

    monkeypatch.setattr(lift, "yield_gil", give_way)
    assert cut(body).reassembled() == body
    assert given_way >= 8
