"""Run every benchmark, each in its own process: `python -m benchmarks [NAME ...]`."""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def main(names: list[str]) -> int:
    known = {
        path.stem: path for path in sorted(FOLDER.glob("*.py")) if not path.stem.startswith("_")
    }
    unknown = set(names) - set(known)
    if unknown:
        print(
            f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(known)}",
            file=sys.stderr,
        )
        return 2
    status = 0
    for name in names or known:
        print(f"\n== {name}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{name}"]
        status |= subprocess.run(command, check=False, cwd=FOLDER.parent).returncode
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
