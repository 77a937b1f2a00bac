"""Run the tests that just failed once more, alone, when they are few.

CI's machine is shared and stands still at times. A fault fails again; what only failed because
the machine stood still does not. The names of such tests are printed: each is a fault of the test.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".pytest_cache"
FEW = 3
"""Maximum number of failed tests that are run again: more is a fault for certain."""
RESTARTS = 2
"""Processes that may be started for those that ended: with more the others' tests do not run."""
ENDED = "inlay/ended"
"""Key of pytest's cache: number of processes that ended in the last run, of themselves."""


def again(cache: Path, test: Callable[..., int]) -> tuple[int, str]:
    """Return pytest's status of a second run of at most `FEW` failed tests, and what is said of it.

    The status is 1 if there are more, or if not all tests were run.

    Args:
        cache: pytest's of the first run.
        test: runs pytest as the first run did, with these arguments more.
    """
    path = cache / "v" / "cache" / "lastfailed"
    failed = sorted(json.loads(path.read_text())) if path.exists() else []
    ended = cache / "v" / ENDED
    whole = not ended.exists() or json.loads(ended.read_text()) <= RESTARTS
    if not (whole and 0 < len(failed) <= FEW):
        return 1, ""
    status = test("--last-failed", "--last-failed-no-failures=none")
    if status:
        return status, ""
    return 0, "\n  ".join(["failed once, passed alone:", *failed]) + "\n"


def _test(*more: str) -> int:
    command = [sys.executable, "-m", "pytest", *more, *sys.argv[1:]]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    status, said = again(CACHE, _test)
    print(said, end="", flush=True)
    sys.exit(status)
