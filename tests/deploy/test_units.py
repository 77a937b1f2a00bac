"""The units on one machine: started as their files say, backed up and restored as the page says.

systemd itself does not run here: each unit's ExecStart is run with its Environment, UMask and
directories below a folder of the test, and nothing else of the test's own environment. Only NATS'
port is not the unit's, as a drop-in would set it.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from tests.deploy.test_backup import complete, stored, upload
from tests.deploy.tools import ROOT
from tests.equality.reference import rows_of
from tests.live import until
from tests.models import tiny
from tests.serving import free_port

pytestmark = [pytest.mark.deploy, pytest.mark.slow, pytest.mark.timeout(600)]

PAGE = ROOT / "docs" / "deploy" / "README.md"


class Machine:
    """A machine with the units and what an operator writes into `/etc/inlay`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._nats = free_port()
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        etc = root / "etc" / "inlay"
        etc.mkdir(parents=True)
        access = {"nats": [f"nats://127.0.0.1:{self._nats}"], "nats-wait": 60,
                  "nats-nkey-seed": str(etc / "members.nk")}  # fmt: skip
        # Its answer follows from the rows and the namespace's secret, and nothing is compiled.
        model = {"model": str(tiny("llama")), "served-model-name": ["m"], "engine": "echo"}
        for name, more in (
            ("frontend", {"port": port}),
            ("worker-a", {**model, "enable-prompt-embeds": True, "transport-host": "127.0.0.1"}),
        ):
            (etc / f"{name}.yaml").write_text(yaml.safe_dump(access | more))

    def here(self, text: str) -> str:
        """The same with the places of this machine."""
        text = text.replace("/opt/inlay/bin/python3", sys.executable)
        text = text.replace("/opt/inlay/bin/inlay", f"{sys.executable} -m inlay.cli")
        return re.sub(r"(?<![\w.])/(etc/inlay|var/(?:lib|cache))\b", rf"{self._root}/\1", text)

    def start(self, name: str) -> None:
        """`systemctl start NAME`."""
        kind, at, instance = name.partition("@")
        lines = (ROOT / "deploy" / "systemd" / f"{kind}{at}.service").read_text().splitlines()
        told = [line.partition("=")[::2] for line in lines if "=" in line and line[0] != "#"]
        unit = {key: self.here(value.replace("%i", instance)) for key, value in told}
        for kind, place in (("State", "lib"), ("Cache", "cache")):
            if f"{kind}Directory" in unit:
                directory = self._root / "var" / place / unit[f"{kind}Directory"]
                directory.mkdir(parents=True, exist_ok=True)
                directory.chmod(int(unit[f"{kind}DirectoryMode"], 8))
        environment = {"PATH": os.environ["PATH"]}
        environment |= dict(word.split("=", 1) for word in shlex.split(unit["Environment"]))
        if name == "inlay-nats":
            environment["INLAY_PORT"] = str(self._nats)
        with (self._root / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                shlex.split(unit["ExecStart"]), env=environment, umask=int(unit["UMask"], 8),
                cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def stop(self, name: str) -> None:
        """`systemctl stop NAME`."""
        process = self._running.pop(name)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(150)
        finally:
            process.kill()

    def log(self) -> str:
        """What its units wrote."""
        return "".join(path.read_text() for path in sorted(self._root.glob("*.log")))

    def shell(self, command: str) -> "subprocess.CompletedProcess[str]":
        """What a line of the page does where the repository is."""
        return subprocess.run(
            ["sh", "-c", self.here(command)],
            cwd=ROOT, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True,
            check=False, timeout=300,
        )  # fmt: skip

    def start_fleet(self) -> None:
        """NATS, whose key is copied as the page says, then the rest."""
        self.start("inlay-nats")
        key = Path(self.here("/var/lib/inlay-nats/members.nk"))
        until(key.exists)
        done = self.shell("install -m 600 /var/lib/inlay-nats/members.nk /etc/inlay/members.nk")
        assert done.returncode == 0, done.stderr
        self.start_members()

    def start_members(self) -> None:
        """A frontend and a worker, until requests are served."""
        self.start("inlay-frontend")
        self.start("inlay-worker@a")
        until(self._serves)

    def _serves(self) -> bool:
        ended = [name for name, process in self._running.items() if process.poll() is not None]
        assert not ended, self.log()
        try:
            return httpx.get(f"{self.url}/ready", timeout=10).status_code == 200
        except httpx.TransportError:
            return False

    def stop_members(self) -> None:
        """The frontend and the worker, NATS stays."""
        for name in ("inlay-worker@a", "inlay-frontend"):
            self.stop(name)

    def end(self) -> None:
        """Stop what runs, members before NATS."""
        for name in reversed(list(self._running)):
            self.stop(name)


@contextmanager
def machine(root: Path) -> Iterator[Machine]:
    with ExitStack() as stack:
        found = Machine(root)
        stack.callback(found.end)
        yield found


def test_a_backup_of_units_is_restored_on_a_machine_with_a_new_nats(tmp_path: Path) -> None:
    (block,) = re.findall(r"(    export INLAY_CONFIG.*\n(?:    \S.*\n)+)", PAGE.read_text())
    block = block.replace("stored.prompts", str(tmp_path / "stored.prompts"))
    settings, *commands = block.splitlines()
    back_up, restore = (f"{settings}; {command}" for command in commands)
    rows = stored(rows_of(tiny("llama"), [5, 6, 7, 8]))
    with machine(tmp_path / "old") as old:
        old.start_fleet()
        with httpx.Client(base_url=old.url, timeout=120) as client:
            id_ = upload(client, rows)
            text = complete(client, {"ref": id_})
        done = old.shell(back_up)
        assert done.returncode == 0, done.stderr
    with machine(tmp_path / "new") as new:
        new.start_fleet()
        with httpx.Client(base_url=new.url, timeout=120) as client:
            assert client.get(f"/v1/prompt_embeds/{id_}").status_code == 404
        done = new.shell(restore)
        assert done.returncode == 0, done.stderr
        assert "start all frontends and workers again" in done.stderr
        new.stop_members()
        new.start_members()
        with httpx.Client(base_url=new.url, timeout=120) as client:
            assert complete(client, {"ref": id_}) == text
