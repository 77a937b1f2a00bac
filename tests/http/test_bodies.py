"""Bodies that are malformed, slow, too many, or not what they say."""

import gc
import json
import socket
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from inlay.api.anthropic.schema import MessagesRequest
from inlay.api.generation.generation import Generation
from inlay.api.openai.schema.completions import CompletionRequest
from inlay.api.openai.schema.responses import ResponsesRequest
from inlay.api.schema.chat import ChatRequest
from inlay.http.bounded_http import MAX_WAITING, BoundedHttp
from inlay.render import StopStrings
from inlay.router import Router
from tests.live import Fleet, until
from tests.payloads import error, post

JSON = {"content-type": "application/json"}


def raw(url: str, data: bytes, *, then: bytes | None = None, wait: float = 0.0) -> bytes:
    """Send bytes on a connection; return the answer until it closes or is silent."""
    parts = urlsplit(url)
    with socket.create_connection(
        (parts.hostname or "", parts.port or 0), timeout=30
    ) as connection:
        connection.sendall(data)
        if then is not None:
            time.sleep(wait)
            connection.sendall(then)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
        return answer


def head(length: int, path: str = "/v1/completions", more: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n{more}\r\n".encode()


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"nul", b'{"prompt": "a"', b'{"prompt": "a"}}', b'{"prompt": "\xff"}', b"\xef\xbb\xbf{}", b'{"n": 01}',
     b'{"temperature": NaN}', b'{"temperature": 1e999}', b'{"prompt": "\x01"}', b'{"prompt": "\\ud800"}', b'{"n": ' + b"9" * 5000 + b"}",
     b'{"x":' * 5000 + b"1" + b"}" * 5000, b"[" * 200_000, b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}",
     b'{"prompt_embeds": "' + b"A" * 100_000, b'"' + b"A" * 100_000 + b'"'],
)  # fmt: skip
def test_a_malformed_body_is_a_400(url: str, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        response = httpx.post(url + path, content=body, headers=JSON)
        assert response.status_code == 400, response.text
        assert error(response)["type"] == "invalid_request_error"
        assert "codec" not in error(response)["message"]


def test_a_duplicate_key_counts_last(url: str) -> None:
    body = b'{"prompt": "a", "max_tokens": 0, "max_tokens": 1}'
    assert httpx.post(url + "/v1/completions", content=body, headers=JSON).status_code == 200


def test_a_body_over_the_limit_is_refused_before_it_is_sent(url: str) -> None:
    answer = raw(url, head(10**12))
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_a_sender_of_a_refused_body_gets_to_see_why(url: str) -> None:
    response = httpx.post(
        url + "/v1/completions", content=b"x" * (80 * 1024 * 1024), headers=JSON, timeout=180
    )
    assert response.status_code == 413


def test_a_slow_body_is_given_up(llama: Fleet) -> None:
    url = llama.serve(body_timeout=0.3)
    answer = raw(url, head(100) + b'{"prompt":')
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"too slowly: 10 bytes" in answer
    while llama.apps[url].server.budget.used:
        time.sleep(0.01)


def test_requests_in_a_row_are_given_up_before_many_are_read(
    llama: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = 0
    complete = BoundedHttp.on_headers_complete

    def counted(connection: BoundedHttp) -> None:
        nonlocal read
        read += 1
        complete(connection)

    monkeypatch.setattr(BoundedHttp, "on_headers_complete", counted)
    parts = urlsplit(llama.serve())
    address = parts.hostname or "", parts.port or 0
    with (
        socket.create_connection(address, timeout=30) as connection,
        suppress(ConnectionResetError, BrokenPipeError),
    ):
        connection.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n" * 1000)
        while connection.recv(65536):
            pass
    assert MAX_WAITING < read < 3 * MAX_WAITING


def test_a_trickle_is_given_up_though_bytes_keep_coming(llama: Fleet) -> None:
    url = llama.serve(body_timeout=0.5)
    parts = urlsplit(url)
    with socket.create_connection(
        (parts.hostname or "", parts.port or 0), timeout=30
    ) as connection:
        connection.sendall(head(1000))
        connection.settimeout(0.05)
        answer = b""
        while not answer:
            connection.sendall(b" ")
            try:
                answer = connection.recv(4096)
            except TimeoutError:
                continue
    assert answer.startswith(b"HTTP/1.1 408")


def test_bodies_beyond_the_budget_are_turned_away_and_the_budget_comes_back(llama: Fleet) -> None:
    url = llama.serve(max_inflight_bytes=1024 * 1024, max_body_bytes=900_000)
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 0)) as connection:
        connection.sendall(head(800_000) + b"{")
        while llama.apps[url].server.budget.used < 800_000:
            time.sleep(0.01)
        refused = httpx.post(url + "/v1/completions", content=b" " * 800_000, headers=JSON)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert (
            httpx.post(url + "/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code
            == 200
        )
    while llama.apps[url].server.budget.used:
        time.sleep(0.01)
    assert (
        httpx.post(url + "/v1/completions", content=b" " * 400_000, headers=JSON).status_code == 400
    )


REQUESTS = (CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": "a", "stop": ["a"] * 1000}), ("/v1/completions", {"prompt": ["a"] * 1000}),
     ("/v1/completions", {"prompt": "a", "stream": True, "model": "none"}), ("/v1/chat/completions", {"messages": []}),
     ("/v1/responses", {"input": ["a"] * 1000}),
     ("/v1/messages", {"messages": [{"role": "user"}], "max_tokens": 1})],
)  # fmt: skip
def test_what_a_refused_request_took_is_free_without_a_collection(
    url: str, path: str, body: dict[str, Any]
) -> None:
    gc.collect()
    gc.disable()
    try:
        named = {"user": "to be freed", "cache_salt": "to be freed"}
        assert post(url, path, {**body, **named}).status_code in (400, 404)
        deadline = time.monotonic() + 30
        # The answer is there a moment before its server has done with it.
        while any(
            type(found) in REQUESTS and found.cache_salt == "to be freed"
            for found in gc.get_objects()
        ):
            assert time.monotonic() < deadline, "the request is kept until a collection finds it"
            time.sleep(0.1)
    finally:
        gc.enable()


MIB = 1024 * 1024
SAID = {"role": "user", "content": "It is", "ignored": "x" * MIB}
KEPT: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "It is", "ignored": "x" * MIB},
    "/v1/chat/completions": {"messages": [SAID]},
    "/v1/responses": {"input": [SAID]},
    "/v1/messages": {"messages": [SAID]},
}


@pytest.mark.parametrize("path", KEPT)
def test_what_is_kept_of_a_request_is_held_as_long_as_its_answer_takes(
    llama: Fleet, plain_url: str, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    budget = llama.apps[plain_url].server.budget
    start, held = Generation.start, list[int]()

    async def started(
        generation: Generation, router: Router, name: str, *, session: str | None
    ) -> None:
        held.append(budget.used)
        await start(generation, router, name, session=session)

    monkeypatch.setattr(Generation, "start", started)
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    long = {"metadata": {"user_id": "u" * MIB}} if path == "/v1/messages" else {"user": "u" * MIB}
    response = post(plain_url, path, {**KEPT[path], **long, limit: 1})
    assert response.status_code == 200, response.text[:500]
    assert len(held) == 1
    assert MIB <= held[0] < 1.5 * MIB


def test_a_connection_is_kept_after_an_error(url: str) -> None:
    with httpx.Client() as client:
        assert client.post(url + "/v1/completions", json={"prompt": 5}).status_code == 400
        assert client.post(url + "/nothing", json={"prompt": 5}).status_code == 404
        assert (
            client.post(url + "/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code
            == 200
        )


def test_a_server_that_expects_100_continue_is_not_needed_to_refuse(url: str) -> None:
    answer = raw(url, head(10**12, more="expect: 100-continue\r\n"))
    assert answer.startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("line", ["content-length: -5", "content-length: x", "no colon"])
def test_what_is_no_http_is_told_so_in_the_shape_of_every_error(llama: Fleet, line: str) -> None:
    url = llama.serve()
    answer = raw(url, f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{line}\r\n\r\n".encode())
    top, _, body = answer.partition(b"\r\n\r\n")
    assert top.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_a_priority_is_obeyed_only_where_the_operator_says_so(llama: Fleet) -> None:
    request = {"prompt": "Hello", "max_tokens": 1, "priority": -5}
    refused = httpx.post(llama.serve() + "/v1/completions", json=request)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "priority"
    assert "--scheduling-policy priority" in refused.json()["error"]["message"]
    allowed = llama.serve(scheduling_policy="priority")
    assert httpx.post(allowed + "/v1/completions", json=request).status_code == 200


def test_stop_strings_are_held_once_however_many_choices_look_for_them(
    plain_url: str, llama: Fleet
) -> None:
    budget = llama.apps[plain_url].server.budget
    stops = ["a" * 4095 + end for end in "bcde"]
    body = {"prompt": "a", "n": 24, "max_tokens": 2, "ignore_eos": True, "stop": stops}
    until(lambda: budget.used == 0)
    before = budget.taken
    httpx.post(plain_url + "/v1/completions", json=body).raise_for_status()
    assert StopStrings.size(stops) <= budget.taken - before < 1.1 * StopStrings.size(stops)
    until(lambda: budget.used == 0)


@pytest.mark.parametrize(
    ("path", "fields", "param", "expected", "got"),
    [
        ("chat/completions", {"logprobs": 0}, "logprobs", "bool", "int"),
        ("chat/completions", {"stream": 1}, "stream", "bool", "int"),
        (
            "chat/completions",
            {"stream": True, "stream_options": {"include_usage": "yes"}},
            "stream_options.include_usage",
            "bool",
            "str",
        ),
        ("completions", {"max_tokens": "5"}, "max_tokens", "int", "str"),
        ("completions", {"logprobs": True}, "logprobs", "int", "bool"),
        ("completions", {"temperature": "0.5"}, "temperature", "float", "str"),
    ],
)
def test_a_value_of_another_json_type_is_refused_with_the_type_that_is_allowed(
    plain_url: str, path: str, fields: dict[str, Any], param: str, expected: str, got: str
) -> None:
    prompt = {"messages": [{"role": "user", "content": "x"}], "prompt": "x"}
    answer = httpx.post(f"{plain_url}/v1/{path}", json={**prompt, **fields})
    found = error(answer)
    assert (answer.status_code, found["param"]) == (400, param)
    assert f"expected `{expected}" in found["message"]
    assert f"got `{got}`" in found["message"]
