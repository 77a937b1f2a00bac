"""A real server for tests: `inlay` as its own process, on a free port, ended with the test."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 180.0

_PORTS = 12000, 29999
"""Below those that connections get, of which a test makes many before its server listens."""

PYTHON = os.environ.get("FRONTEND_PYTHON", sys.executable)
"""Arguments of servers.

Another Python than the tests' where those run in an engine's environment.
"""


@dataclass(frozen=True)
class Served:
    """A server that answers."""

    url: str
    process: subprocess.Popen[bytes]

    @property
    def v1(self) -> str:
        """The `base_url` of the `openai` client."""
        return self.url + "/v1"


@contextmanager
def peak_growth(*processes: int) -> Iterator[list[int]]:
    """Yield a list that has at the end the most memory, in bytes, that these took beyond before.

    Each process counts by its own peak, whenever it was.
    """
    before = []
    for process in processes:
        Path(f"/proc/{process}/clear_refs").write_text("5", encoding="utf-8")  # forgets its peak
        before.append(_memory(process, "VmRSS"))
    found: list[int] = []
    yield found
    found.append(sum(_memory(process, "VmHWM") for process in processes) - sum(before))


def _memory(process: int, name: str) -> int:
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    (kilobytes,) = [line.split()[1] for line in lines if line.startswith(name)]
    return int(kilobytes) * 1024


def free_port() -> int:
    """A port nobody listens on now, and that the system gives to nobody who did not ask for it."""
    while True:
        port = random.SystemRandom().randint(*_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


@contextmanager
def serving(
    *arguments: object,
    command: str = "serve",
    environment: dict[str, str] | None = None,
    within: float = START_SECONDS,
) -> Iterator[Served]:
    """Run `inlay COMMAND ARGUMENTS --port P` until the block ends; yields once it is ready.

    Raises:
        RuntimeError: the process ended, or was not ready in time.
    """
    with starting(*arguments, command=command, environment=environment) as served:
        _wait_ready(served.process, served.url, within)
        yield served


@contextmanager
def starting(
    *arguments: object, command: str = "serve", environment: dict[str, str] | None = None
) -> Iterator[Served]:
    """As `serving`, but yields at once."""
    port = free_port()
    process = subprocess.Popen(
        [PYTHON, "-m", "inlay.cli", command, *map(str, arguments), "--port", str(port)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        stdin=subprocess.DEVNULL,
    )
    try:
        yield Served(f"http://127.0.0.1:{port}", process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def until_stopping(served: Served) -> None:
    """Return when the server has been told to stop and takes no more requests."""
    while True:
        try:
            urllib.request.urlopen(served.url + "/ready").close()
        except OSError:
            return
        time.sleep(0.02)


def _wait_ready(process: subprocess.Popen[bytes], url: str, within: float) -> None:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(
                f"the server ended with status {process.returncode} before it was ready"
            )
        try:
            with urllib.request.urlopen(url + "/ready", timeout=2):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    raise RuntimeError(f"the server was not ready within {within:g} s")
