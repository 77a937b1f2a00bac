"""The chart's NATS servers, run from what it renders: the first container, then the server.

Of the text only addresses and directories are changed: each server has an address of the loopback
in place of its name, and a directory in place of `/data` and `/tmp`.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.commands import run
from tests.deploy.chart import Object, Pod, named, pods, render
from tests.deploy.tools import helms
from tests.serving import free_port
from tests.transport.nats_server import binary

_WITHIN = 60.0


def rendered(values: Mapping[str, Any], directory: Path) -> tuple[Object, ...]:
    """The objects of a release; skips where there is no Helm."""
    found = helms()
    if not found:
        pytest.skip("no Helm is there: make test-deploy fetches it")
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    return render(next(iter(found.values())), file)


class NatsPods:
    """The servers of a release's StatefulSet.

    Args:
        objects: of the release.
        directory: of the servers' data; a later release of the same name finds it again.
        password: of the Secret.
    """

    def __init__(self, objects: tuple[Object, ...], directory: Path, password: str) -> None:
        self._directory = directory
        self._password = password
        self._text: dict[str, str] = dict(named(objects, "ConfigMap")["inlay-nats"]["data"])
        (self._pod,) = [pod for pod in pods(objects) if pod.owner == "StatefulSet inlay-nats"]
        self.replicas: int = named(objects, "StatefulSet")["inlay-nats"]["spec"]["replicas"]
        # Of this test alone: its ports are the chart's own.
        self._network = f"127.{random.randrange(1, 255)}.{random.randrange(1, 255)}"
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def members_pod(self) -> Pod:
        """The servers' pod."""
        return self._pod

    def url(self, number: int = 0) -> str:
        """Where a server is."""
        return f"nats://{self._address(number)}:4222"

    def _address(self, number: int) -> str:
        return f"{self._network}.{number + 1}"

    def _here(self, text: str, number: int) -> str:
        own = self._directory / f"pod-{number}"
        for other in range(self.replicas):
            text = text.replace(f"inlay-nats-{other}.inlay-nats-peers", self._address(other))
        text = text.replace("0.0.0.0", self._address(number))
        return re.sub(r'"(/data|/tmp)\b', lambda found: f'"{own}{found[1]}', text)

    def start(self, number: int) -> None:
        """Run what the pod runs."""
        own = self._directory / f"pod-{number}"
        for name in ("etc/nats", "etc/nats-access", "etc/nats-password", "tmp"):
            (own / name).mkdir(parents=True, exist_ok=True)
        for name, text in self._text.items():
            (own / "etc" / "nats" / name).write_text(self._here(text, number))
        (own / "etc" / "nats-password" / "password").write_text(self._password + "\n")
        (first,) = self._pod.spec["initContainers"]
        words = [self._here(word, number).replace("/etc/", f"{own}/etc/", 1)
                 for word in first["command"][1:]]  # fmt: skip
        assert first["command"][0] == "python3"
        run(sys.executable, *words)
        name, *arguments = self._pod.container["command"]
        assert name == "nats-server"
        words = [word.replace("/etc/", f"{own}/etc/") for word in arguments]
        environment = {**os.environ, "POD_NAME": f"inlay-nats-{number}"}
        with (own / "log").open("ab") as log:
            self._running[number] = subprocess.Popen(
                [binary(), *words], env=environment, stdout=log, stderr=log
            )

    @contextmanager
    def metrics(self, number: int) -> Iterator[str]:
        """The address of what a server's sidecar shows, for the block."""
        (sidecar,) = self._pod.spec["containers"][1:]
        name, script, monitor, port, servers = sidecar["command"]
        assert (name, monitor) == ("python3", "http://127.0.0.1:8222")
        own = self._directory / f"pod-{number}"
        words = [str(own) + script, f"http://{self._address(number)}:8222", free_port(), servers]
        assert port == str(sidecar["ports"][0]["containerPort"])
        process = subprocess.Popen([sys.executable, *map(str, words)])
        try:
            yield f"http://127.0.0.1:{words[2]}/metrics"
        finally:
            process.kill()
            process.wait(60)

    def log(self, number: int) -> str:
        """What a server wrote."""
        return (self._directory / f"pod-{number}" / "log").read_text(errors="replace")

    def wait(self, number: int) -> None:
        """Return once the readiness probe of the pod is answered.

        Raises:
            AssertionError: the server ended, or it takes a minute.
        """
        probe = self._pod.container["readinessProbe"]["httpGet"]
        url = f"http://{self._address(number)}:8222{probe['path']}"
        deadline = time.monotonic() + _WITHIN
        while not _answers(url):
            assert self._running[number].poll() is None, self.log(number)
            assert time.monotonic() < deadline, self.log(number)
            time.sleep(0.1)

    def kill(self, number: int) -> None:
        """End a server without a word."""
        self._end(number, signal.SIGKILL)

    def stop(self) -> None:
        """End all of them."""
        for number in list(self._running):
            self._end(number, signal.SIGTERM)

    def _end(self, number: int, how: signal.Signals) -> None:
        process = self._running.pop(number)
        process.send_signal(how)
        process.wait(60)


@contextmanager
def running(objects: tuple[Object, ...], directory: Path, password: str) -> Iterator[NatsPods]:
    """All servers of a release, ready, for the block."""
    found = NatsPods(objects, directory, password)
    try:
        for number in range(found.replicas):
            found.start(number)
        for number in range(found.replicas):
            found.wait(number)
        yield found
    finally:
        found.stop()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False
