"""Run the suites that need another engine, each in its own environment.

A folder `tests/engines/NAME` with a `constraints.txt` is such a suite. Its environment
`.venv-NAME-HASH` is kept by the hash of its constraints, `install.sh` beside them says how it is
filled, and pytest runs there with the suite's folder alone. inlay itself is not installed there,
only lent; `FRONTEND_PYTHON` names the Python of inlay's own environment, from which servers are
started.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from scripts.test_again import again

ROOT = Path(__file__).resolve().parent.parent


def environment_of(suite: Path) -> Path:
    """The suite's virtual environment, made and filled when it is not there yet."""
    recipe = b"".join((suite / name).read_bytes() for name in ("constraints.txt", "install.sh"))
    path = ROOT / f".venv-{suite.name}-{hashlib.sha256(recipe).hexdigest()[:12]}"
    if not (path / ".installed").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", path], check=True)
        subprocess.run(
            ["bash", suite / "install.sh"],
            check=True,
            cwd=ROOT,
            env={**os.environ, "VENV": str(path)},
        )
        (path / ".installed").touch()
    return path


def main() -> int:
    """Run every suite, with the arguments given to pytest; 0 when none failed."""
    suites = sorted(path.parent for path in (ROOT / "tests" / "engines").glob("*/constraints.txt"))
    failed = []
    for suite in suites:
        print(f"engine suite: {suite.name}", flush=True)
        try:
            python = environment_of(suite) / "bin" / "python"
        except subprocess.CalledProcessError as error:
            failed.append(f"{suite.name} (its environment was not filled: {error})")
            continue
        arguments = ["-m", "engines", *sys.argv[1:], str(suite)]
        lent = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "FRONTEND_PYTHON": sys.executable}
        status = subprocess.run(
            [python, "-m", "pytest", *arguments], cwd=ROOT, env=lent, check=False
        ).returncode
        if status and os.environ.get("CI"):
            status = again(python, arguments, lent)
        if status:
            failed.append(f"{suite.name} (status {status})")
    print(f"{len(suites)} engine suites ran; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
