"""Multipart bodies: files beside a request, read as they come, in whatever pieces."""

import base64
import json
from collections.abc import Iterator
from email import message_from_bytes, policy
from itertools import pairwise
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.base.errors import InlayError
from inlay.http.bodies.framing import MAX_HEADER_BYTES
from inlay.http.bodies.multipart import MAX_FILES, MAX_REQUEST_BYTES, Form
from inlay.tensors import ReadLimits, write
from tests.live import Fleet, until
from tests.payloads import TEXT, embeds_of, error, post

BOUNDARY = "b0und-ary"
LIMITS = ReadLimits(max_bytes=2000)
GREEDY = {"max_tokens": 12, "temperature": 0, "return_token_ids": True}


def part(name: str, data: bytes, more: str = "") -> bytes:
    return (
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode()
        + data
        + b"\r\n"
    )


def body_of(*parts: tuple[str, bytes], end: bytes = b"--\r\n") -> bytes:
    return b"".join(part(*item) for item in parts) + f"--{BOUNDARY}".encode() + end


def read(
    body: bytes, cuts: list[int] | None = None, *, declared: bool = True
) -> tuple[bytes, dict[str, bytes]]:
    form = Form(BOUNDARY, len(body) if declared else None, LIMITS)
    edges = [0, *sorted(min(cut, len(body)) for cut in cuts or []), len(body)]
    for start, stop in pairwise(edges):
        form.feed(body[start:stop])
    form.close()
    return form.request, {name: bytes(data.view) for name, data in form.parts.items()}


def read_at_once(body: bytes) -> tuple[bytes, dict[str, bytes]]:
    form = Form(BOUNDARY, len(body), LIMITS)
    form.feed(bytearray(body))
    form.close()
    return form.request, {name: bytes(data.view) for name, data in form.parts.items()}


awkward = st.lists(
    st.sampled_from([b"\r", b"\n", b"-", b"\r\n", b"--", b"\r\n--", f"\r\n--{BOUNDARY[:-1]}".encode(), f"--{BOUNDARY[:-1]}".encode(), b"\0", b"ab"])
    | st.binary(max_size=9),
    max_size=30,
).map(b"".join)  # fmt: skip


@pytest.mark.thorough
@given(
    request=awkward, files=st.lists(awkward, max_size=4), cuts=st.lists(st.integers(0, 1500), max_size=40),
    declared=st.booleans(), end=st.sampled_from([b"--", b"--\r\n"]),
)  # fmt: skip
@settings(derandomize=True, max_examples=400, deadline=None)
def test_a_body_reads_the_same_in_any_pieces(
    request: bytes, files: list[bytes], cuts: list[int], declared: bool, end: bytes
) -> None:
    named = {f"f{index}": data for index, data in enumerate(files)}
    body = body_of(("request", request), *named.items(), end=end)
    assert read(body, cuts, declared=declared) == (request, named)
    assert read(body, list(range(len(body))), declared=declared) == (request, named)
    assert read_at_once(body) == (request, named)


@given(
    body=st.binary(max_size=60) | awkward,
    cuts=st.lists(st.integers(0, 400), max_size=10),
    at=st.integers(0, 300),
)
@settings(derandomize=True, max_examples=400, deadline=None)
def test_what_is_refused_is_refused_in_any_pieces(body: bytes, cuts: list[int], at: int) -> None:
    whole = body_of(("request", b"{}"), ("a", b"12345"))
    damaged = whole[:at] + body + whole[at:]

    def outcome(cuts: list[int] | None) -> Any:
        try:
            return read_at_once(damaged) if cuts is None else read(damaged, cuts)
        except InlayError as refusal:
            return type(refusal)

    assert outcome(cuts) == outcome([]) == outcome(list(range(len(damaged)))) == outcome(None)


def test_the_standard_librarys_parser_reads_the_same() -> None:
    files = {"a": b"\r\n--b0und-ar\0\xff", "b": b"", "c": bytes(range(256))}
    body = body_of(("request", b"{}"), *files.items())
    head = f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\n\r\n".encode()
    parsed = message_from_bytes(head + body, policy=policy.HTTP)
    theirs = {
        item.get_param("name", header="content-disposition"): item.get_payload(decode=True)
        for item in parsed.iter_parts()
    }
    assert theirs == {"request": b"{}", **files}
    assert read(body)[1] == files


@pytest.mark.parametrize(
    ("body", "phrase"),
    [
        (b"", "without its closing boundary"),
        (body_of(), "not valid multipart/form-data: it has no part named 'request'"),
        (body_of(("request", b"{}"))[:-5], "without its closing boundary"),
        (b"preamble\r\n" + body_of(("request", b"{}")), "does not begin with its boundary"),
        (b"\r\n" + body_of(("request", b"{}")), "does not begin with its boundary"),
        (body_of(("request", b"{}"), end=b"--\r\nmore"), "something follows"),
        (body_of(("request", b"{}"), end=b"--\r"), "something follows"),
        (body_of(("request", b"{}"), end=b" --\r\n"), "neither a line's end nor --"),
        (body_of(("request", b"{}"), end=b"\n"), "neither a line's end nor --"),
        (body_of(("a", b"1"), ("request", b"{}")), "its first part is 'a'"),
        (body_of(("request", b"{}"), ("a", b"1"), ("a", b"2")), "two parts named 'a'"),
        (body_of(("request", b"{}"), ("request", b"{}")), "two parts named 'request'"),
        (body_of(("request", b"{}"), ("", b"1")), "one name"),
        (body_of(("request", b"{}"), ("n" * 129, b"1")), "one name"),
        (part("request", b"{}", '; name="b"') + b"--b0und-ary--", "one name"),
        (part("request", b"{}", "\r\nno colon") + b"--b0und-ary--", "no header line"),
        (part("request", b"{}", "\r\na: b\nc: d") + b"--b0und-ary--", "no header line"),
        (part("request", b"{}", "\r\nContent-Disposition: form-data; name=b") + b"--b0und-ary--", "two content-dispositions"),
        (part("request", b"{}", "\r\nContent-Transfer-Encoding: base64") + b"--b0und-ary--", "content-transfer-encoding"),
        (b"--b0und-ary\r\nA: b\r\n\r\n{}\r\n--b0und-ary--", "no content-disposition"),
        (b"--b0und-ary\r\n\r\n{}\r\n--b0und-ary--", "no headers"),
        # Found by the fuzzer: it was read as a header line.
        (part("request", b"{}", "\r\n--b0und-ary--: a") + b"--b0und-ary--", "headers of a part hold a boundary"),
        (b"--b0und-ary\r\n" + body_of(("request", b"{}")).replace(b"ary\r\n", b"ary: a\r\n"), "headers of a part hold a boundary"),
        # Found by the fuzzer: it was read as content, where other readers see an empty part before
        # it.
        (part("request", b"").replace(b"\r\n\r\n\r\n", b"\r\n\r\n") + part("a", b"1") + b"--b0und-ary--", "content of a part begins with a boundary"),
        (part("request", b"--b0und-ary\r\n") + b"--b0und-ary--", "content of a part begins with a boundary"),
        (b'--b0und-ary\r\nContent-Disposition: attachment; name="request"\r\n\r\n{}\r\n--b0und-ary--', "one name"),
        (part("request", b"{}", "\r\nA: " + "b" * MAX_HEADER_BYTES) + b"--b0und-ary--", "headers of a part are over"),
        (b"--b0und-ary\r\n" + b"a" * 100_000, "headers of a part are over"),
        (body_of(("request", b"{}"), *((f"f{i}", b"") for i in range(MAX_FILES + 1))), "more than 128 files"),
        (body_of(("request", b"{}"), ("a", b"1" * 2001)), "exceeds maximum size of 2000 bytes"),
        (body_of(("request", b"1" * (MAX_REQUEST_BYTES + 1))), "over the limit of 1048576 bytes"),
    ],
)  # fmt: skip
def test_bad_framing_and_what_is_too_much_is_refused(body: bytes, phrase: str) -> None:
    with pytest.raises(InlayError, match=phrase.replace("(", r"\(")):
        read(body)
    with pytest.raises(InlayError):
        read(body, list(range(0, len(body), 7)))


def test_headers_are_as_long_in_pieces_as_in_one() -> None:
    # Found by the fuzzer: their end counted too, if it came in a later piece.
    shortest = len('Content-Disposition: form-data; name="request"\r\nA: ')

    def body(length: int) -> bytes:
        return part("request", b"{}", "\r\nA: " + "b" * (length - shortest)) + b"--b0und-ary--"

    longest = body(MAX_HEADER_BYTES)
    for cuts in (None, list(range(len(longest)))):
        assert read(longest, cuts)[0] == b"{}"
        with pytest.raises(InlayError, match="headers of a part are over"):
            read(body(MAX_HEADER_BYTES + 1), cuts)


@pytest.mark.parametrize("boundary", [None, "", "a" * 71, "a\r\nb", "a ", 'a"b', "ä"])
def test_a_boundary_that_is_none_is_refused(boundary: str | None) -> None:
    with pytest.raises(InlayError, match="boundary"):
        Form(boundary, None, LIMITS)


def test_a_file_over_its_limit_is_refused_before_the_rest_comes() -> None:
    body = body_of(("request", b"{}"), ("a", b"1" * 5000))
    form = Form(BOUNDARY, len(body), LIMITS)
    form.feed(body[:1500])
    with pytest.raises(InlayError, match="exceeds maximum size"):
        form.feed(body[1500:2500])


def test_names_may_be_quoted_escaped_or_not_ascii() -> None:
    for shown, name in (("a b", "a b"), ("é", "é"), ("%22", "%22")):
        body = (
            body_of(("request", b"{}"))[: -len(b"--b0und-ary--\r\n")]
            + part(shown, b"1", '; filename="x\\"y; name=z"')
            + b"--b0und-ary--"
        )
        assert read(body)[1] == {name: b"1"}
    bare = body_of(("request", b"{}")).replace(b'name="request"', b"name=request")
    assert read(bare)[0] == b"{}"


def send(
    url: str, request: Any, files: dict[str, bytes], path: str = "/v1/completions", **more: Any
) -> httpx.Response:
    sent = [("request", (None, json.dumps(request), "application/json"))]
    named = [
        (name, (f"{name}.safetensors", data, "application/octet-stream"))
        for name, data in files.items()
    ]
    return httpx.post(url + path, files=[*sent, *named], timeout=180, **more)


@pytest.fixture(scope="module")
def sentence(llama: Fleet) -> bytes:
    return write(embeds_of(llama).numpy(), "safetensors")


def test_a_file_decodes_as_by_value_wherever_it_may_stand(url: str, sentence: bytes) -> None:
    want = post(url, "/v1/completions", {**GREEDY, "prompt": TEXT}).json()["choices"][0][
        "token_ids"
    ]
    files = {"a": sentence}

    def ids(request: dict[str, Any], files: dict[str, bytes]) -> list[list[int]]:
        response = send(url, {**GREEDY, **request}, files)
        assert response.status_code == 200, response.text
        return [choice["token_ids"] for choice in response.json()["choices"]]

    assert ids({"prompt_embeds": {"part": "a"}}, files) == [want]
    assert ids({"prompt": [{"type": "prompt_embeds", "part": "a"}]}, files) == [want]
    data = base64.b64encode(sentence).decode()
    both = [{"part": "b"}, data, {"part": "a"}, {"part": "b"}]
    assert ids({"prompt_embeds": both}, {**files, "b": sentence}) == [want] * 4
    assert ids({"prompt": TEXT}, {}) == [want]

    def chat(part: dict[str, str], files: dict[str, bytes]) -> Any:
        content = [{"type": "text", "text": "Say: "}, {"type": "prompt_embeds", **part}]
        body = {**GREEDY, "messages": [{"role": "user", "content": content}]}
        path = "/v1/chat/completions"
        answer = send(url, body, files, path) if files else post(url, path, body)
        return answer.json()["choices"][0]["token_ids"]

    assert chat({"part": "a"}, files) == chat({"data": data}, {})


@pytest.mark.parametrize(
    ("request_", "files", "phrase"),
    [
        ({"prompt_embeds": {"part": "b"}}, ["a"], "does not use part 'a'"),
        ({"prompt": TEXT}, ["a"], "does not use part 'a'"),
        ({"prompt_embeds": [{"part": "a"}, {"part": "b"}]}, ["a"], "no part 'b'"),
        ({"prompt_embeds": {"part": "a", "ref": "pe-1"}}, ["a"], "exactly one of"),
        ({"prompt_embeds": {"part": 5}}, [], "part"),
        ([], [], "object"),
    ],
)  # fmt: skip
def test_unused_and_missing_files_are_refused(
    url: str, sentence: bytes, request_: Any, files: list[str], phrase: str
) -> None:
    refused = send(url, request_, dict.fromkeys(files, sentence))
    assert refused.status_code == 400
    assert phrase in error(refused)["message"]


@pytest.mark.parametrize("whole", [True, False], ids=["declared", "chunked"])
def test_large_files_take_either_way_in(url: str, llama: Fleet, whole: bool) -> None:
    """Of known length, a large body is read at once; of unknown, in pieces."""
    rows = np.random.default_rng(0).standard_normal((500, 48)).astype(np.float32)
    data = write(rows, "safetensors")
    want = post(
        url, "/v1/completions", {**GREEDY, "prompt_embeds": base64.b64encode(data).decode()}
    )
    body = body_of(
        ("request", json.dumps({**GREEDY, "prompt_embeds": {"part": "a"}}).encode()), ("a", data)
    )
    assert len(body) > 64 * 1024

    def pieces() -> Iterator[bytes]:
        yield from (body[at : at + 9999] for at in range(0, len(body), 9999))

    headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    got = httpx.post(
        url + "/v1/completions", content=body if whole else pieces(), headers=headers, timeout=180
    )
    assert got.json()["choices"] == want.json()["choices"]
    until(lambda: llama.apps[url].server.budget.used == 0)


def test_a_bad_file_is_refused_as_by_value(url: str) -> None:
    bad = write(np.full((4, 48), np.nan, np.float32), "safetensors")
    refused = send(url, {"prompt_embeds": {"part": "a"}}, {"a": bad})
    assert refused.status_code == 400
    assert "must be finite" in error(refused)["message"]


def test_limits_are_told_from_the_length_or_as_they_are_passed(llama: Fleet) -> None:
    url = llama.serve(
        enable_prompt_embeds=True, max_prompt_embeds_bytes=4000, max_body_bytes=20_000
    )
    request = {"prompt_embeds": {"part": "a"}}
    refused = send(url, request, {"a": b"1" * 4001})
    assert refused.status_code == 400
    assert "exceeds maximum size of 4000 bytes" in error(refused)["message"]
    assert send(url, request, {"a": b"1" * 20_000}).status_code == 413
    until(lambda: llama.apps[url].server.budget.used == 0)


def test_a_server_without_embeddings_refuses_files(plain_url: str, sentence: bytes) -> None:
    refused = send(plain_url, {"prompt_embeds": {"part": "a"}}, {"a": sentence})
    assert refused.status_code == 400
    assert "--enable-prompt-embeds" in error(refused)["message"]


def test_routes_without_embeddings_take_no_files(url: str) -> None:
    assert send(url, {"prompt": TEXT}, {}, "/tokenize").status_code == 415
