"""Clients that leave, servers that stop.

No request outlives who asked for it, and no stream ends without a word.
"""

import json
import signal
import socket
import subprocess
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.live import Fleet, until
from tests.models import tiny
from tests.serving import serving, until_stopping

LONG: dict[str, Any] = {
    "prompt": "It is",
    "max_tokens": 480,
    "ignore_eos": True,
    "temperature": 1.0,
}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_requests(llama: Fleet, stream: bool) -> None:
    url = llama.serve()
    until(lambda: not llama.running())
    # Much more than can be done before it is looked at.
    body = json.dumps({**LONG, "n": 64, "stream": stream}).encode()
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 0)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        until(lambda: llama.running() > 0)
    until(lambda: not llama.running())
    server = llama.apps[url].server
    assert (server.inflight.count, server.budget.used) == (0, 0)
    assert "inlay:client_disconnects_total 1.0" in httpx.get(url + "/metrics").text


def test_a_request_id_comes_back(url: str) -> None:
    given = httpx.post(
        url + "/v1/completions",
        json={"prompt": "x", "max_tokens": 1},
        headers={"x-request-id": "mine-1"},
    )
    assert given.headers["x-request-id"] == "mine-1"
    odd = httpx.get(url + "/nothing", headers={"x-request-id": "a b"})
    assert len(odd.headers["x-request-id"]) == 32


def test_a_server_with_no_room_for_more_requests_says_when_to_come_back(llama: Fleet) -> None:
    url = llama.serve(max_inflight_requests=1)
    parts = urlsplit(url)
    inflight = llama.apps[url].server.inflight
    with socket.create_connection((parts.hostname or "", parts.port or 0)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
        )
        while not inflight.count:
            time.sleep(0.01)
        refused = httpx.post(url + "/v1/completions", json=LONG)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert httpx.get(url + "/ready").status_code == 200
    while inflight.count:
        time.sleep(0.01)
    assert httpx.post(url + "/v1/completions", json={**LONG, "max_tokens": 1}).status_code == 200


@pytest.mark.slow
def test_a_stream_open_at_ctrl_c_ends_with_an_error_event_within_the_drain_time() -> None:
    with serving(
        tiny("llama"), "--engine", "echo", "--max-model-len", 5_000_000, "--drain-timeout", 1.5
    ) as served:
        body = {**LONG, "max_tokens": 4_000_000, "stream": True}
        with httpx.stream("POST", served.url + "/v1/completions", json=body, timeout=180) as stream:
            lines = stream.iter_text()
            text = next(lines)
            served.process.send_signal(signal.SIGINT)
            for more in lines:
                text = text[-4096:] + more
        last = text[-4096:].split("\n\n")
        assert last[-2] == "data: [DONE]"
        assert "shutting down" in json.loads(last[-3][6:])["error"]["message"]
        served.process.wait(90)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once() -> None:
    with serving(
        tiny("llama"), "--engine", "echo", "--max-model-len", 5_000_000, "--drain-timeout", 600
    ) as served:
        body = {**LONG, "max_tokens": 4_000_000, "stream": True}
        with httpx.stream("POST", served.url + "/v1/completions", json=body, timeout=180) as stream:
            next(stream.iter_text())
            served.process.send_signal(signal.SIGINT)
            until_stopping(served)
            served.process.send_signal(signal.SIGINT)
            try:
                served.process.wait(90)
            except subprocess.TimeoutExpired:
                pytest.fail("the server did not end")
