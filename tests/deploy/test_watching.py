"""Rules and dashboard, asked of a real Prometheus that scrapes a real fleet."""

import base64
import io
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml
from scripts.dashboard import queries

from inlay.api.app import routes
from tests.commands import run
from tests.deploy.prometheus import RULES, Prometheus, lasting, scraping, until
from tests.deploy.tools import ROOT, tool
from tests.equality.reference import rows_of
from tests.models import tiny
from tests.parts import Part, running, workers_of
from tests.serving import free_port
from tests.telemetry import vllm_dashboards
from tests.transport.nats_server import NatsServer

pytestmark = pytest.mark.deploy


@dataclass(frozen=True)
class Watched:
    """A fleet that Prometheus scrapes."""

    frontend: str
    prometheus: Prometheus

    def send(self) -> None:
        """Requests of every kind that the dashboard shows."""
        rows = rows_of(tiny("llama"), [5, 6, 7, 8] * 8)
        file = io.BytesIO()
        torch.save(rows.contiguous(), file)
        text = base64.b64encode(file.getvalue()).decode()
        base = {"model": "m", "max_tokens": 4}
        with httpx.Client(base_url=self.frontend, timeout=120) as client:
            raw = {"content-type": "application/octet-stream"}
            stored = client.post("/v1/prompt_embeds", content=file.getvalue(), headers=raw).json()
            for prompt, status in (
                ({"prompt": "the harbour town counts its lanterns every night " * 2}, 200),
                ({"prompt_embeds": text}, 200),
                ({"prompt_embeds": {"ref": stored["id"]}}, 200),
                ({"prompt_embeds": {"ref": "pe-" + "0" * 32}}, 404),
                ({"prompt_embeds": "AAAA"}, 400),
            ):
                assert client.post("/v1/completions", json={**base, **prompt}).status_code == status


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    tool("prometheus")  # or nothing is started
    directory = tmp_path_factory.mktemp("watched")
    nats = NatsServer(directory)
    nats.start()
    with ExitStack() as stack:
        stack.callback(nats.kill)
        port = free_port()
        words = ("--served-model-name", "m", "--enable-prompt-embeds", "--nats", nats.url)
        workers = [Part("worker", tiny("llama"), *words, until=" serves ") for _ in range(2)]
        for worker in workers:
            stack.callback(worker.end)
        stack.enter_context(
            running("frontend", "--nats", nats.url, "--port", port, until="HTTP at")
        )
        for worker in workers:
            worker.wait_ready()
        url = f"http://127.0.0.1:{port}"
        yield Watched(url, stack.enter_context(scraping(directory, lasting(1), url)))


def test_every_alert_fires_when_it_should_and_not_before() -> None:
    run(tool("promtool"), "check", "rules", RULES)
    run(tool("promtool"), "test", "rules", ROOT / "tests" / "deploy" / "rules_test.yaml")
    tested = (ROOT / "tests" / "deploy" / "rules_test.yaml").read_text()
    for alert in alerts():
        assert f"alertname: {alert['alert']}\n        exp_alerts" in tested, alert["alert"]


def test_rules_take_all_that_clients_ask_for_and_no_probe_for_a_request() -> None:
    patterns = {
        pattern
        for rule in rules()
        for pattern in re.findall(r'inlay:http_requests_total\{[^}]*route!~"([^"]+)"', rule["expr"])
    }
    (pattern,) = patterns
    for operation, _ in routes():
        if (operation.method, operation.path) == ("POST", "/"):
            continue  # is counted as /embed or /predict
        is_request = re.fullmatch(pattern, operation.path) is None
        assert is_request == (not operation.open), operation.path


def test_every_alert_has_its_section_in_the_runbooks() -> None:
    text = (ROOT / "docs" / "deploy" / "runbooks.md").read_text()
    for alert in alerts():
        name = alert["alert"]
        assert alert["annotations"]["runbook"] == f"docs/deploy/runbooks.md#{name.lower()}"
        assert f"\n## {name}\n" in text


@pytest.mark.parametrize("asked", [queries, vllm_dashboards.queries], ids=["own", "vllm's"])
def test_every_query_of_a_dashboard_has_an_answer(
    watched: Watched, asked: Callable[[], Iterator[str]]
) -> None:
    left = list(asked())

    def all_answered() -> bool:
        watched.send()
        left[:] = [
            one for one in left if not watched.prometheus.ask("/api/v1/query", query=one)["result"]
        ]
        return not left

    try:
        until(all_answered)
    finally:
        assert left == []


def test_every_series_of_rules_is_there(watched: Watched) -> None:
    names = {
        name
        for rule in rules()
        for name in re.findall(r"\b(?:inlay|vllm):\w+", rule["expr"].replace("model:inlay", ""))
    }
    # There is no certificate and no file of keys here; tests/http has both, and test_chart_nats.py
    # what NATS says of itself.
    elsewhere = {"inlay:certificate_expiry_seconds", "inlay:reload_failing"}
    elsewhere |= {name for name in names if name.startswith("inlay:nats_")}
    missing = names

    def all_there() -> bool:
        nonlocal missing
        watched.send()
        missing = names - set(watched.prometheus.ask("/api/v1/label/__name__/values"))
        return missing == elsewhere

    try:
        until(all_there)
    finally:
        assert missing == elsewhere


ECHO = ("--engine", "echo", "--served-model-name", "m")


@dataclass
class Drill:
    """A fleet of echo engines that Prometheus scrapes, to break."""

    nats: NatsServer
    prometheus: Prometheus
    port: int
    workers: list[Part]
    frontend: Part

    def until_workers(self, count: int) -> None:
        """Return once Prometheus has seen the frontend's count of ready workers."""
        until(lambda: self.prometheus.value("inlay:workers_ready") == count)

    def add_worker(self) -> Part:
        """One more worker, ready."""
        part = Part("worker", tiny("llama"), *ECHO, "--nats", self.nats.url, until=" serves ")
        self.workers.append(part)
        return part.wait_ready()

    def start_frontend(self) -> None:
        """The frontend, again on its port."""
        words = ("--nats", self.nats.url, "--port", self.port)
        self.frontend = Part("frontend", *words, until="HTTP at").wait_ready()


@pytest.fixture
def drill(tmp_path: Path) -> Iterator[Drill]:
    with ExitStack() as stack:
        port = free_port()
        prometheus = stack.enter_context(scraping(tmp_path, lasting(1), f"http://127.0.0.1:{port}"))
        nats = stack.enter_context(NatsServer(tmp_path))
        frontend = Part("frontend", "--nats", nats.url, "--port", port, until="HTTP at")
        found = Drill(nats, prometheus, port, [], frontend)

        def end() -> None:
            for part in (*found.workers, found.frontend):
                part.end()

        stack.callback(end)
        for _ in range(2):
            found.add_worker()
        found.frontend.wait_ready()
        found.until_workers(2)
        until(lambda: found.prometheus.firing() == set())
        yield found


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_one_of_two_workers_that_is_lost_fires_its_alert(drill: Drill, how: signal.Signals) -> None:
    drill.workers[0].send(how)
    until(lambda: "InlayWorkersLost" in drill.prometheus.firing())
    assert "InlayNoWorkerWell" not in drill.prometheus.firing()


def test_an_engine_that_is_started_again_fires_its_alert(drill: Drill) -> None:
    (engine,) = workers_of(drill.workers[0].process.pid)
    engine.kill()
    until(lambda: "InlayWorkersLost" in drill.prometheus.firing())


def test_a_model_without_a_worker_fires_also_after_the_frontend_was_started_again(
    drill: Drill,
) -> None:
    for worker in drill.workers:
        worker.send(signal.SIGKILL)
    until(lambda: "InlayNoWorkerWell" in drill.prometheus.firing())
    drill.frontend.end()
    until(lambda: "InlayFrontendsGone" in drill.prometheus.firing())
    drill.start_frontend()
    until(lambda: "InlayFrontendsGone" not in drill.prometheus.firing())
    drill.until_workers(0)
    assert "InlayNoWorkerWell" in drill.prometheus.firing()


def test_what_loses_nothing_fires_nothing(drill: Drill) -> None:
    """A worker more, one that drains, and a frontend's and NATS' restart."""
    drill.add_worker()
    drill.until_workers(3)
    drill.workers[0].end()
    drill.until_workers(2)
    drill.nats.kill()
    drill.nats.start()
    until(lambda: drill.prometheus.value("inlay:discovery_reachable") == 1)
    drill.until_workers(2)
    # The last state was seen by several scrapes: nothing may begin to fire after them.
    began = drill.prometheus.value("timestamp(inlay:workers_ready)")
    until(lambda: drill.prometheus.value("timestamp(inlay:workers_ready)") > began + 5)
    # A worker that loads is missing meanwhile, here for longer than the second in place of minutes.
    assert drill.prometheus.firing() <= {"InlayWorkersMissing"}


def test_nats_that_is_lost_fires_its_alert(drill: Drill) -> None:
    drill.nats.kill()
    until(lambda: "InlayNatsLost" in drill.prometheus.firing())


def rules() -> list[dict[str, Any]]:
    """All rules of the file."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    """Those that alert."""
    return [rule for rule in rules() if "alert" in rule]
