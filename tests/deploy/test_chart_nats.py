"""The NATS server that the chart sets up, run from its own configuration."""

import os
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests.deploy.chart import VALUES, named, render
from tests.deploy.tools import helms
from tests.parts import running
from tests.serving import free_port
from tests.transport.nats_server import binary

pytestmark = pytest.mark.deploy

WORD = "word"


def configuration(values: Path) -> str:
    """The text that the chart mounts; skips where there is no Helm or no server."""
    found = helms()
    if not found:
        pytest.skip("no Helm is there: make test-deploy fetches it")
    maps = named(render(next(iter(found.values())), values), "ConfigMap")
    if "inlay-nats" not in maps:
        pytest.skip("these values have no server of their own")
    return str(maps["inlay-nats"]["data"]["nats.conf"])


ENVIRONMENT = {
    **os.environ,
    "POD_NAME": "inlay-nats-0",
    "NATS_PASSWORD": WORD,
    "ROUTE_PASSWORD": WORD,
}


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_the_server_takes_the_configuration(values: Path, tmp_path: Path) -> None:
    file = tmp_path / "nats.conf"
    file.write_text(configuration(values).replace("/data", str(tmp_path)))
    done = subprocess.run(
        [binary(), "-t", "-c", str(file)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_members_log_in_as_the_chart_tells_them_and_nobody_else(tmp_path: Path) -> None:
    port, monitor = free_port(), free_port()
    plain = next(path for path in VALUES if path.stem == "plain")
    text = (
        configuration(plain)
        .replace("/data", str(tmp_path))
        .replace("0.0.0.0:4222", f"127.0.0.1:{port}")
    )
    file = tmp_path / "nats.conf"
    file.write_text(
        text.replace("0.0.0.0:8222", f"127.0.0.1:{monitor}").replace("/tmp/", f"{tmp_path}/")
    )
    server = subprocess.Popen(
        [binary(), "-c", str(file)], env=ENVIRONMENT, stderr=subprocess.DEVNULL
    )
    try:
        probe = f"http://127.0.0.1:{monitor}/healthz?js-server-only=true"
        deadline = time.monotonic() + 60
        while not _well(probe):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        words = ("frontend", "--port", 0, "--nats")
        with running(*words, f"nats://inlay:{WORD}@127.0.0.1:{port}", until="HTTP at"):
            pass
        with (
            pytest.raises(RuntimeError, match="not ready"),
            running(*words, f"nats://inlay:other@127.0.0.1:{port}", until="HTTP at"),
        ):
            pass
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def _well(probe: str) -> bool:
    try:
        return httpx.get(probe, timeout=5).status_code == 200
    except httpx.TransportError:
        return False
