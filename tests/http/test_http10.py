"""Clients of HTTP/1.0: nothing is sent to them in chunks (RFC 9112, 6.1)."""

import json
import socket
from urllib.parse import urlsplit

import httpx
import pytest

from tests.payloads import post

ASKED = {"prompt": "count", "max_tokens": 6, "temperature": 0, "ignore_eos": True}


def exchange(url: str, method: str, path: str, body: object = None, *, head: str = "") -> bytes:
    """All that the server sends, until it closes the connection."""
    data = b"" if body is None else json.dumps(body).encode()
    host = urlsplit(url)
    sized = f"content-length: {len(data)}\r\n" if data else ""
    with socket.create_connection((host.hostname, host.port), timeout=60) as connection:
        connection.sendall(f"{method} {path} HTTP/1.0\r\n{sized}{head}\r\n".encode() + data)
        found = b""
        while piece := connection.recv(65536):
            found += piece
    return found


def parted(answer: bytes) -> tuple[dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0].split()[1] == "200", head
    return dict(line.lower().split(": ", 1) for line in lines[1:]), body


def said(events: bytes) -> tuple[str, str]:
    """The text of a stream, and why it ended."""
    found = [line[6:] for line in events.split(b"\n\n") if line]
    assert found.pop() == b"[DONE]"
    choices = [json.loads(line)["choices"][0] for line in found]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


@pytest.mark.parametrize("head", ["", "connection: keep-alive\r\n", "expect: 100-continue\r\n"])
def test_a_stream_is_sent_as_it_is_and_ends_with_the_connection(url: str, head: str) -> None:
    asked = {**ASKED, "stream": True}
    headers, body = parted(exchange(url, "POST", "/v1/completions", asked, head=head))
    assert "transfer-encoding" not in headers
    assert "content-length" not in headers
    assert headers["connection"] == "close"
    assert said(body) == said(post(url, "/v1/completions", asked).content)


def test_an_answer_of_known_length_says_it(url: str) -> None:
    headers, body = parted(exchange(url, "POST", "/v1/completions", ASKED))
    assert int(headers["content-length"]) == len(body)
    assert json.loads(body)["choices"] == post(url, "/v1/completions", ASKED).json()["choices"]
    headers, body = parted(exchange(url, "GET", "/openapi.json"))
    assert body == httpx.get(url + "/openapi.json").content


def test_a_head_has_no_body(url: str) -> None:
    headers, body = parted(exchange(url, "HEAD", "/v1/models"))
    assert (body, int(headers["content-length"]) > 0) == (b"", True)


def test_streams_to_newer_clients_are_in_chunks(url: str) -> None:
    with httpx.stream("POST", url + "/v1/completions", json={**ASKED, "stream": True}) as answer:
        assert answer.headers["transfer-encoding"] == "chunked"
        assert "connection" not in answer.headers
        assert b"[DONE]" in answer.read()
