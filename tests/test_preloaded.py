"""Processes that are forked are as those that are started."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil
import pytest

from tests import preloaded
from tests.live import until
from tests.models import tiny
from tests.parts import workers_of

INLAY = (sys.executable, "-m", "inlay.cli")
ECHO = (*INLAY, "serve", str(tiny("llama")), "--engine", "echo", "--port", "0")
ALONE = f"""
import subprocess, sys
from tests import preloaded

preloaded.install(["inlay.cli.serve"])
for _ in sys.stdin:
    none = subprocess.DEVNULL
    process = subprocess.Popen({ECHO!r}, stdin=none, stdout=none, stderr=none)
    sys.stdout.write(f"{{process.pid}}\\n")
    sys.stdout.flush()
"""
"""A process that starts a server for each line it reads."""


def run(*words: str, directory: Path) -> tuple[int, str, str]:
    # Libraries set variables that os.environ does not see.
    done = subprocess.run(
        [*INLAY, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=directory,
        env=dict(os.environ),
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(
    "words", [("--version",), ("serve", "--help"), ("serve", "no-model"), ("nonsense",)]
)
def test_a_forked_command_says_and_returns_what_a_started_one_does(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    with preloaded.started():
        expected = run(*words, directory=tmp_path)
    assert run(*words, directory=tmp_path) == expected


def has(process: "subprocess.Popen[bytes]", kept: int) -> dict[str, object]:
    """What the process of a server that listens has of its starter."""
    pid = process.pid
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    signals = ("SigBlk:", "SigIgn:", "Umask:")
    return {
        "parent": psutil.Process(pid).ppid(),
        "directory": psutil.Process(pid).cwd(),
        "leads its session": os.getsid(pid) == pid,
        "signals": [line for line in status if line.startswith(signals)],
        "descriptors": [Path(f"/proc/{pid}/fd/{fd}").readlink() for fd in (0, kept)],
        "workers": len(psutil.Process(pid).children()) > 0,
    }


@pytest.mark.thorough
@pytest.mark.parametrize("new_session", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_forked_server_has_what_its_starter_gave_it_and_ends_as_a_started_one(
    tmp_path: Path, new_session: bool, number: signal.Signals
) -> None:
    kept, ours = os.pipe()
    found = []
    for way, forked in ((preloaded.started, False), (nullcontext, True)):
        with way():
            process = subprocess.Popen(
                ECHO,
                cwd=tmp_path,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(kept,),
                start_new_session=new_session,
            )
        assert process.stderr is not None
        with process.stderr:
            while b"serving" not in (line := process.stderr.readline()):
                assert line, "ended before it served"
            assert ("tests.preloaded" in psutil.Process(process.pid).cmdline()) == forked
            facts = has(process, kept)
            process.send_signal(number)
            found.append((facts, process.wait(60)))
    assert found[0] == found[1]
    os.close(kept)
    os.close(ours)


def test_another_variable_that_is_read_at_the_start_has_a_process_started() -> None:
    environment = {**os.environ, "PYTHONWARNINGS": "ignore::ImportWarning"}
    with subprocess.Popen(ECHO, env=environment, stderr=subprocess.DEVNULL) as process:
        assert "tests.preloaded" not in psutil.Process(process.pid).cmdline()
        process.kill()


def test_variables_that_a_test_names_have_a_helper_of_their_own() -> None:
    named = {"LD_PRELOAD": "libpthread.so.0"}
    environment = {**os.environ, **named}
    with (
        preloaded.having(named, ["inlay.cli.serve"]),
        subprocess.Popen(ECHO, env=environment, stderr=subprocess.PIPE) as process,
    ):
        assert process.stderr is not None
        while b"serving" not in (line := process.stderr.readline()):
            assert line, "ended before it served"
        (worker,) = workers_of(process.pid)
        for each in (psutil.Process(process.pid), worker):
            assert "tests.preloaded" in each.cmdline()
            assert each.environ()["LD_PRELOAD"] == named["LD_PRELOAD"]
        process.kill()
    # As before.
    test_another_variable_that_is_read_at_the_start_has_a_process_started()


@pytest.fixture
def alone() -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-c", ALONE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


def server_of(alone: "subprocess.Popen[str]") -> int:
    assert alone.stdin is not None
    assert alone.stdout is not None
    alone.stdin.write("\n")
    alone.stdin.flush()
    return int(alone.stdout.readline())


def test_forked_processes_end_with_those_that_tests_run_in(alone: "subprocess.Popen[str]") -> None:
    server = psutil.Process(server_of(alone))
    assert server.is_running()
    alone.kill()
    until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)


def test_the_end_of_the_helper_is_an_error_of_the_next_start(
    alone: "subprocess.Popen[str]",
) -> None:
    server = server_of(alone)
    for child in psutil.Process(alone.pid).children():
        if child.pid != server:
            child.kill()
    with suppress(ValueError):  # no process id
        server_of(alone)
    alone.wait(60)
    os.kill(server, signal.SIGKILL)
    assert alone.stderr is not None
    assert "the process that forks those of inlay has ended" in alone.stderr.read()
