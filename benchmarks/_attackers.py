"""What attackers of `benchmarks.attacks` do: ask, leave, send and open without a pause.

Traffic goes to the server that the benchmark started itself, on 127.0.0.1.
"""

import contextlib
import http.client
import json
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Event
from typing import NamedTuple, TypeAlias

KEYS = ("attacker-0", "attacker-1", "attacker-2", "attacker-3")
"""API keys of the attackers; each sends with one of them."""


TIMEOUT = 60.0
"""Seconds after which a client gives up on an answer."""


_PIECE = 256 * 1024


class Target(NamedTuple):
    """The server that is attacked.

    Attributes:
        port: of its HTTP server on 127.0.0.1.
        nats_port: of its NATS server, where it is a fleet.
        worker_ports: on which its workers listen, where it is a fleet.
    """

    port: int
    nats_port: int | None = None
    worker_ports: tuple[int, ...] = ()


class Post(NamedTuple):
    """One request: its path, its body and what that is."""

    path: str
    body: bytes
    kind: str = "application/json"


Answers: TypeAlias = "Counter[str]"
"""How many requests got which status; "none" where the connection ended without an answer."""


Send: TypeAlias = Callable[[Target, Event], Answers]
"""Attacks until the event is set."""


def posting(*posts: Post, keys: Sequence[str] = KEYS[:1], connections: int = 1) -> Send:
    """Send `posts` in turns, without a pause, on so many connections for each key.

    The connections begin with different ones.
    """

    def run(target: Target, stop: Event) -> Answers:
        answers: Answers = Counter()

        def one(key: str, count: int) -> None:
            while not stop.is_set():
                answers[_post(target.port, posts[count % len(posts)], key)] += 1
                count += 1

        threads = [
            threading.Thread(target=one, args=(key, first), daemon=True)
            for first, key in enumerate((*keys,) * connections)
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
    return _answer(port, post, key)[0]


def _answer(port: int, post: Post, key: str) -> tuple[str, bytes]:
    """The status of the answer, or "none", and its body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    pieces = (post.body[start : start + _PIECE] for start in range(0, len(post.body), _PIECE))
    headers = {
        "Content-Type": post.kind,
        "Content-Length": str(len(post.body)),
        "Authorization": f"Bearer {key}",
    }
    with contextlib.closing(connection):
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request("POST", post.path, pieces, headers)
            response = connection.getresponse()
            return str(response.status), response.read()
        except (OSError, http.client.HTTPException):
            return "none", b""


def going_on(ask: Callable[[str | None], Post], then: Callable[[str], Post] | None = None) -> Send:
    """Ask with the id of the answer before, without a pause; or ask each time anew, and `then`."""

    def run(target: Target, stop: Event) -> Answers:
        answers: Answers = Counter()
        last: str | None = None
        while not stop.is_set():
            status, body = _answer(target.port, ask(last), KEYS[0])
            answers[status] += 1
            if status == "200":
                last = json.loads(body)["id"]
                if then is not None:
                    answers[_post(target.port, then(last), KEYS[0])] += 1
        return answers

    return run


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


def leaving(
    ask: Callable[[int], Post], *, after: float, connections: int, key: str = KEYS[0]
) -> Send:
    """Ask, and close the connection after so many seconds; on so many connections."""

    def run(target: Target, stop: Event) -> Answers:
        answers: Answers = Counter()

        def one(first: int) -> None:
            number = first
            while not stop.is_set():
                post = ask(number)
                head = (
                    f"POST {post.path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                    f"authorization: Bearer {key}\r\ncontent-length: {len(post.body)}\r\n\r\n"
                )
                with (
                    contextlib.suppress(OSError),
                    socket.create_connection(("127.0.0.1", target.port)) as connection,
                ):
                    connection.sendall(head.encode() + post.body)
                    stop.wait(after)
                answers["left"] += 1
                number += connections

        for first in range(connections):
            threading.Thread(target=one, args=(first,), daemon=True).start()
        stop.wait()
        return Counter(answers)

    return run


def scraping(path: str, connections: int) -> Send:
    """Read a page without a key, without a pause, on so many connections."""

    def run(target: Target, stop: Event) -> Answers:
        answers: Answers = Counter()

        def one() -> None:
            while not stop.is_set():
                with contextlib.suppress(OSError, http.client.HTTPException):
                    connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=60)
                    with contextlib.closing(connection):
                        while not stop.is_set():
                            connection.request("GET", path)
                            response = connection.getresponse()
                            response.read()
                            answers[str(response.status)] += 1

        for _ in range(connections):
            threading.Thread(target=one, daemon=True).start()
        stop.wait()
        return Counter(answers)

    return run


def unproven(connections: int, *, stay: bool = True) -> Send:
    """Open TLS connections to the worker, prove nothing, and open others when they are closed.

    Without `stay` they are closed after the handshake.
    """

    def run(target: Target, stop: Event) -> Answers:
        answers: Answers = Counter()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

        def one(port: int) -> None:
            while not stop.is_set():
                with (
                    contextlib.suppress(OSError),
                    socket.create_connection(("127.0.0.1", port)) as bare,
                    context.wrap_socket(bare) as connection,
                ):
                    connection.settimeout(TIMEOUT)
                    while stay and connection.recv(1024):
                        pass
                answers["closed"] += 1

        for number in range(connections):
            port = target.worker_ports[number % len(target.worker_ports)]
            threading.Thread(target=one, args=(port,), daemon=True).start()
        stop.wait()
        return Counter(answers)

    return run
