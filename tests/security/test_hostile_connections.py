"""Connections that are slow, half open, cut, endless or lying, to a server that others are using."""

import contextlib
import functools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from inlay.http import bounded_http as http
from tests.live import Fleet, fleet
from tests.security.company import MIB, Attack, Question, settings, settle, under_attack
from tests.serving import Served

GOOD = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
JSON = b"content-type: application/json\r\n"


@contextlib.contextmanager
def connected(client: httpx.Client) -> Iterator[socket.socket]:
    """A bare connection to the client's server."""
    parts = urlsplit(str(client.base_url))
    with socket.create_connection(
        (parts.hostname or "", parts.port or 0), timeout=180
    ) as connection:
        yield connection


def head(*lines: bytes, path: bytes = b"/v1/completions") -> bytes:
    return (
        b"POST "
        + path
        + b" HTTP/1.1\r\nhost: x\r\n"
        + JSON
        + b"".join(line + b"\r\n" for line in lines)
        + b"\r\n"
    )


def answer(connection: socket.socket) -> bytes:
    """Read until the server closes; return b"" if it cuts the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while chunk := connection.recv(65536):
            received += chunk
    return received


def test_a_body_that_stops_coming_is_given_up(server: Served, asked: tuple[Question, ...]) -> None:
    def attack(client: httpx.Client) -> None:
        with connected(client) as connection:
            connection.sendall(head(b"content-length: 8000000") + b'{"prompt_embeds":"')
            assert answer(connection).startswith(b"HTTP/1.1 408")

    # What a body says it will be is held for it, and given back.
    under_attack(server, asked, [attack] * 8, attackers=8, grows=8 * 8_000_000)


def test_a_trickle_is_given_up(server: Served, asked: tuple[Question, ...]) -> None:
    def attack(client: httpx.Client) -> None:
        with connected(client) as connection:
            connection.sendall(head(b"content-length: 8000000"))
            connection.settimeout(0.1)
            received = b""
            while not received:
                connection.sendall(b" ")
                with contextlib.suppress(TimeoutError):
                    received = connection.recv(4096)
            assert received.startswith(b"HTTP/1.1 408")

    under_attack(server, asked, [attack] * 4, attackers=4)


def test_a_client_that_sends_no_more_but_reads_gets_its_answer(
    server: Served, asked: tuple[Question, ...]
) -> None:
    whole = head(b"content-length: %d" % len(GOOD)) + GOOD
    chunked = head(b"transfer-encoding: chunked") + b"%x\r\n" % len(GOOD) + GOOD + b"\r\n0\r\n\r\n"
    long = json.dumps({"prompt": "a", "max_tokens": 1, "user": "b" * 200_000}).encode()
    larger = head(b"content-length: %d" % len(long)) + long

    def sending(request: bytes, *answered: bytes) -> Attack:
        def attack(client: httpx.Client) -> None:
            with connected(client) as connection:
                connection.sendall(request)
                connection.shutdown(socket.SHUT_WR)
                received = answer(connection).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"", 1)
                statuses = [part[:12] for part in received.split(b"HTTP/1.1")[1:]]
                assert [status.split()[0] for status in statuses] == [*answered]

        return attack

    # The rest of the last will never come, so there is nothing to answer.
    attacks = [sending(request, b"200") for request in (whole, chunked, larger)]
    attacks += [sending(whole + whole, b"200", b"200"), sending(whole[:-5])]
    under_attack(server, asked, attacks)


CODED = {
    "gzip, chunked": (b"transfer-encoding: gzip, chunked",),
    "two headers": (b"transfer-encoding: gzip", b"transfer-encoding: chunked"),
    "chunked twice": (b"transfer-encoding: chunked, chunked",),
    "identity, chunked": (b"transfer-encoding: identity, chunked",),
}


@pytest.mark.parametrize("coded", CODED)
def test_a_body_in_another_transfer_coding_than_chunked_is_refused(
    server: Served, coded: str
) -> None:
    body = b"%x\r\n" % len(GOOD) + GOOD + b"\r\n0\r\n\r\n"
    for path in (b"/v1/completions", b"/v1/prompt_embeds", b"/sleep"):
        with httpx.Client(base_url=server.url) as client, connected(client) as connection:
            connection.sendall(head(*CODED[coded], path=path) + body)
            received = answer(connection)
            assert received[:12] in (b"HTTP/1.1 501", b"HTTP/1.1 400")
            assert b"transfer-encoding" in received.lower() or received[9:12] == b"400"


def test_uploads_that_break_off_leave_nothing_behind(
    server: Served, asked: tuple[Question, ...]
) -> None:
    def attack(client: httpx.Client) -> None:
        with connected(client) as connection:
            connection.sendall(
                head(b"content-length: 8000000") + b'{"prompt_embeds":"' + b"A" * 2_000_000
            )

    # Each is held until the server has noticed; all together are within --max-inflight-bytes.
    under_attack(server, asked, [attack] * 20, grows=256 * MIB)


def test_streams_that_nobody_waits_for_are_ended(
    server: Served, asked: tuple[Question, ...]
) -> None:
    body = {"prompt": "the harbour", **settings(480), "ignore_eos": True, "stream": True}

    def attack(client: httpx.Client) -> None:
        with client.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())

    under_attack(server, asked, [attack] * 8)
    settle(lambda: running(server) == 0, "streams are still under way")


def running(server: Served) -> int:
    """Sequences the engine has under way, or, before it was first asked, more than none."""
    lines = httpx.get(server.url + "/metrics").text.splitlines()
    found = [
        line
        for line in lines
        if line.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{"))
    ]
    return sum(int(float(line.split()[-1])) for line in found) if found else 1


def test_a_content_length_that_lies_is_believed_and_no_more(
    server: Served, asked: tuple[Question, ...]
) -> None:
    def short(client: httpx.Client) -> None:
        # What is behind the end is the next request, and no good one.
        with connected(client) as connection:
            connection.sendall(head(b"content-length: 2") + GOOD)
            # Cut, as it is then, the connection may take the answer with it.
            received = answer(connection)
            assert received[:12] in (b"", b"HTTP/1.1 400")
            assert b"HTTP/1.1 200" not in received

    def twice(client: httpx.Client) -> None:
        with connected(client) as connection:
            connection.sendall(head(b"content-length: 2", b"content-length: %d" % len(GOOD)) + GOOD)
            assert b"HTTP/1.1 200" not in answer(connection)

    def both(client: httpx.Client) -> None:
        # The classic of request smuggling.
        with connected(client) as connection:
            inner = b"0\r\n\r\nPOST /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n"
            connection.sendall(
                head(b"content-length: %d" % len(inner), b"transfer-encoding: chunked") + inner
            )
            assert b"HTTP/1.1 200" not in answer(connection)

    def negative(client: httpx.Client) -> None:
        for value in (b"-1", b"1e3", b"0x10", b"99999999999999999999999"):
            with connected(client) as connection:
                connection.sendall(head(b"content-length: " + value) + GOOD)
                assert answer(connection)[:12] in (b"", b"HTTP/1.1 400", b"HTTP/1.1 413")

    under_attack(server, asked, [short, twice, both, negative])


def test_chunks_without_an_end_are_cut_at_the_limit(
    server: Served, asked: tuple[Question, ...]
) -> None:
    def attack(client: httpx.Client) -> None:
        def chunks() -> Iterator[bytes]:
            while True:
                yield b" " * MIB

        with contextlib.suppress(httpx.WriteError, httpx.RemoteProtocolError, httpx.ReadError):
            response = client.post(
                "/v1/completions", content=chunks(), headers={"content-type": "application/json"}
            )
            assert response.status_code == 413

    under_attack(server, asked, [attack], attackers=1, grows=3 * 64 * MIB)


def test_a_body_that_announces_too_much_is_refused_unread(
    server: Served, asked: tuple[Question, ...]
) -> None:
    def attack(client: httpx.Client) -> None:
        with connected(client) as connection:
            connection.sendall(head(b"content-length: 1000000000000"))
            assert answer(connection).startswith(b"HTTP/1.1 413")

    under_attack(server, asked, [attack] * 8, attackers=4)


def flood(start: bytes, piece: bytes, total: int) -> Callable[[httpx.Client], None]:
    """An attack that sends `start` and then `piece` over and over."""

    def attack(client: httpx.Client) -> None:
        with connected(client) as connection:
            connection.sendall(start)
            sent = 0
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                while sent < total:
                    connection.sendall(piece)
                    sent += len(piece)
            assert sent < total, "the server took all of it"

    return attack


FLOODS = {
    "headers": (b"POST /v1/completions HTTP/1.1\r\n", b"x-a: " + b"a" * 60_000 + b"\r\n"),
    "short headers": (b"POST /v1/completions HTTP/1.1\r\n", b"a:b\r\n" * 10_000),
    "one header": (b"POST /v1/completions HTTP/1.1\r\nx-a: ", b"a" * 65_536),
    "a path": (b"POST /", b"a" * 65_536),
}


@pytest.mark.parametrize("flooded", FLOODS)
def test_a_head_without_an_end_is_cut(
    server: Served, asked: tuple[Question, ...], flooded: str
) -> None:
    start, piece = FLOODS[flooded]
    under_attack(server, asked, [flood(start, piece, 128 * MIB)], attackers=1)


def test_trailers_without_an_end_take_no_memory(
    server: Served, asked: tuple[Question, ...]
) -> None:
    start = head(b"transfer-encoding: chunked") + b"%x\r\n" % len(GOOD) + GOOD + b"\r\n0\r\n"

    def attack(client: httpx.Client) -> None:
        with (
            connected(client) as connection,
            contextlib.suppress(ConnectionResetError, BrokenPipeError, TimeoutError),
        ):
            connection.settimeout(5)
            connection.sendall(start)
            for _ in range(1000):
                connection.sendall(b"x-a: " + b"a" * 60_000 + b"\r\n")

    under_attack(server, asked, [attack], attackers=1)  # fmt: skip


def test_requests_in_a_row_on_one_connection_wait_outside_of_memory(
    server: Served, asked: tuple[Question, ...]
) -> None:
    # Each waits for the one before it; what is not yet begun must not pile up.
    one = head(b"content-length: %d" % len(GOOD)) + GOOD

    def attack(client: httpx.Client) -> None:
        with connected(client) as connection:
            connection.settimeout(2)
            with contextlib.suppress(TimeoutError, ConnectionResetError, BrokenPipeError):
                for _ in range(400):
                    connection.sendall(one * 1000)

    under_attack(server, asked, [attack], attackers=1)


@pytest.fixture(scope="module")
def hurried(path: Path) -> Iterator[Fleet]:
    """A server with less patience."""
    with pytest.MonkeyPatch.context() as patch, fleet(path) as running:
        patch.setattr(http, "HEAD_TIMEOUT", 0.5)
        yield running


def test_a_head_that_stops_coming_is_given_up(hurried: Fleet) -> None:
    url = hurried.serve()
    for begun in (b"", b"P", b"POST /v1/completions HTTP/1.1\r\nx-a: "):
        with httpx.Client(base_url=url) as client, connected(client) as connection:
            connection.sendall(begun)
            assert answer(connection).startswith(b"HTTP/1.1 408")
    with httpx.Client(base_url=url) as client, connected(client) as connection:
        # One that is kept has as much time for its next head, from its first byte on.
        for _ in range(2):
            connection.sendall(b"GET /live HTTP/1.1\r\n\r\n")
            received = b""
            while not received.endswith(b"}"):
                received += connection.recv(4096)
            assert received.startswith(b"HTTP/1.1 200")
            time.sleep(0.7)
        connection.sendall(b"GET /live")
        assert answer(connection).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("length", [1000, 8_000_000])
@pytest.mark.parametrize("half", [False, True])
def test_an_upload_that_breaks_off_is_nothing_to_log(
    hurried: Fleet, caplog: pytest.LogCaptureFixture, length: int, half: bool
) -> None:
    url = hurried.serve()
    with httpx.Client(base_url=url) as client, connected(client) as connection:
        connection.sendall(head(b"content-length: %d" % length) + b'{"prompt_embeds":"')
        settle(lambda: hurried.apps[url].server.budget.used > 0, "the upload was never noticed")
        if half:
            connection.shutdown(socket.SHUT_WR)
            assert answer(connection) == b""
    settle(lambda: hurried.apps[url].server.budget.used == 0, "the upload is still held")
    settle(
        lambda: b"inlay:client_disconnects_total 1.0" in httpx.get(url + "/metrics").content,
        "not counted",
    )
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def test_a_client_that_leaves_while_its_answer_is_made_is_noticed(hurried: Fleet) -> None:
    url = hurried.serve()
    body = json.dumps({"prompt": "a", "max_tokens": 480, "ignore_eos": True, "n": 8}).encode()
    with httpx.Client(base_url=url) as client, connected(client) as connection:
        connection.sendall(head(b"content-length: %d" % len(body)) + body)
        settle(lambda: hurried.running() > 0, "the request was never begun")
    settle(
        lambda: b"inlay:client_disconnects_total 1.0" in httpx.get(url + "/metrics").content,
        "it was not noticed that the client left",
    )


def test_uploads_that_broke_off_before_their_turn_take_none(
    hurried: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    url = hurried.serve()
    freed = threading.Event()
    caplog.set_level("INFO")

    def begun() -> int:
        return sum(record.getMessage().startswith("request") for record in caplog.records)

    hurried.loop.call_soon_threadsafe(freed.wait, 60)
    with httpx.Client(base_url=url) as client:
        for length in (1000, 8_000_000) * 50:
            with connected(client) as connection:
                connection.sendall(head(b"content-length: %d" % length) + b'{"prompt_embeds":"')
        freed.set()
        # Accepted after all of them.
        with connected(client) as connection:
            connection.sendall(head(b"content-length: %d" % len(GOOD)) + GOOD)
            assert connection.recv(12) == b"HTTP/1.1 200"
    settle(lambda: begun() > 0, "the good request was not logged")
    assert begun() == 1


def test_a_head_over_the_limit_is_refused_by_name(server: Served) -> None:
    with httpx.Client(base_url=server.url) as client, connected(client) as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\nx-a: " + b"a" * http.MAX_HEAD)
        received = answer(connection)
    assert received.startswith(b"HTTP/1.1 431")
    error = json.loads(received.partition(b"\r\n\r\n")[2])["error"]
    assert error["type"] == "invalid_request_error"
    assert str(http.MAX_HEAD) in error["message"]


def test_a_body_in_many_small_chunks_is_refused(
    server: Served, asked: tuple[Question, ...]
) -> None:
    coded = head(b"transfer-encoding: chunked")

    def in_chunks(body: bytes, size: int) -> bytes:
        pieces = (body[start : start + size] for start in range(0, len(body), size))
        return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)

    def endless(client: httpx.Client) -> None:
        with connected(client) as connection:
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                connection.sendall(coded + in_chunks(b" " * 200_000, 1))
            received = answer(connection)
            assert received.startswith(b"HTTP/1.1 400")
            assert b"the body came in 4097 chunks of 4097 bytes" in received

    def ended(client: httpx.Client) -> None:
        # What is left of a body that is dropped must not be taken for all of it.
        with connected(client) as connection:
            connection.sendall(coded + in_chunks(GOOD + b" " * 4100, 1) + b"0\r\n\r\n")
            assert answer(connection).startswith(b"HTTP/1.1 400")

    def allowed(client: httpx.Client) -> None:
        for body, size in ((GOOD + b" " * 3000, 1), (GOOD + b" " * 400_000, 64)):
            with connected(client) as connection:
                connection.sendall(coded + in_chunks(body, size) + b"0\r\n\r\n")
                connection.shutdown(socket.SHUT_WR)
                assert b"HTTP/1.1 200" in answer(connection)

    under_attack(server, asked, [endless, ended, allowed], attackers=1)


LONG_HEADS = {
    "many headers": (b"/live", b"a:\r\n" * 600, b"512 headers"),
    "very many headers": (b"/live", b"a:\r\n" * 12_000, b"512 headers"),
    "a long path": (b"/" + b"%41" * 2800, b"", b"8192 bytes"),
    "a very long path": (b"/" + b"%41" * 20_000, b"", b"8192 bytes"),
    "a long query": (b"/live?" + b"a" * 8200, b"", b"8192 bytes"),
}


@pytest.mark.parametrize("long", LONG_HEADS)
def test_many_headers_and_long_paths_are_refused(
    server: Served, asked: tuple[Question, ...], long: str
) -> None:
    target, lines, said = LONG_HEADS[long]

    def attack(client: httpx.Client) -> None:
        with connected(client) as connection:
            connection.sendall(
                b"GET " + target + b" HTTP/1.1\r\nconnection: close\r\n" + lines + b"\r\n"
            )
            received = answer(connection)
            assert received.startswith(b"HTTP/1.1 431")
            assert said in received

    under_attack(server, asked, [attack], attackers=1)


@pytest.fixture
def large(hurried: Fleet) -> tuple[str, bytes]:
    """A server with an answer that no socket holds, and the answer."""
    url = hurried.serve()
    body = b"x" * 64 * MIB
    hurried.apps[url]._document = functools.cache(lambda: body)
    return url, body


ASKED = b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n"


def answered(url: str) -> bool:
    return b'route="/openapi.json",status="200"' in httpx.get(url + "/metrics").content


def test_a_long_answer_is_held_by_its_request_until_it_is_read(large: tuple[str, bytes]) -> None:
    url, body = large
    with httpx.Client(base_url=url) as client, connected(client) as connection:
        connection.sendall(ASKED)
        received = connection.recv(65536)
        for _ in range(10):
            assert not answered(url)
        while not received.endswith(b"x") or len(received) < len(body):
            received += connection.recv(MIB)
        assert received.partition(b"\r\n\r\n")[2] == body
        settle(lambda: answered(url), "it was not noticed that the answer was read")


@pytest.mark.parametrize("kept", [True, False])
def test_a_client_that_reads_nothing_is_given_up(
    large: tuple[str, bytes], monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    url, body = large
    monkeypatch.setattr(http, "READ_TIMEOUT", 0.3)
    with httpx.Client(base_url=url) as client, connected(client) as connection:
        connection.sendall(ASKED if kept else ASKED.replace(b"host: x", b"connection: close"))
        settle(lambda: answered(url), "it is still waited for")
        assert len(answer(connection)) < len(body)
