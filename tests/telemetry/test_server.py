"""Logs and traces of a real server.

One line and one tree of spans a request, and nothing of what was said.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from inlay.render import Renderer
from tests.models import tiny
from tests.payloads import constant
from tests.serving import free_port
from tests.telemetry.collector import Collector, collecting

pytestmark = pytest.mark.slow

SECRET_WORDS = "the harbour town counts its lanterns"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
ANOTHER = "5cf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
START_SECONDS = 180


@dataclass
class Told:
    """A server, its standard error and its spans."""

    url: str
    path: Path
    collector: Collector
    process: "subprocess.Popen[bytes]"

    def ask(self, trace: str | None = None, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "max_tokens": 12, "temperature": 0, **fields}
        headers = {
            "authorization": "Bearer sk-alice-private",
            "traceparent": f"00-{trace or secrets.token_hex(16)}-{PARENT}-01",
            "x-request-id": f"r-{time.monotonic_ns()}",
        }
        return httpx.post(self.url + "/v1/completions", json=body, headers=headers, timeout=180)

    def line_of(self, request_id: str) -> dict[str, Any]:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for line in self.path.read_text().splitlines():
                if line.startswith("{") and json.loads(line).get("id") == request_id:
                    found: dict[str, Any] = json.loads(line)
                    return found
            time.sleep(0.05)
        raise AssertionError(self.path.read_text())


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    path = tmp_path_factory.mktemp("told") / "stderr"
    port = free_port()
    words = [
        *("serve", str(tiny("llama")), "--served-model-name", "tiny", "--port", str(port)),
        *("--enable-prompt-embeds", "--api-key", "sk-alice-private", "--log-format", "json"),
    ]
    with collecting() as collector, path.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "inlay.cli", *words, "--otlp-traces-endpoint", collector.url],
            env={**os.environ, "OMP_NUM_THREADS": "1", "OTEL_BSP_SCHEDULE_DELAY": "100"},
            stderr=file,
            stdin=subprocess.DEVNULL,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + START_SECONDS
            while not _ready(url):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.2)
            yield Told(url, path, collector, process)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


def _ready(url: str) -> bool:
    try:
        return httpx.get(url + "/ready").status_code == 200
    except httpx.ConnectError:
        return False


def test_a_request_is_one_line_of_counts_and_times(told: Told) -> None:
    answer = told.ask(prompt=SECRET_WORDS)
    usage = answer.json()["usage"]
    line = told.line_of(answer.headers["x-request-id"])
    assert line["level"] == "INFO"
    assert (line["message"], line["route"], line["status"]) == ("request", "/v1/completions", 200)
    assert (line["model"], line["prompt_tokens"], line["output_tokens"]) == (
        "tiny",
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    assert 0 < line["ttft_ms"] <= line["ms"]
    assert len(line["tenant"]) == 12
    refused = told.ask(prompt=SECRET_WORDS, max_tokens=-1)
    line = told.line_of(refused.headers["x-request-id"])
    assert (line["status"], line["error"]) == (400, "invalid_request_error")


def test_a_stream_cut_by_ctrl_c_is_logged_with_the_error_its_client_got(tmp_path: Path) -> None:
    port = free_port()
    words = [
        *("serve", str(tiny("llama")), "--engine", "echo", "--max-model-len", "5000000"),
        *("--port", str(port), "--drain-timeout", "1", "--log-format", "json"),
    ]
    path = tmp_path / "stderr"
    with path.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "inlay.cli", *words],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=file,
            stdin=subprocess.DEVNULL,
        )
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_SECONDS
    while not _ready(url):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)
    body = {"prompt": "It is", "max_tokens": 4_000_000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", url + "/v1/completions", json=body, timeout=180) as stream:
        lines = stream.iter_text()
        text = next(lines)
        process.send_signal(signal.SIGINT)
        for more in lines:
            text = text[-4096:] + more
    process.wait(30)
    event = json.loads(text.split("\n\n")[-3].removeprefix("data: "))
    logged = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
    (line,) = [line for line in logged if line.get("route") == "/v1/completions"]
    assert line["status"] == 200
    assert line["stream_error"] == event["error"]["type"] == "overloaded_error"
    assert "error" not in line


def test_a_request_is_a_tree_of_spans_from_http_to_the_engine(told: Told) -> None:
    told.collector.bodies.clear()
    assert told.ask(TRACE, prompt=SECRET_WORDS + " every night", ignore_eos=True).status_code == 200
    found = told.collector.wait_for(bytes.fromhex(TRACE), 6)
    assert set(found) == {
        "POST /v1/completions", "inlay.prepare", "inlay.request", "inlay.queue", "inlay.prefill", "inlay.decode",
    }  # fmt: skip
    service, http = found["POST /v1/completions"]
    assert (service, http.parent_span_id.hex()) == ("inlay-frontend", PARENT)
    service, request = found["inlay.request"]
    assert (service, request.parent_span_id) == ("inlay-worker", http.span_id)
    assert found["inlay.prepare"][1].parent_span_id == http.span_id
    stages = [found[f"inlay.{name}"][1] for name in ("queue", "prefill", "decode")]
    assert all(stage.parent_span_id == request.span_id for stage in stages)
    assert (
        http.start_time_unix_nano <= request.start_time_unix_nano == stages[0].start_time_unix_nano
    )
    for before, after in pairwise(stages):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    assert stages[-1].end_time_unix_nano <= http.end_time_unix_nano
    values = {item.key: item.value for item in request.attributes}
    assert values["gen_ai.usage.output_tokens"].int_value == 12


def test_neither_tells_anything_of_what_was_said(told: Told) -> None:
    answers = [
        told.ask(ANOTHER, prompt=SECRET_WORDS),
        told.ask(ANOTHER, prompt=SECRET_WORDS, response_format={"type": SECRET_WORDS}),
        told.ask(ANOTHER, prompt_embeds=constant(0.25, rows=7)),
        told.ask(ANOTHER, prompt_embeds=constant(float("nan"))),
        told.ask(ANOTHER, prompt=[[SECRET_WORDS]]),
        told.ask(ANOTHER, prompt=SECRET_WORDS * 200),
        told.ask(ANOTHER, prompt=SECRET_WORDS, stop=["lanterns"], user=SECRET_WORDS),
    ]
    for answer in answers:
        told.line_of(answer.headers["x-request-id"])
    text = answers[0].json()["choices"][0]["text"]
    ids = Renderer.load(tiny("llama")).encode(SECRET_WORDS, add_special_tokens=False)
    told.collector.wait_for(bytes.fromhex(ANOTHER), 7)
    everything = told.path.read_bytes() + b"".join(told.collector.bodies)
    assert len(ids) > 4
    for secret in (
        SECRET_WORDS, "harbour", "lanterns", text.strip(), "sk-alice-private",
        ", ".join(map(str, ids[:3])), ",".join(map(str, ids[:3])), constant(0.25, rows=7)[:64],
    ):  # fmt: skip
        assert secret.encode() not in everything
    assert b"r-" in everything


def test_probes_leave_no_lines(told: Told) -> None:
    lines = len(told.path.read_text().splitlines())
    for path in ("/live", "/ready", "/health", "/metrics"):
        assert httpx.get(told.url + path).status_code == 200
    answer = told.ask(prompt="a")
    told.line_of(answer.headers["x-request-id"])
    assert len(told.path.read_text().splitlines()) == lines + 1
