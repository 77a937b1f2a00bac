"""A machine that stands still for longer than every limit.

Nobody is given up for time in which nobody ran.
"""

import json
import signal
import socket
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.models import tiny
from tests.parts import running, workers_of
from tests.serving import serving
from tests.sse import events
from tests.transport.nats_server import NatsServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT_SECONDS = 5
"""After which an engine's process that does not answer is ended.

Frontends and workers give each other up after 3 to 5.
"""
SLOW_SECONDS = 1.5
"""For how long an engine's process stands still before the others do.

So that somebody is waiting for its answer.
"""
STALL_SECONDS = 8
CLIENT_SECONDS = 300
ASKED = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 480, "temperature": 0, "ignore_eos": True}


def family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def test_a_machine_that_stood_still_kills_no_healthy_engine_and_ends_no_stream(
    tmp_path: Path,
) -> None:
    names = ("--served-model-name", "m", "--dtype", "float32", "--num-threads", 1)
    limit = ("--health-process-timeout", LIMIT_SECONDS)
    with NatsServer(tmp_path) as nats:
        there = ("--nats", nats.url)
        with (
            running("worker", tiny("llama"), *there, *names, *limit, until=" serves ") as worker,
            serving(*there, command="frontend") as frontend,
        ):
            (engine,) = workers_of(worker.process.pid)
            everybody = family(psutil.Process(worker.process.pid)) + family(
                psutil.Process(frontend.process.pid)
            )
            assert nats._process is not None
            everybody.append(psutil.Process(nats._process.pid))
            expected = httpx.post(
                frontend.v1 + "/completions",
                json={**ASKED, "return_token_ids": True},
                timeout=CLIENT_SECONDS,
            ).json()["choices"][0]["token_ids"]
            seen: list[int] = []
            with httpx.stream(
                "POST",
                frontend.v1 + "/completions",
                json={**ASKED, "stream": True, "return_token_ids": True},
                timeout=CLIENT_SECONDS,
            ) as stream:
                for data in events(stream):
                    if data == "[DONE]":
                        continue
                    event = json.loads(data)
                    assert "error" not in event, event
                    first = not seen
                    seen += event["choices"][0].get("token_ids") or []
                    if first:
                        assert len(seen) < len(expected)
                        stand_still(engine, everybody)
            assert seen == expected
            assert [child.pid for child in workers_of(worker.process.pid)] == [engine.pid]
            assert httpx.get(frontend.url + "/ready", timeout=CLIENT_SECONDS).status_code == 200
            assert not [
                line for line in worker.said if "is killed" in line or "started again" in line
            ]


def test_an_upload_that_came_while_the_server_stood_still_is_answered() -> None:
    """The client is not late for time in which nobody read what it had sent."""
    options = ("--engine", "echo", "--served-model-name", "m", "--body-timeout", LIMIT_SECONDS)
    with serving(tiny("llama"), *options) as server:
        everybody = family(psutil.Process(server.process.pid))
        body = json.dumps({"model": "m", "prompt": [5, 6, 7], "max_tokens": 4}).encode()
        host, port = server.url.removeprefix("http://").split(":")
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        )
        with socket.create_connection((host, int(port)), CLIENT_SECONDS) as connection:
            connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body[:9])
            assert httpx.get(server.url + "/live", timeout=CLIENT_SECONDS).status_code == 200
            for process in everybody:
                process.send_signal(signal.SIGSTOP)
            connection.sendall(body[9:])
            time.sleep(STALL_SECONDS)
            for process in everybody:
                process.send_signal(signal.SIGCONT)
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")


def stand_still(engine: psutil.Process, everybody: list[psutil.Process]) -> None:
    """As a machine without memory: one stops first, then all, and all go on at the same time."""
    engine.send_signal(signal.SIGSTOP)
    time.sleep(SLOW_SECONDS)
    for process in everybody:
        process.send_signal(signal.SIGSTOP)
    time.sleep(STALL_SECONDS)
    for process in everybody:
        process.send_signal(signal.SIGCONT)
