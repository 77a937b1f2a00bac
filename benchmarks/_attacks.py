"""The attacks of `benchmarks.attacks`, as data: each row says what is sent, and how.

A new one is one more `Attack` in `ATTACKS`. Traffic goes to the server that the benchmark started
itself, on 127.0.0.1.
"""

import contextlib
import http.client
import json
import socket
import threading
import warnings
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from typing import Any, NamedTuple, TypeAlias

from tests.engine.torch.test_grammar_trial import endless
from tests.security.test_hostile_files import BOMBS, FILES, made

KEYS = ("attacker-0", "attacker-1", "attacker-2", "attacker-3")
"""API keys of the attackers; each sends with one of them."""

TIMEOUT = 60.0
"""Seconds after which a client gives up on an answer."""

_PIECE = 256 * 1024
_CHUNKED = (
    f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    f"authorization: Bearer {KEYS[0]}\r\ntransfer-encoding: chunked\r\n\r\n"
).encode()
_MANY_KEYS = 700_000
_MANY = 1_000_000


class Target(NamedTuple):
    """The server that is attacked.

    Attributes:
        port: of its HTTP server on 127.0.0.1.
        nats_port: of its NATS server, where it is a fleet.
    """

    port: int
    nats_port: int | None = None


class Post(NamedTuple):
    """One request: its path and body."""

    path: str
    body: bytes


Answers: TypeAlias = "Counter[str]"
"""How many requests got which status; "none" where the connection ended without an answer."""

Send: TypeAlias = Callable[[Target, Event], Answers]
"""Attacks until the event is set."""


@dataclass(frozen=True)
class Attack:
    """One kind of harm.

    Attributes:
        name: of its row.
        sent: what is sent, in a few words.
        prepare: makes what is sent, before anything is measured.
        fleet: the server is a frontend, a worker and a NATS server, instead of one command.
        asked: what the second client asks for besides `max_tokens: 1`, by a number that no other
            request of its has.
    """

    name: str
    sent: str
    prepare: Callable[[], Send]
    fleet: bool = False
    asked: Callable[[int], dict[str, Any]] = lambda _: {}


def posting(*posts: Post, keys: Sequence[str] = KEYS[:1], connections: int = 1) -> Send:
    """Send `posts` in turns, without a pause, on so many connections for each key."""

    def run(target: Target, stop: Event) -> Answers:
        answers: Answers = Counter()

        def one(key: str) -> None:
            count = 0
            while not stop.is_set():
                answers[_post(target.port, posts[count % len(posts)], key)] += 1
                count += 1

        threads = [
            threading.Thread(target=one, args=(key,), daemon=True) for key in (*keys,) * connections
        ]
        for thread in threads:
            thread.start()
        stop.wait()
        # What is still being answered is cut off with the process.
        for thread in threads:
            thread.join(0.2)
        return Counter(answers)

    return run


def _post(port: int, post: Post, key: str) -> str:
    """The status of the answer, or "none"."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    pieces = (post.body[start : start + _PIECE] for start in range(0, len(post.body), _PIECE))
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(post.body)),
        "Authorization": f"Bearer {key}",
    }
    with contextlib.closing(connection):
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request("POST", post.path, pieces, headers)
            response = connection.getresponse()
            response.read()
        except (OSError, http.client.HTTPException):
            return "none"
        return str(response.status)


def _json(path: str, **fields: Any) -> Post:
    return Post(path, json.dumps(fields).encode())


def _completion(**fields: Any) -> Post:
    return _json("/v1/completions", **{"prompt": "a", "max_tokens": 1, **fields})


def _chat(message: dict[str, Any] | None = None, **fields: Any) -> Post:
    said = {"role": "user", "content": "a", **(message or {})}
    return _json("/v1/chat/completions", messages=[said], max_tokens=1, **fields)


def _keys(value: object = 1, number_of: int = _MANY_KEYS) -> dict[str, object]:
    return {str(number): value for number in range(number_of)}


def _call_with_keys() -> Post:
    function = {"name": "f", "arguments": json.dumps(_keys())}
    calls = [{"id": "a", "type": "function", "function": function}]
    return _chat({"role": "assistant", "content": None, "tool_calls": calls})


def _hostile_files() -> Send:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        files = [*map(made, FILES), *(make() for make, _ in BOMBS.values())]
    return posting(*(_json("/v1/completions", max_tokens=1, prompt_embeds=one) for one in files))


def _stop_strings(length: int) -> Send:
    stops = [f"{number:04}" * (length // 4) for number in range(64)]
    return posting(_completion(stop=stops, n=24, max_tokens=64, ignore_eos=True))


def _grammars() -> Send:
    slow = [
        _completion(structured_outputs={"regex": "a?" * size + "a" * size})
        for size in range(4990, 5000)
    ]
    return posting(*slow, keys=KEYS)


def _compiled_grammars() -> Send:
    schemas = (json.loads(endless(f"p{number}").source) for number in range(40))
    slow = [_completion(structured_outputs={"json": schema}) for schema in schemas]
    return posting(*slow, keys=KEYS)


def aborted_uploads(announced: int, sent: int, connections: int = 64) -> Send:
    """Announce a body of so many bytes, send a part of it, and close.

    So many at once, again and again.
    """
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {KEYS[0]}\r\ncontent-length: {announced}\r\n\r\n"
    ).encode()
    begun = head + b'{"prompt_embeds":"' + b"A" * sent

    def run(target: Target, stop: Event) -> Answers:
        answers: Answers = Counter()
        while not stop.is_set():
            opened = [
                socket.create_connection(("127.0.0.1", target.port)) for _ in range(connections)
            ]
            for connection in opened:
                with contextlib.suppress(OSError):
                    connection.sendall(begun)
            for connection in opened:
                connection.close()
                answers["aborted"] += 1
        return answers

    return run


def sending(begun: bytes, again: bytes, connections: int = 8) -> Send:
    """Send `begun`, then `again` until the server closes, on so many connections."""

    def run(target: Target, stop: Event) -> Answers:
        answers: Answers = Counter()

        def one() -> None:
            while not stop.is_set():
                with (
                    contextlib.suppress(OSError),
                    socket.create_connection(("127.0.0.1", target.port)) as connection,
                ):
                    connection.sendall(begun)
                    while not stop.is_set():
                        connection.sendall(again)
                answers["closed"] += 1

        for _ in range(connections):
            threading.Thread(target=one, daemon=True).start()
        stop.wait()
        return Counter(answers)

    return run


def nats_garbage() -> Send:
    """Publish a message whose subject is not UTF-8 to everyone who listens for heartbeats, four times a second."""

    def run(target: Target, stop: Event) -> Answers:
        answers: Answers = Counter()
        assert target.nats_port is not None
        with socket.create_connection(("127.0.0.1", target.nats_port)) as connection:
            connection.sendall(b'CONNECT {"verbose":false}\r\n')
            while not stop.wait(0.25):
                connection.sendall(b"PUB inlay.default.beat.\xff 1\r\na\r\n")
                answers["published"] += 1
        return answers

    return run


def _posts(*posts: Post) -> Callable[[], Send]:
    return lambda: posting(*posts)


def _large(field: str, make: Callable[[], Post]) -> Attack:
    return Attack(f"many keys: {field}", f"{_MANY_KEYS:,} keys", lambda: posting(make()))


ATTACKS: tuple[Attack, ...] = (
    Attack(
        "stop strings",
        "64 of 4,096 characters, n=24",
        lambda: _stop_strings(4096),
    ),
    Attack(
        "stop strings, allowed",
        "64 of 256 characters, n=24",
        lambda: _stop_strings(256),
    ),
    Attack(
        "grammars",
        "regex a?{5000}a{5000}, four keys; the second client wants small ones",
        _grammars,
        asked=lambda number: {"structured_outputs": {"regex": f"[ab]{number}"}},
    ),
    Attack(
        "grammars, compiled",
        "schemas that pass the count and compile for minutes, four keys; the second client wants "
        "small grammars",
        _compiled_grammars,
        asked=lambda number: {"structured_outputs": {"regex": f"[ab]{number}"}},
    ),
    Attack(
        "sequences",
        "n=128, max_tokens=1900, ignore_eos",
        _posts(_completion(n=128, max_tokens=1900, ignore_eos=True)),
    ),
    _large("logit_bias", lambda: _completion(logit_bias=_keys())),
    _large("metadata", lambda: _chat(metadata=_keys("a"))),
    _large("chat_template_kwargs", lambda: _chat(chat_template_kwargs=_keys())),
    _large("a tool call's arguments", _call_with_keys),
    _large("a message", lambda: _chat(_keys("a"))),
    Attack(
        "keys, allowed",
        "49,000 in chat_template_kwargs",
        lambda: posting(_chat(chat_template_kwargs=_keys(1, 49_000))),
    ),
    Attack(
        "white space, allowed",
        "16 MB before the object",
        lambda: posting(
            Post("/v1/completions", b" " * 16_000_000 + b'{"prompt":"a","max_tokens":1}')
        ),
    ),
    Attack(
        "white space",
        "60 MB before the object",
        lambda: posting(
            Post("/v1/completions", b" " * 60_000_000 + b'{"prompt":"a","max_tokens":1}')
        ),
    ),
    Attack(
        "/tokenize, refused",
        "60 MB of text",
        lambda: posting(_json("/tokenize", prompt="a b " * 15_000_000)),
    ),
    Attack(
        "truncate_prompt_tokens",
        "30 MB of text, 100 tokens kept",
        lambda: posting(_completion(prompt="a b " * 7_500_000, truncate_prompt_tokens=100)),
    ),
    Attack(
        "truncation, allowed",
        "16 MB of text, 100 tokens kept",
        lambda: posting(_completion(prompt="a b " * 4_000_000, truncate_prompt_tokens=100)),
    ),
    Attack(
        "a million ids",
        "5 MB of JSON",
        lambda: posting(_completion(prompt=[5] * _MANY)),
    ),
    Attack(
        "a million strings",
        "5 MB of JSON",
        lambda: posting(_json("/v1/embeddings", input=["a"] * _MANY)),
    ),
    Attack(
        "aborted uploads",
        "64 at once, 8 MB announced, 200 KB sent",
        lambda: aborted_uploads(8_000_000, 200_000),
    ),
    Attack(
        "aborted uploads, small",
        "64 at once, 1,000 bytes announced, 100 sent",
        lambda: aborted_uploads(1000, 100),
    ),
    Attack(
        "large bodies",
        "10 MB of base64 that is no tensor",
        lambda: posting(
            _json("/v1/completions", prompt_embeds=b64encode(bytes(7_800_000)).decode())
        ),
    ),
    Attack(
        "small chunks",
        "a body in chunks of one byte, 8 connections",
        lambda: sending(_CHUNKED, b"1\r\n \r\n" * 10_000),
    ),
    Attack(
        "many headers",
        "15,000 in each head, 8 connections, no key",
        lambda: sending(b"", b"GET /live HTTP/1.1\r\n" + b"a:\r\n" * 15_000 + b"\r\n"),
    ),
    Attack(
        "requests in a row",
        "without waiting for answers, 8 connections, no key",
        lambda: sending(b"", b"GET /live HTTP/1.1\r\n\r\n" * 10_000),
    ),
    Attack("hostile files", f"{len(FILES) + len(BOMBS)} files, each refused", _hostile_files),
    Attack("NATS", "a subject that is not UTF-8", nats_garbage, fleet=True),
)
"""Every attack, in the order of the table."""
