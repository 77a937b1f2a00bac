"""A worker in another Python: what that must have, and what it is lent."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from inlay.base.errors import InvalidRequestError
from inlay.engine.settings import EngineSettings
from inlay.extension import BUNDLED
from inlay.messages.digest import Secret
from inlay.transport.local import LocalPlane
from inlay.worker import spawn
from inlay.worker.interpreter import NEEDED, interpreter
from tests.live import fleet
from tests.models import tiny

pytestmark = pytest.mark.usefixtures("started_processes")

ROOT = Path(__file__).resolve().parent.parent.parent


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def test_least_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name, least in NEEDED.items():
        assert any(line.startswith(f"{name}>={least}") for line in project["dependencies"]), name


@pytest.mark.extensions
def test_a_worker_imports_nothing_else_before_its_engine() -> None:
    """In an interpreter that has no other third-party modules."""
    allowed = {*LENT, *(name.replace("-", "_") for name in NEEDED)}
    program = f"""
import sys

def asked_by():
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__", "").startswith(("importlib", "_frozen")):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "")

class Absent:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if asked_by().startswith("inlay") and top not in {allowed!r} and top not in sys.stdlib_module_names:
            raise ModuleNotFoundError(f"{{name}} is not among what a worker may need", name=name)

sys.meta_path.insert(0, Absent())
import inlay.engine
from inlay.engine.spec import engines
assert "diffusers" in engines()
import inlay.worker.__main__
import inlay.worker.child
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=180)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """The Python of an environment of its own, with the libraries of this one."""
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    configuration = Path(sys.prefix, "pyvenv.cfg").read_text(encoding="utf-8")
    (tmp_path / "environment" / "pyvenv.cfg").write_text(configuration, encoding="utf-8")
    (tmp_path / "environment" / "lib").symlink_to(Path(sys.prefix) / "lib")
    return python


def first_path(pid: int) -> Path:
    """The first directory a process was told to import from."""
    variables = Path(f"/proc/{pid}/environ").read_text(encoding="utf-8").split("\0")
    value = next(entry for entry in variables if entry.startswith("PYTHONPATH="))
    return Path(value.removeprefix("PYTHONPATH=").split(":")[0])


LENT = ["inlay", *sorted(f"inlay_{name}" for name in BUNDLED)]


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


@pytest.mark.extensions
async def test_a_worker_in_another_environment_is_lent_inlay_and_its_extensions_alone(
    elsewhere: Path,
) -> None:
    settings = EngineSettings.of(model=str(tiny("llama")), engine="echo", engine_python=elsewhere)
    worker = await spawn(settings, Secret.random())
    plane = LocalPlane([worker.channel])
    await plane.start()
    await plane.wait_ready()
    lent = first_path(worker.pid)
    assert names_in(lent) == LENT
    await plane.close()
    await worker.close()
    assert names_in(lent) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo '[[3, 9, 1], {}]'", "is Python 3.9.1; inlay needs 3.11 or later"),
        (
            'echo \'[[3, 12, 0], {"msgspec": "0.19.5"}]\'',
            'pip install "blake3>=1.0" .*"msgspec>=0.20"',
        ),
        (
            "echo nonsense; echo 'no such module' >&2",
            "is no Python that runs: it said 'no such module'",
        ),
        ("exit 3", "is no Python that runs: it said 'nothing'"),
    ],
)
async def test_a_python_that_cannot_run_a_worker_is_refused_with_what_to_do(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        await interpreter(script(tmp_path / "python", text))


async def test_a_path_that_is_no_program_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be run: No such file"):
        await interpreter(tmp_path / "missing")


@pytest.mark.parametrize("python", [None, Path(sys.executable)])
def test_nothing_in_the_working_directory_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: Path | None
) -> None:
    mark = tmp_path / "ran"
    for name in ("msgspec", "json", "torch", "random"):
        (tmp_path / f"{name}.py").write_text(f"open({str(mark)!r}, 'w')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with fleet(tiny("llama"), engine="echo", engine_python=python) as running:
        assert running.running() == 0
    assert not mark.exists()
