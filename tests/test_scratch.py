"""Files that tests make are removed with them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

MAKE = "from tests.scratch import scratch; print(scratch('x'), flush=True); "


def started(temporary: Path, then: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "TMPDIR": str(temporary)}
    return subprocess.Popen(
        [sys.executable, "-c", MAKE + then],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[1],
    )


def test_a_directory_goes_with_its_process_and_after_a_killed_one_with_the_next(
    tmp_path: Path,
) -> None:
    with started(tmp_path, "input()") as killed, started(tmp_path, "input()") as alive:
        for process in (killed, alive):
            assert process.stdout is not None
        left, kept = (
            Path(process.stdout.readline().strip()) for process in (killed, alive) if process.stdout
        )
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert left.is_dir()
        with started(tmp_path, "") as third:
            assert third.wait() == 0
        assert list(tmp_path.iterdir()) == [kept]
        alive.communicate("\n")
    assert not list(tmp_path.iterdir())
