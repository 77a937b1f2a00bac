"""A real NATS server for tests.

Its own process on a free port, which can be stopped, frozen and started again.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from pydantic import SecretStr

from inlay.transport.nats.settings import NatsSettings
from tests.serving import free_port

START_SECONDS = 60.0


def binary() -> str:
    """The server's program, beside this Python or on the path."""
    beside = Path(sys.executable).parent
    found = shutil.which(
        "nats-server", path=os.pathsep.join((str(beside), os.environ.get("PATH", "")))
    )
    assert found is not None, "nats-server is missing: install the test group"
    return found


class NatsServer:
    """One server with JetStream."""

    def __init__(
        self,
        directory: Path,
        *,
        max_payload: int = 1024 * 1024,
        jetstream: bool = True,
        extra: str = "",
    ) -> None:
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self._config = directory / "nats.conf"
        self._config.write_text(
            f'listen: "127.0.0.1:{self.port}"\nmax_payload: {max_payload}\n'
            + (f'jetstream {{ store_dir: "{directory}/store" }}\n' if jetstream else "")
            + f"{extra}\n"
        )
        self._log = directory / "nats.log"
        self._process: subprocess.Popen[bytes] | None = None

    def settings(self, namespace: str = "default", **fields: object) -> NatsSettings:
        """How to reach it."""
        return NatsSettings(nats=[SecretStr(self.url)], namespace=namespace, **fields)  # type: ignore[arg-type]

    def start(self) -> None:
        """Start it, and return when it takes connections."""
        self._process = subprocess.Popen(
            [binary(), "-c", str(self._config), "-l", str(self._log)], stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                assert self._process.poll() is None, self._log.read_text()
                time.sleep(0.02)
            else:
                return
        raise RuntimeError("the NATS server did not start in time")

    def __enter__(self) -> "NatsServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Keep its connections, carry nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def thaw(self) -> None:
        """Go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def empty(self) -> None:
        """Start it again with nothing of what it kept."""
        self.kill()
        shutil.rmtree(self._config.parent / "store", ignore_errors=True)
        self.start()
