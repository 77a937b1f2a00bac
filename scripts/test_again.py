"""Run the tests that just failed once more, alone, when they are few.

CI's machine is shared and stands still at times. A fault fails again; what only failed because
the machine stood still does not. The names of such tests are printed: each is a fault of the test.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
FEW = 3
"""Maximum number of failed tests that are run again: more is a fault for certain."""


def again(python: str | Path, arguments: list[str], environment: dict[str, str]) -> int:
    """Return pytest's status of a second run of at most `FEW` failed tests; 1 if there are more.

    Args:
        python: the interpreter of the first run.
        arguments: pytest's of the first run, without those of pytest-xdist.
        environment: of the first run.
    """
    failed = sorted(json.loads(FAILED.read_text())) if FAILED.exists() else []
    if not 0 < len(failed) <= FEW:
        return 1
    command = [python, "-m", "pytest", "--last-failed", "--last-failed-no-failures=none"]
    status = subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, check=False
    ).returncode
    if status == 0:
        print("failed once, passed alone:", *failed, sep="\n  ", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(again(sys.executable, sys.argv[1:], dict(os.environ)))
