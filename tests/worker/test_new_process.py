"""A worker's process may be there before it is told what to serve; nobody is left with it."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from inlay.engine.settings import EngineSettings
from inlay.messages.digest import Secret
from inlay.telemetry import TelemetrySettings
from inlay.transport.local import LocalPlane
from inlay.worker import spawn
from inlay.worker.child import import_ahead
from inlay.worker.new_process import begun_ahead
from tests.parts import workers_of

pytestmark = pytest.mark.usefixtures("started_processes")

SECRET = Secret(bytes(32))
TELEMETRY = TelemetrySettings()
ECHO = EngineSettings.of(model="", engine="echo")


_others: set[psutil.Process] = set()


@pytest.fixture(autouse=True)
def _begun_before() -> None:
    """Know what other tests have left: helpers that fork the processes they start."""
    _others.clear()
    _others.update(workers_of(os.getpid()))


def workers() -> list[psutil.Process]:
    # Not by their words, which a process that is just begun does not have yet.
    return [each for each in workers_of(os.getpid()) if each not in _others]


async def test_a_process_that_was_begun_is_the_one_that_serves(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"vocab_size": 9, "hidden_size": 8, "max_position_embeddings": 64}'
    )
    settings = EngineSettings.of(model=str(tmp_path), engine="echo")
    with begun_ahead(settings, TELEMETRY):
        (begun,) = workers()
        process = await spawn(settings, SECRET)
        assert process.pid == begun.pid
        later = await spawn(settings, SECRET)
        assert later.pid != begun.pid
    plane = LocalPlane([process.channel, later.channel])
    await plane.start()
    while len(plane.workers()) < 2:
        await plane.changed()
    await plane.close()
    await process.close()
    await later.close()
    assert not workers()


async def test_where_another_is_asked_for_the_one_that_was_begun_ends() -> None:
    with begun_ahead(ECHO, TELEMETRY):
        (begun,) = workers()
        process = await spawn(ECHO, SECRET, environment={"CUDA_VISIBLE_DEVICES": "1"})
        assert [each.pid for each in workers()] == [process.pid] != [begun.pid]
        await process.close()


def test_what_nobody_took_is_gone_after_the_block() -> None:
    with suppress(ZeroDivisionError), begun_ahead(ECHO, TELEMETRY):
        assert len(workers()) == 1
        raise ZeroDivisionError
    assert not workers()


def test_settings_that_are_refused_later_begin_nothing() -> None:
    for settings in (
        EngineSettings.of(model="", engine="vllm", kv_transfer_config="no JSON"),
        EngineSettings.of(model="", engine="vllm", engine_python="/nowhere"),
    ):
        with begun_ahead(settings, TELEMETRY):
            assert not workers()


async def test_a_process_that_died_meanwhile_is_noticed() -> None:
    with begun_ahead(ECHO, TELEMETRY):
        (begun,) = workers()
        begun.kill()
        os.waitid(os.P_PID, begun.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222
        process = await spawn(ECHO, SECRET)
        assert process.pid == begun.pid
        await process.close()
    assert process.fate == "was killed by SIGKILL"


def test_it_ends_with_whoever_began_it_whatever_it_imports(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("import time\nwhile True: time.sleep(1)\n")
    script = """
import os, signal, sys
from inlay.engine.settings import EngineSettings
from inlay.worker import new_process
from inlay.worker.interpreter import Interpreter

own = Interpreter(sys.executable)
start = new_process._start(EngineSettings.of(model="", engine="echo"), own, "text")
new = new_process.NewProcess.begin(
    new_process._Start((*start.words, "endless"), start.environment)
)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        # Nor does it keep these open: this returns once it has ended.
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stderr == ""


def test_a_library_that_fails_is_imported_once_and_its_first_reason_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_library.py").write_text("raise OSError('libcudart.so.13: not found')\n")
    failed = import_ahead(["broken_library"])
    assert isinstance(failed, OSError)
    assert str(failed) == "libcudart.so.13: not found"
    (tmp_path / "lacking_library.py").write_text("import a_module_that_is_not_there\n")
    assert isinstance(import_ahead(["lacking_library"]), ModuleNotFoundError)
    # The engine itself says how to install what is not there at all.
    assert import_ahead(["a_module_that_is_not_there"]) is None
    assert import_ahead([]) is None
