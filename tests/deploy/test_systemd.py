"""The units: systemd's own analyser knows every key and scores them, and inlay takes the words."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from inlay.cli.commands import commands
from inlay.cli.reading import parse
from tests.commands import run
from tests.deploy.tools import ROOT, tool

UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
LIMIT = 3.0


@pytest.fixture(params=UNITS, ids=lambda path: path.stem)
def unit(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy whose program is there, as an instance where it is a template."""
    path: Path = request.param
    copy = tmp_path / path.name.replace("@", "@a")
    copy.write_text(path.read_text().replace("/opt/inlay/bin/inlay", "/bin/true"))
    return copy


@pytest.mark.deploy
def test_systemd_knows_every_key(unit: Path) -> None:
    done = subprocess.run(
        [tool("systemd-analyze"), "verify", str(unit)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    # Its status is 0 for a key that it does not know; it only says so.
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.deploy
def test_a_unit_is_hardly_exposed(unit: Path) -> None:
    said = run(tool("systemd-analyze"), "security", "--offline=true", "--no-pager", unit)
    score = re.search(r"exposure level for \S+: ([0-9.]+)", said)
    assert score is not None
    assert float(score[1]) < LIMIT


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_inlay_takes_the_words_and_has_time_to_drain(path: Path) -> None:
    lines = dict(line.partition("=")[::2] for line in path.read_text().splitlines() if "=" in line)
    words = shlex.split(lines["ExecStart"])
    command = next(command for command in commands() if command.name == words[1])
    assert parse(command, words[2:]).unknown == []
    drains = {"nats": 10, "frontend": 120, "worker": 30}
    assert int(lines["TimeoutStopSec"]) >= drains[command.name] + 10
