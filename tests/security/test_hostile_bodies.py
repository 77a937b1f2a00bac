"""Bodies that are not what they say, sent to a server that others are using."""

import gzip
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.equality.reference import rows_of, tokenizer_of
from tests.payloads import saved
from tests.security.company import (
    MIB,
    Question,
    expected,
    forget_peaks,
    named,
    peaks,
    refused,
    resident,
    settings,
    settle,
    shown,
    under_attack,
)
from tests.serving import Served, serving

JSON = {"content-type": "application/json"}
ROUTES = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


def sent(
    body: bytes, *phrases: str, path: str = "/v1/completions", status: int = 400, **headers: str
) -> Callable[[httpx.Client], None]:
    """An attack: `body` as it is, and the refusal it gets."""
    named = {**JSON, **{key.replace("_", "-"): value for key, value in headers.items()}}

    def attack(client: httpx.Client) -> None:
        refused(client.post(path, content=body, headers=named), status, *phrases)

    return attack


@pytest.fixture(scope="module")
def good(path: Path) -> tuple[str, list[int]]:
    """base64 of a prompt that is lifted out of a body, and its answer."""
    ids = tokenizer_of(path).encode("the town on the hill writes the number of lanterns " * 12)
    rows = rows_of(path, ids)
    text = saved(rows.double())
    assert len(text) > 64 * 1024
    return text, expected(path, rows)


MANGLED: dict[str, Callable[[str], str]] = {
    "a newline every 76 characters": lambda text: "\n".join(
        text[i : i + 76] for i in range(0, len(text), 76)
    ),
    "a newline at the end": lambda text: text + "\n",
    "a space in it": lambda text: text[:500] + " " + text[500:],
    "the urlsafe alphabet": lambda text: text.replace("+", "-").replace("/", "_").replace("A", "_"),
    "a character too few": lambda text: text[:-1],
    "a character too many": lambda text: text + "A",
    "three characters too few": lambda text: text[: len(text) // 4 * 4 - 3],
    "padding in the middle": lambda text: text[:400] + "====" + text[400:],
    "padding for nothing": lambda text: text.rstrip("=") + "====",
    "a data URL": lambda text: "data:application/octet-stream;base64," + text,
    "one character of another alphabet": lambda text: text[:70_000] + "é" + text[70_001:],
    "a NUL in it": lambda text: text[:70_000] + "\0" + text[70_001:],
    "a long run that is none": lambda text: "-" * len(text),
    "hex": lambda text: text.encode().hex()[:-1],
}


@pytest.mark.thorough
def test_what_is_almost_base64_is_refused_long_or_short(
    server: Served, asked: tuple[Question, ...], good: tuple[str, list[int]]
) -> None:
    attacks = []
    for name, mangled in MANGLED.items():
        for text in (good[0], good[0][:2000]):
            body = json.dumps({"prompt_embeds": mangled(text)}, ensure_ascii=False).encode()
            attacks.append(named(name, sent(body, "prompt_embeds must be valid base64")))
    under_attack(server, asked, attacks)


ESCAPED: dict[str, Callable[[str], str]] = {
    "a letter by its number": lambda text: text.replace("A", "\\u0041", 1),
    "every letter by its number": lambda text: "".join(
        f"\\u{ord(character):04x}" for character in text
    ),
    "slashes escaped": lambda text: text.replace("/", "\\/"),
}


@pytest.mark.parametrize("escaped", ESCAPED)
def test_base64_written_with_escapes_is_the_same_prompt(
    server: Served, asked: tuple[Question, ...], good: tuple[str, list[int]], escaped: str
) -> None:
    body = b'{"prompt_embeds":"%s",%s' % (
        ESCAPED[escaped](good[0]).encode(),
        json.dumps(settings()).encode()[1:],
    )

    def attack(client: httpx.Client) -> None:
        response = client.post("/v1/completions", content=body, headers=JSON)
        assert response.status_code == 200, response.text
        assert shown(response.json()) == good[1]

    under_attack(server, asked, [attack], grows=2 * 6 * len(body))  # fmt: skip


def test_the_last_of_two_equal_keys_counts_lifted_or_not(
    server: Served, asked: tuple[Question, ...], good: tuple[str, list[int]]
) -> None:
    text, answer = good
    rest = json.dumps(settings())[1:]

    def attack(client: httpx.Client) -> None:
        body = f'{{"prompt_embeds":"QUJD","prompt_embeds":"{text}",{rest}'
        response = client.post("/v1/completions", content=body, headers=JSON)
        assert shown(response.json()) == answer
        body = f'{{"prompt_embeds":"{text}","prompt_embeds":"QUJD",{rest}'
        refused(
            client.post("/v1/completions", content=body, headers=JSON),
            400,
            "at least 100 bytes, got 3",
        )

    under_attack(server, asked, [attack], grows=8 * MIB)


DEEP: dict[str, bytes] = {
    "lists": b"[" * 500_000,
    "lists that end": b"[" * 200_000 + b"]" * 200_000,
    "objects": b'{"a":' * 200_000,
    "a field no one knows": b'{"prompt":"a","b":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "a prompt": b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}",
    "messages": b'{"messages":[{"role":"user","content":' + b"[" * 900 + b"]" * 900 + b"}]}",
    "tools": b'{"messages":[{"role":"user","content":"a"}],"tools":[{"a":'
    + b"[" * 200
    + b"]" * 200
    + b"}]}",
    "template variables": b'{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"a":'
    + b"[" * 500
    + b"]" * 500
    + b"}}",
    "a response format": b'{"prompt":"a","messages":[],"response_format":'
    + b"[" * 940
    + b"]" * 940
    + b"}",
}


def test_deep_json_is_refused_by_every_route(server: Served, asked: tuple[Question, ...]) -> None:
    attacks = [
        named(f"{deep}, {path}", sent(DEEP[deep], path=path)) for deep in DEEP for path in ROUTES
    ]
    under_attack(server, asked, attacks, grows=32 * MIB)


def test_deep_arguments_of_a_tool_call_are_text_or_are_refused(
    server: Served, asked: tuple[Question, ...]
) -> None:
    def attack(client: httpx.Client) -> None:
        for depth, statuses in ((20, {200}), (800, {200, 400}), (100_000, {200, 400})):
            call = {
                "function": {"name": "f", "arguments": '{"a":' + "[" * depth + "]" * depth + "}"}
            }
            message = {"role": "assistant", "content": "b", "tool_calls": [call]}
            body = {"messages": [message], **settings()}
            assert client.post("/v1/chat/completions", json=body).status_code in statuses

    # Recursion takes stack, once for each thread that prepares requests.
    under_attack(server, asked, [attack], grows=32 * MIB)


def test_a_body_that_is_not_plain_json_is_refused_unread(
    server: Served, asked: tuple[Question, ...]
) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    bomb = gzip.compress(bytes(64 * MIB))
    attacks = [
        sent(bomb, "identity", path=path, status=415, content_encoding=encoding)
        for path in ROUTES
        for encoding in ("gzip", "deflate", "br", "zstd", "identity, gzip")
    ]
    attacks += [
        sent(body, "application/json", path=path, status=415, content_type=media)
        for path in ROUTES
        for media in (
            "text/plain",
            "application/x-www-form-urlencoded",
            "application/octet-stream+zip",
        )
    ]
    attacks += [sent(bomb, "not valid JSON", path=path) for path in ROUTES]
    under_attack(server, asked, attacks)


LONG = "x " * (4 * MIB)
REPEATED: dict[str, dict[str, Any]] = {
    "a response format": {"prompt": "a", "response_format": {"type": LONG}},
    "a model": {"prompt": "a", "model": LONG},
    "a part's type": {"prompt": [{"type": LONG}]},
    "a content part's type": {"messages": [{"role": "user", "content": [{"type": LONG}]}]},
    "a tool choice": {"messages": [{"role": "user", "content": "a"}], "tool_choice": LONG},
    "a role": {"messages": [{"role": LONG}]},
    "a bias": {"prompt": "a", "logit_bias": {LONG: 1.0}},
    "a reference": {"prompt_embeds": {"ref": LONG}},
}


@pytest.mark.parametrize("repeated", REPEATED)
def test_a_refusal_does_not_repeat_what_is_long(
    server: Served, asked: tuple[Question, ...], repeated: str
) -> None:
    fields = REPEATED[repeated]
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    body = json.dumps(fields).encode()

    def attack(client: httpx.Client) -> None:
        response = client.post(path, content=body, headers=JSON)
        assert 400 <= response.status_code < 500
        assert len(response.content) < 8192

    under_attack(server, asked, [attack], grows=2 * 5 * len(body))


CROWDED: dict[str, tuple[str, bytes]] = {
    "messages": ("/v1/chat/completions", b'{"messages":[' + b"{}," * 5_000_000 + b"{}]}"),
    "content parts": (
        "/v1/chat/completions",
        b'{"messages":[{"role":"user","content":[' + b"[]," * 5_000_000 + b"[]]}]}",
    ),
    "prompts": ("/v1/completions", b'{"prompt":[' + b"[]," * 5_000_000 + b"[]]}"),
    "formats": (
        "/v1/completions",
        b'{"prompt":"a","response_format":[' + b"[]," * 5_000_000 + b"[]]}",
    ),
    "ids": ("/detokenize", b'{"tokens":[' + b"5," * 7_000_000 + b"5]}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("crowded", CROWDED)
def test_a_body_of_millions_of_small_things_is_refused_by_what_it_would_become(
    server: Served, asked: tuple[Question, ...], crowded: str
) -> None:
    path, body = CROWDED[crowded]
    attack = sent(body, "more than 100000 JSON objects and arrays", path=path)
    if crowded == "ids":
        attack = sent(body, "with what it decodes to", path=path, status=413)
    under_attack(server, asked, [attack], attackers=1, grows=3 * len(body))


WORDY: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "a prompt": ("/v1/completions", lambda text: {"prompt": text}),
    "a part": ("/v1/completions", lambda text: {"prompt": [{"type": "text", "text": text}]}),
    "a message": (
        "/v1/chat/completions",
        lambda text: {"messages": [{"role": "user", "content": text}]},
    ),
    "text to tokenize": ("/tokenize", lambda text: {"prompt": text}),
}


@pytest.mark.slow
@pytest.mark.parametrize("wordy", WORDY)
def test_text_far_beyond_the_context_is_refused_before_it_is_tokenized(
    server: Served, asked: tuple[Question, ...], wordy: str
) -> None:
    path, make = WORDY[wordy]
    bodies = [json.dumps(make(text)).encode() for text in ("a b " * (2 * MIB), "a" * 8 * MIB)]
    attacks = [sent(body, "maximum context length is 512", path=path) for body in bodies]
    under_attack(server, asked, attacks, attackers=1, grows=6 * len(bodies[0]))


@pytest.mark.thorough
def test_memory_of_large_bodies_is_given_back(path: Path) -> None:
    body = json.dumps({"prompt": "a b " * (3 * MIB)}).encode()
    with serving(path) as server, httpx.Client(base_url=server.url, timeout=120) as client:
        assert (
            client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        )
        before = resident(server)
        forget_peaks(server)
        with ThreadPoolExecutor(4) as pool:
            sent = pool.map(
                lambda _: client.post("/v1/completions", content=body, headers=JSON), range(8)
            )
            assert {response.status_code for response in sent} <= {400, 429}
        assert peaks(server) > before + len(body)
        settle(lambda: resident(server) < before + 16 * MIB, "what bodies took is kept")
