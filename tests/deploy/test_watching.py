"""Rules and dashboard, asked of a real Prometheus that scrapes a real fleet."""

import base64
import io
import math
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml
from scripts.dashboard import queries

from inlay.api.app import routes
from tests.deploy.chart import CHART
from tests.deploy.tools import ROOT, run, tool
from tests.equality.reference import rows_of
from tests.models import tiny
from tests.parts import Part, running, workers_of
from tests.serving import free_port
from tests.transport.nats_server import NatsServer

pytestmark = pytest.mark.deploy

RULES = CHART / "files" / "rules.yaml"
WITHIN = 180.0


@dataclass(frozen=True)
class Watched:
    """A fleet that Prometheus scrapes."""

    frontend: str
    prometheus: str
    workers: tuple[Part, ...]

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of Prometheus' answer."""
        answer = httpx.get(self.prometheus + path, params=parameters, timeout=30)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

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
    prometheus, directory = tool("prometheus"), tmp_path_factory.mktemp("watched")
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
        url = stack.enter_context(_prometheus(prometheus, directory, port))
        yield Watched(f"http://127.0.0.1:{port}", url, tuple(workers))


@contextmanager
def _prometheus(program: str, directory: Path, frontend: int) -> Iterator[str]:
    # The same rules, without the minutes for which a state must last.
    quick = re.sub(r"for: \d+m", "for: 1s", RULES.read_text())
    (directory / "rules.yaml").write_text(quick)
    (directory / "prometheus.yaml").write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": ["rules.yaml"],
                "scrape_configs": [
                    {
                        "job_name": "inlay",
                        "static_configs": [
                            {"targets": [f"127.0.0.1:{frontend}"], "labels": {"namespace": "n"}}
                        ],
                    }
                ],
            }
        )
    )
    port = free_port()
    process = subprocess.Popen(
        [
            program,
            f"--config.file={directory / 'prometheus.yaml'}",
            f"--storage.tsdb.path={directory / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        _until(lambda: _answers(url))
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url + "/-/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def _until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.5)


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
        is_request = re.fullmatch(pattern, operation.path) is None
        assert is_request == (not operation.open), operation.path


def test_every_alert_has_its_section_in_the_runbooks() -> None:
    text = (ROOT / "docs" / "deploy" / "runbooks.md").read_text()
    for alert in alerts():
        name = alert["alert"]
        assert alert["annotations"]["runbook"] == f"docs/deploy/runbooks.md#{name.lower()}"
        assert f"\n## {name}\n" in text


def test_every_query_of_the_dashboard_has_an_answer(watched: Watched) -> None:
    left = list(queries())

    def all_answered() -> bool:
        watched.send()
        left[:] = [one for one in left if not watched.ask("/api/v1/query", query=one)["result"]]
        return not left

    try:
        _until(all_answered)
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
        missing = names - set(watched.ask("/api/v1/label/__name__/values"))
        return missing == elsewhere

    try:
        _until(all_there)
    finally:
        assert missing == elsewhere


ECHO = ("--engine", "echo", "--served-model-name", "m")


@dataclass
class Drill:
    """A fleet of echo engines that Prometheus scrapes, to break."""

    nats: NatsServer
    prometheus: str
    port: int
    workers: list[Part]
    frontend: Part

    def firing(self) -> set[str]:
        """The alerts that fire now."""
        answer = httpx.get(self.prometheus + "/api/v1/alerts", timeout=30).json()
        return {
            one["labels"]["alertname"]
            for one in answer["data"]["alerts"]
            if one["state"] == "firing"
        }

    def value(self, query: str) -> float:
        """The value of a query with one result, NaN without any."""
        answer = httpx.get(
            self.prometheus + "/api/v1/query", params={"query": query}, timeout=30
        ).json()["data"]["result"]
        return float(answer[0]["value"][1]) if answer else math.nan

    def until_workers(self, count: int) -> None:
        """Return once Prometheus has seen the frontend's count of ready workers."""
        _until(lambda: self.value("inlay:workers_ready") == count)

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
    prometheus = tool("prometheus")
    with ExitStack() as stack:
        nats = stack.enter_context(NatsServer(tmp_path))
        port = free_port()
        found = Drill(nats, "", port, [], Part("frontend", "--nats", nats.url, "--port", port,
            until="HTTP at"))  # fmt: skip

        def end() -> None:
            for part in (*found.workers, found.frontend):
                part.end()

        stack.callback(end)
        for _ in range(2):
            found.add_worker()
        found.frontend.wait_ready()
        found.prometheus = stack.enter_context(_prometheus(prometheus, tmp_path, port))
        found.until_workers(2)
        _until(lambda: found.firing() == set())
        yield found


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_one_of_two_workers_that_is_lost_fires_its_alert(drill: Drill, how: signal.Signals) -> None:
    drill.workers[0].send(how)
    _until(lambda: "InlayWorkersLost" in drill.firing())
    assert "InlayNoWorkerWell" not in drill.firing()


def test_an_engine_that_is_started_again_fires_its_alert(drill: Drill) -> None:
    (engine,) = workers_of(drill.workers[0].process.pid)
    engine.kill()
    _until(lambda: "InlayWorkersLost" in drill.firing())


def test_a_model_without_a_worker_fires_also_after_the_frontend_was_started_again(
    drill: Drill,
) -> None:
    for worker in drill.workers:
        worker.send(signal.SIGKILL)
    _until(lambda: "InlayNoWorkerWell" in drill.firing())
    drill.frontend.end()
    _until(lambda: "InlayFrontendsGone" in drill.firing())
    drill.start_frontend()
    _until(lambda: "InlayFrontendsGone" not in drill.firing())
    drill.until_workers(0)
    assert "InlayNoWorkerWell" in drill.firing()


def test_what_loses_nothing_fires_nothing(drill: Drill) -> None:
    """A worker more, one that drains, and a frontend's and NATS' restart."""
    drill.add_worker()
    drill.until_workers(3)
    drill.workers[0].end()
    drill.until_workers(2)
    drill.nats.kill()
    drill.nats.start()
    _until(lambda: drill.value("inlay:discovery_reachable") == 1)
    drill.until_workers(2)
    # The last state was seen by several scrapes: nothing may begin to fire after them.
    began = drill.value("timestamp(inlay:workers_ready)")
    _until(lambda: drill.value("timestamp(inlay:workers_ready)") > began + 5)
    # A worker that loads is missing meanwhile, here for longer than the second in place of minutes.
    assert drill.firing() <= {"InlayWorkersMissing"}


def test_nats_that_is_lost_fires_its_alert(drill: Drill) -> None:
    drill.nats.kill()
    _until(lambda: "InlayNatsLost" in drill.firing())


def rules() -> list[dict[str, Any]]:
    """All rules of the file."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    """Those that alert."""
    return [rule for rule in rules() if "alert" in rule]
