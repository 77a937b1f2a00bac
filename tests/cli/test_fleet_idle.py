"""A fleet whose workers all end while nothing is asked for: from 1 to 0 to 3."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.models import tiny
from tests.parts import Part, running
from tests.serving import free_port
from tests.transport.nats_server import NatsServer

pytestmark = pytest.mark.slow

ECHO = ("--engine", "echo", "--served-model-name", "m")
BODY = {"model": "m", "prompt": "the harbour town counts", "max_tokens": 8}
WAITING = 'inlay:router_requests_waiting{model_name="m"} '


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path) as server:
        yield server


def worker(nats: NatsServer) -> Part:
    return Part("worker", tiny("llama"), *ECHO, "--nats", nats.url, until=" serves ")


def waiting(client: httpx.Client) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.removeprefix(WAITING)) for line in lines if line.startswith(WAITING))


def ready(client: httpx.Client) -> int:
    return len(client.get("/health").json().get("workers", []))


def test_a_request_waits_while_the_first_worker_starts(nats: NatsServer) -> None:
    port = free_port()
    words = ("--nats", nats.url, "--port", port, "--router-absent-wait", 120)
    with ExitStack() as stack:
        first = worker(nats)
        stack.callback(first.end)
        stack.enter_context(running("frontend", *words, until="HTTP at"))
        base = f"http://127.0.0.1:{port}"
        client = stack.enter_context(httpx.Client(base_url=base, timeout=120))
        first.wait_ready()
        while ready(client) < 1:
            pass
        before = client.post("/v1/completions", json=BODY).raise_for_status().json()["choices"]
        first.end()
        while ready(client):
            pass
        # It has a model, and a place in its Service.
        assert client.get("/ready").status_code == 200
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(httpx.post, base + "/v1/completions", json=BODY, timeout=120)
            while waiting(client) < 1:
                assert not asked.done()
            more = [worker(nats) for _ in range(3)]
            for part in more:
                stack.callback(part.end)
            answer = asked.result()
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == before
        for part in more:
            part.wait_ready()
        while ready(client) < 3:
            pass
        assert waiting(client) == 0


def test_a_request_that_waited_in_vain_is_told_when_to_come_again(nats: NatsServer) -> None:
    port = free_port()
    words = ("--nats", nats.url, "--port", port, "--router-absent-wait", 0.5)
    with ExitStack() as stack:
        first = worker(nats)
        stack.callback(first.end)
        stack.enter_context(running("frontend", *words, until="HTTP at"))
        base = f"http://127.0.0.1:{port}"
        client = stack.enter_context(httpx.Client(base_url=base, timeout=120))
        first.wait_ready()
        while ready(client) < 1:
            pass
        first.end()
        while ready(client):
            pass
        answer = client.post("/v1/completions", json=BODY)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert waiting(client) == 0
        assert client.post("/v1/completions", json=BODY).status_code == 503
        assert client.post("/v1/completions", json={**BODY, "model": "no"}).status_code == 404
