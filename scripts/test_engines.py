"""Run the suites that need another engine, each in its own environment, two parts at a time.

A folder `tests/engines/NAME` with a `constraints.txt` is such a suite. Its environment
`.venv-NAME-HASH` is kept by the hash of its constraints, `install.sh` beside them says how uv
fills it, and pytest runs there with the suite's folder alone. inlay itself is not installed there,
only lent; `FRONTEND_PYTHON` names the Python of inlay's own environment, from which servers are
started.

A suite leaves a core idle half of the time, as one test waits for one engine. So `AT_ONCE` parts
run beside each other: a part is some files of a suite, in one process of pytest. Its output is
printed whole, when it ends. With `--fill` alone environments are filled, and nothing is tested.
"""

import ast
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import pytest
from scripts.test_again import again

ROOT = Path(__file__).resolve().parent.parent
SUITES = ROOT / "tests" / "engines"
AT_ONCE = 2
FILES = 10
"""Most files of a part: each starts the engine that its files share."""


@dataclass(frozen=True)
class Part:
    """Files of a suite that one process tests."""

    name: str
    python: Path
    files: tuple[Path, ...]


@dataclass(frozen=True)
class Result:
    """What the tests of a part said, and pytest's status."""

    part: Part
    status: int
    seconds: float
    output: str


UV_SETTINGS = {
    "find-links": "UV_FIND_LINKS",
    "index-url": "UV_DEFAULT_INDEX",
    "cert": "SSL_CERT_FILE",
}
"""uv's variable for each of pip's settings that say where packages come from."""


def installer() -> dict[str, str]:
    """Return the variables of `install.sh` for uv, which reads no configuration of pip."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True
    ).stdout
    found = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        if variable := UV_SETTINGS.get(name.split(".")[-1]):
            found[variable] = ",".join(ast.literal_eval(value).split())
    # Files are edited after they are installed: they must not be links into uv's cache.
    return {"UV": str(Path(sys.executable).with_name("uv")), "UV_LINK_MODE": "copy", **found}


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
            env={**os.environ, **installer(), "VENV": str(path)},
        )
        (path / ".installed").touch()
    return path


def parts_of(suite: Path, python: Path) -> Iterator[Part]:
    """Yield the parts of a suite, whose files are dealt out in turn."""
    files = sorted(suite.rglob("test_*.py"))
    count = -(-len(files) // FILES)
    for number in range(count):
        name = suite.name if count == 1 else f"{suite.name} {number + 1} of {count}"
        yield Part(name, python, tuple(files[number::count]))


def run(part: Part, words: list[str]) -> Result:
    """Test a part, with `words` for pytest; failed tests once more in CI."""
    cache = ROOT / ".pytest_cache" / part.name.replace(" ", "-")
    arguments = ["-m", "engines", "-o", f"cache_dir={cache}", *words, *map(str, part.files)]
    lent = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "FRONTEND_PYTHON": sys.executable}
    start = time.monotonic()
    output = []

    def tested(*more: str) -> int:
        done = subprocess.run(
            [part.python, "-m", "pytest", *more, *arguments],
            cwd=ROOT,
            env=lent,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        output.append(done.stdout)
        return done.returncode

    status = tested()
    if status == pytest.ExitCode.TESTS_FAILED and os.environ.get("CI"):
        status, said = again(cache, tested)
        output.append(said)
    return Result(part, status, time.monotonic() - start, "".join(output))


def main() -> int:
    """Run every suite, with the arguments given to pytest; 0 when none failed.

    With arguments a part may have no test that they choose, but not all parts.
    """
    words = sys.argv[1:]
    parts: list[Part] = []
    failed = []
    empty = 0
    for suite in sorted(path.parent for path in SUITES.glob("*/constraints.txt")):
        try:
            parts += parts_of(suite, environment_of(suite) / "bin" / "python")
        except subprocess.CalledProcessError as error:
            failed.append(f"{suite.name} (its environment was not filled: {error})")
    if words == ["--fill"]:
        print(f"environments of engine suites filled; failed: {', '.join(failed) or 'none'}")
        return 1 if failed else 0
    # The largest first: what is begun last is to be short.
    parts.sort(key=lambda part: -len(part.files))
    print(
        f"engine suites, {AT_ONCE} at a time: {', '.join(part.name for part in parts)}", flush=True
    )
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = [pool.submit(run, part, words) for part in parts]
        try:
            for done in as_completed(running):
                result = done.result()
                print(result.output, end="" if result.output.endswith("\n") else "\n")
                said = f"engine suite {result.part.name}: status {result.status}"
                print(f"{said}, {result.seconds:.0f} s", flush=True)
                if words and result.status == pytest.ExitCode.NO_TESTS_COLLECTED:
                    empty += 1
                elif result.status:
                    failed.append(f"{result.part.name} (status {result.status})")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if parts and empty == len(parts):
        failed.append(f"no part has a test that {' '.join(words)} chooses")
    print(f"{len(parts)} parts of engine suites ran; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
