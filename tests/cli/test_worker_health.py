"""The port that a supervisor asks whether a worker is frozen."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.models import tiny
from tests.parts import Part, workers_of
from tests.serving import free_port
from tests.transport.nats_server import NatsServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="SIGSTOP is POSIX's"),
]


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path) as server:
        yield server


def worker(nats: NatsServer, port: int) -> Part:
    words = ("--engine", "echo", "--served-model-name", "m", "--nats", nats.url)
    return Part("worker", tiny("llama"), *words, "--health-port", port, until=" serves ")


def status(port: int, path: str, within: float = 60.0) -> int:
    return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=within).status_code


def test_a_frozen_worker_fails_its_check_and_one_with_a_stuck_engine_passes(
    nats: NatsServer,
) -> None:
    port = free_port()
    part = worker(nats, port)
    try:
        part.wait_ready()
        assert (status(port, "/live"), status(port, "/ready")) == (200, 200)
        assert status(port, "/metrics") == 404
        # Busy without end: nothing of the engine's process runs.
        (engine,) = workers_of(part.process.pid)
        engine.suspend()
        assert status(port, "/live") == 200
        engine.resume()
        part.send(signal.SIGSTOP)
        with pytest.raises(httpx.TimeoutException):
            status(port, "/live", within=2.0)
        part.send(signal.SIGCONT)
        assert status(port, "/live") == 200
    finally:
        part.end()


def test_a_worker_is_not_ready_while_its_engine_is_gone(nats: NatsServer) -> None:
    port = free_port()
    part = worker(nats, port)
    try:
        part.wait_ready()
        (engine,) = workers_of(part.process.pid)
        engine.kill()
        while status(port, "/ready") == 200:
            pass
        assert status(port, "/live") == 200
        while status(port, "/ready") != 200:
            pass
    finally:
        part.end()


def test_a_port_that_is_taken_is_named(nats: NatsServer) -> None:
    words = ("--engine", "echo", "--nats", nats.url, "--health-port", nats.port)
    done = subprocess.run(
        [sys.executable, "-m", "inlay.cli", "worker", tiny("llama"), *map(str, words)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode != 0
    assert f"cannot listen on 127.0.0.1:{nats.port} for --health-port" in done.stderr
