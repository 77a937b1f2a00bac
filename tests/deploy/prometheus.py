"""A real Prometheus that scrapes what a test runs, each second."""

import math
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.deploy.chart import CHART
from tests.deploy.tools import tool
from tests.serving import free_port

RULES = CHART / "files" / "rules.yaml"
WITHIN = 180.0


class Prometheus:
    """One that runs at `url`."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of its answer."""
        answer = httpx.get(self._url + path, params=parameters, timeout=30)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def value(self, query: str) -> float:
        """The value of a query with one result, NaN without any."""
        result = self.ask("/api/v1/query", query=query)["result"]
        return float(result[0]["value"][1]) if result else math.nan

    def firing(self) -> set[str]:
        """The alerts that fire now."""
        alerts = self.ask("/api/v1/alerts")["alerts"]
        return {one["labels"]["alertname"] for one in alerts if one["state"] == "firing"}

    def fired(self) -> set[str]:
        """All that have fired within the hour, however short."""
        query = 'max by (alertname) (max_over_time(ALERTS{alertstate="firing"}[1h]))'
        found = self.ask("/api/v1/query", query=query)["result"]
        return {one["metric"]["alertname"] for one in found}

    def answers(self) -> bool:
        """It is ready."""
        try:
            return httpx.get(self._url + "/-/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False


def lasting(seconds: int) -> str:
    """The rules with seconds in place of the minutes for which a state must last."""
    return re.sub(r"for: \d+[smh]", f"for: {seconds}s", RULES.read_text())


@contextmanager
def scraping(directory: Path, rules: str, *targets: str) -> Iterator[Prometheus]:
    """One with these rules, for the block; targets are `http://HOST:PORT` or `https://`."""
    program = tool("prometheus")
    (directory / "rules.yaml").write_text(rules)
    addresses = [target.partition("://")[::2] for target in targets]
    jobs = [
        {
            "job_name": scheme,
            "scheme": scheme,
            "tls_config": {"insecure_skip_verify": True},
            "static_configs": [
                {
                    "targets": [address for of, address in addresses if of == scheme],
                    # Frontends of a fleet are of one job, whatever their scheme.
                    "labels": {"namespace": "n", "job": "inlay"},
                }
            ],
        }
        for scheme in {scheme for scheme, _ in addresses}
    ]
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": jobs,
    }
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(settings))
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
        found = Prometheus(f"http://127.0.0.1:{port}")
        until(found.answers)
        yield found
    finally:
        process.terminate()
        process.wait(30)


def until(done: Callable[[], bool]) -> None:
    """Return once it is so.

    Raises:
        AssertionError: it takes three minutes.
    """
    deadline = time.monotonic() + WITHIN
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.5)
