"""`inlay serve` as its own process: it starts, says why it cannot, and ends as told."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.models import tiny
from tests.serving import free_port, serving, until_stopping

truly_started = pytest.mark.usefixtures("started_processes")
"""Of what its imports, its start or its terminal have a part in."""

END_SECONDS = 90


MARK = "STARTED_BY_TEST"


def marked(mark: str) -> list[psutil.Process]:
    """Processes that have this mark in their environment."""
    found = psutil.process_iter(["environ"])
    return [each for each in found if (each.info["environ"] or {}).get(MARK) == mark]


def refused(*words: object, mark: str = "") -> tuple[int, list[str]]:
    """Status and lines of standard error of a server that does not start."""
    done = subprocess.run(
        [sys.executable, "-m", "inlay.cli", "serve", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=END_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1", MARK: mark},
    )
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr.splitlines()


@pytest.mark.thorough
@truly_started
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_an_idle_server_and_its_worker(number: signal.Signals) -> None:
    with serving(tiny("llama"), "--engine", "echo") as served:
        children = psutil.Process(served.process.pid).children()
        assert children
        served.process.send_signal(number)
        assert served.process.wait(END_SECONDS) == 0
        _, alive = psutil.wait_procs(children, END_SECONDS)
        assert not alive


def test_a_second_signal_does_not_wait_for_open_requests() -> None:
    with (
        serving(tiny("llama"), "--engine", "echo", "--drain-timeout", 600) as served,
        socket.create_connection(("127.0.0.1", int(served.url.rsplit(":", 1)[1]))) as unfinished,
    ):
        unfinished.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"
        )
        # Answered after what came before it has been read.
        urllib.request.urlopen(served.url + "/live").close()
        served.process.send_signal(signal.SIGINT)
        until_stopping(served)
        assert served.process.poll() is None
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(END_SECONDS) == 0


@pytest.mark.thorough
@truly_started
@pytest.mark.parametrize("shown", [0, 1], ids=["at once", "while it starts"])
def test_a_server_whose_reader_has_left_serves_and_ends_as_told(shown: int) -> None:
    port = free_port()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "inlay.cli", "serve", str(tiny("llama")), "--engine", "echo"),
            *("--port", str(port), "--log-requests"),
        ],
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stderr is not None
        for _ in range(shown):
            assert process.stderr.readline()
        process.stderr.close()
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + END_SECONDS
        while True:
            try:
                urllib.request.urlopen(url + "/ready").close()
                break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
        body = json.dumps({"prompt": "hello", "max_tokens": 3}).encode()
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(url + "/v1/completions", body, headers)
        with urllib.request.urlopen(asked) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(END_SECONDS) == 0
    finally:
        process.kill()
        process.wait()


def test_settings_from_the_environment_reach_the_server() -> None:
    environment = {"INLAY_SERVED_MODEL_NAME": "one two", "INLAY_ENGINE": "echo"}
    with (
        serving(tiny("llama"), environment=environment) as served,
        urllib.request.urlopen(served.v1 + "/models") as response,
    ):
        body = response.read()
    assert b'"one"' in body


def test_a_directory_without_a_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    status, lines = refused(tmp_path, "--port", 0)
    assert (status, lines) == (
        1,
        [f"inlay serve: {tmp_path} has no config.json: not a model directory"],
    )


@truly_started
def test_a_check_that_fails_leaves_no_process(tmp_path: Path) -> None:
    # Whoever holds standard error would keep it from ending, too.
    assert refused(tmp_path, "--port", 0, mark=str(tmp_path))[0] == 1
    assert not marked(str(tmp_path))


def test_a_model_that_is_nowhere_is_refused_in_one_sentence() -> None:
    said = "'/no/such/dir' is not a directory, nor a name on the hub (owner/model)"
    assert refused("/no/such/dir", "--port", 0) == (1, [f"inlay serve: {said}"])


def test_an_address_that_is_taken_is_refused_before_a_model_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, lines = refused("owner/nowhere", "--port", port)
    assert status == 1
    assert lines == [
        f"inlay serve: cannot listen on 127.0.0.1:{port}: Address already in use (--port takes another)"
    ]


def test_all_that_is_wrong_is_said_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, lines = refused("/no/such/dir", "--port", port)
    assert status == 1
    (line,) = lines
    assert (
        f"cannot listen on 127.0.0.1:{port}: Address already in use (--port takes another); '/no/such/dir' is not a"
        in line
    )


@contextmanager
def started(
    *words: object, until: str, shell: str | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A server that has written a line with `until` to standard error.

    Started by `shell`, a line that ends in `"$@"`, if given.
    """
    process = subprocess.Popen(
        [
            *(() if shell is None else ("sh", "-c", shell, "sh")),
            *(sys.executable, "-m", "inlay.cli", "serve", *map(str, words), "--port", "0"),
        ],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    with process:
        assert any(until in line for line in process.stderr)
        yield process


def test_what_it_waits_for_is_said_on_the_first_signal() -> None:
    with started(tiny("llama"), "--engine", "echo", until="serving") as process:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=END_SECONDS)
        assert said == "stopping: 0 requests open, up to 5 s; Ctrl-C again ends at once\n"
        assert process.returncode == 0


@pytest.mark.thorough
@truly_started
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_model_loads_ends_the_server_and_its_worker(
    number: signal.Signals,
) -> None:
    with started(tiny("llama"), until="loading") as process:
        children = psutil.Process(process.pid).children()
        process.send_signal(number)
        _, said = process.communicate(timeout=END_SECONDS)
        assert said.splitlines()[-1] == "stopping; no worker was ready"
        assert process.returncode == 130
        _, alive = psutil.wait_procs(children, END_SECONDS)
        assert not alive


@pytest.mark.thorough
@truly_started
@pytest.mark.parametrize(
    ("module", "begun"),
    [("difflib", 0), ("pydantic", 0), ("inlay.cli.usage", 0), ("starlette", 1), ("uvloop", 1)],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_among_the_imports_ends_all_without_a_traceback(
    module: str, begun: int, number: signal.Signals, tmp_path: Path
) -> None:
    # As the installed script does: with `-m` Python itself looks for modules between our imports.
    # It sends the signal to itself where the import begins: from outside it may come too late.
    script = f"""
import os, signal, sys
import psutil
class Interrupting:
    def find_spec(self, name, *_):
        if name == {module!r}:
            print(len(psutil.Process().children()), flush=True)
            os.kill(os.getpid(), {number.value})
sys.meta_path.insert(0, Interrupting())
from inlay.cli import main
sys.exit(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", script, "serve", str(tiny("llama")), "--port", "0"],
        capture_output=True,
        text=True,
        check=False,
        timeout=END_SECONDS,
        env={**os.environ, MARK: str(tmp_path)},
        # Whoever runs the tests in the background may have it ignored.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    assert done.stdout == f"{begun}\n"
    assert "Traceback" not in done.stderr
    assert done.returncode in (-number, 130)
    psutil.wait_procs(marked(str(tmp_path)), END_SECONDS)
    assert not marked(str(tmp_path))


@truly_started
@pytest.mark.parametrize("engine", ["echo", pytest.param("torch", marks=pytest.mark.thorough)])
def test_the_worker_is_the_process_that_was_begun_while_the_command_was_imported(
    engine: str,
) -> None:
    script = """
import sys
import psutil
class Telling:
    def find_spec(self, name, *_):
        if name == "starlette":
            print("begun", *(each.pid for each in psutil.Process().children()), file=sys.stderr)
sys.meta_path.insert(0, Telling())
from inlay.cli import main
sys.exit(main())
"""
    words = ["serve", str(tiny("llama")), "--engine", engine, "--port", "0"]
    with subprocess.Popen(
        [sys.executable, "-c", script, *words],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stderr is not None
        lines = iter(process.stderr)
        begun = next(line for line in lines if line.startswith("begun"))
        assert any("serving" in line for line in lines)
        (worker,) = psutil.Process(process.pid).children()
        assert begun == f"begun {worker.pid}\n"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=END_SECONDS)


@pytest.mark.thorough
@truly_started
def test_a_background_job_ends_on_a_signal_its_shell_had_ignored() -> None:
    with started(tiny("llama"), until="loading", shell="trap '' INT; exec \"$@\"") as process:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=END_SECONDS)
        assert process.returncode == 130


def test_a_certificate_that_is_none_is_refused_before_a_model_is_loaded() -> None:
    status, lines = refused(tiny("llama"), "--port", 0, "--ssl-certfile", __file__)
    assert status == 1
    assert len(lines) == 1
    assert lines[0].startswith(f"inlay serve: cannot use {__file__}")
