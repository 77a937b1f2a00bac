"""Commands that tests run, each for so long at most: one that hangs must not hang them all."""

import subprocess
from typing import Any


def run(*words: object, within: float = 120, **how: Any) -> str:
    """The standard output of a command that succeeds, run as `subprocess.run` is told by `how`.

    Raises:
        AssertionError: it failed; with what it said.
        TimeoutExpired: it took more than `within` seconds, and was killed.
    """
    done: subprocess.CompletedProcess[str] = subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        timeout=within,
        check=False,
        stdin=subprocess.DEVNULL,
        **how,
    )
    assert done.returncode == 0, f"{words}: status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout
