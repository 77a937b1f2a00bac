"""`inlay serve` while its worker is not there: from the start, and after the worker has died."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.models import tiny
from tests.parts import workers_of
from tests.serving import Served, serving, starting
from tests.sse import events

PROMPT = {"prompt": "the lighthouse keeper counted the ships", "max_tokens": 20, "temperature": 0}
PATIENCE = 90.0

client = httpx.Client(verify=False, timeout=180)
"""One for all: making what verifies certificates takes long."""


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    client.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(tiny("llama"), "--served-model-name", "tiny") as server:
        yield server


def complete(url: str, **fields: Any) -> httpx.Response:
    return client.post(url + "/v1/completions", json={"model": "tiny", **PROMPT, **fields})


def worker_of(served: Served) -> psutil.Process:
    (worker,) = workers_of(served.process.pid)
    return worker


def wait_for(url: str, status: int) -> httpx.Response:
    """The first answer with `status`; any other is 503."""
    deadline = time.monotonic() + PATIENCE
    while (answer := client.get(url)).status_code != status:
        assert answer.status_code == 503
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return answer


def test_a_worker_that_is_killed_mid_stream_is_an_error_event_then_503_then_the_same_answers(
    served: Served,
) -> None:
    before = complete(served.url)
    seen: list[str] = []
    body = {"model": "tiny", **PROMPT, "max_tokens": 480, "ignore_eos": True, "stream": True}
    worker = worker_of(served)
    with client.stream("POST", served.v1 + "/completions", json=body) as stream:
        assert stream.status_code == 200
        for event in events(stream):
            seen.append(event)
            if len(seen) == 1:
                worker.kill()
                # The stream would go on if the next one were there soon.
                following = _worker_process(
                    served, time.monotonic() + PATIENCE, other_than=worker.pid
                )
                following.suspend()
    errors = [json.loads(event)["error"] for event in seen if "error" in event]
    assert [error["type"] for error in errors] == ["overloaded_error"]
    assert "gone" in errors[0]["message"]
    refused = complete(served.url)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["type"] == "overloaded_error"
    health = client.get(served.url + "/health")
    assert health.status_code == 503
    assert "killed by SIGKILL" in health.text
    assert client.get(served.url + "/live").status_code == 200
    following.resume()
    wait_for(served.url + "/ready", 200)
    after = complete(served.url)
    assert after.status_code == 200
    assert after.json()["choices"] == before.json()["choices"]
    assert not psutil.pid_exists(worker.pid)
    assert worker_of(served).pid == following.pid


def test_http_answers_while_the_model_loads() -> None:
    with starting(tiny("llama"), "--served-model-name", "tiny") as server:
        deadline = time.monotonic() + PATIENCE
        worker = _worker_process(server, deadline)
        worker.suspend()
        try:
            while True:
                try:
                    live = client.get(server.url + "/live")
                    break
                except httpx.ConnectError:
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
            assert live.status_code == 200
            ready = client.get(server.url + "/ready")
            assert (ready.status_code, ready.headers["retry-after"]) == (503, "1")
            assert "loading" in ready.json()["error"]["message"]
            refused = complete(server.url)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert client.get(server.v1 + "/models").json()["data"] == []
        finally:
            worker.resume()
        wait_for(server.url + "/ready", 200)
        assert complete(server.url).status_code == 200


def _worker_process(server: Served, deadline: float, other_than: int = 0) -> psutil.Process:
    """The worker, once it runs what it was started for: until then its parent waits for it."""
    while time.monotonic() < deadline:
        for child in workers_of(server.process.pid):
            if child.pid != other_than:
                return child
        time.sleep(0.005)
    raise TimeoutError


def ranks_of(worker: psutil.Process) -> list[psutil.Process]:
    """The processes of a model's ranks but the first."""
    return [each for each in worker.children() if "--multiprocessing-fork" in each.cmdline()]


def test_a_rank_that_is_killed_is_started_again_with_its_worker(served: Served) -> None:
    expected = complete(served.url).json()["choices"]
    words = ("--served-model-name", "tiny", "--tensor-parallel-size", 2)
    with serving(tiny("llama"), *words) as divided:
        assert complete(divided.url).json()["choices"] == expected
        worker = worker_of(divided)
        (rank,) = ranks_of(worker)
        rank.kill()
        deadline = time.monotonic() + PATIENCE
        while (answer := complete(divided.url)).status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert answer.json()["choices"] == expected
        again = worker_of(divided)
        assert again.pid != worker.pid
        (following,) = ranks_of(again)
        assert following.pid != rank.pid
        # One that is stopped ends with its worker too.
        following.suspend()
        again.kill()
        _, alive = psutil.wait_procs([again, following], PATIENCE)
        assert not alive
