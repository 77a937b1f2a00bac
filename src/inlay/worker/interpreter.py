"""The Python a worker runs in.

Inlay's own, or that of another environment, which is lent inlay and need not have it.
"""

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import inlay
from inlay import extension
from inlay.base import liveness
from inlay.base.errors import InvalidRequestError

NEEDED: Mapping[str, str] = {
    "blake3": "1.0",
    "huggingface-hub": "1",
    "ml-dtypes": "0.5",
    "msgspec": "0.20",
    "numpy": "2.0",
    "pydantic": "2.12",
}
"""Distributions that a worker imports beside its engine, and the least version of each."""

LEAST_PYTHON = (3, 11)

SAFE: Mapping[str, str] = {"PYTHONSAFEPATH": "1"}
"""Variables of every Python that is started.

What lies in the working directory, such as a model's own files, is not imported.
"""

_SECONDS = 60.0
_ASK = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
def found(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None
print(json.dumps([list(sys.version_info[:3]), {name: found(name) for name in sys.argv[1:]}]))
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python, and the directory that lends it inlay where it is not inlay's own.

    Attributes:
        path: the executable.
        lent: a directory with links to inlay and its extensions alone, or None; gone with `close`.
    """

    path: str
    lent: "TemporaryDirectory[str] | None" = None

    def environment(self, inherited: Mapping[str, str]) -> Mapping[str, str]:
        """Variables it is to be started with, beside those it inherits."""
        if self.lent is None:
            return SAFE
        paths = [self.lent.name, *filter(None, [inherited.get("PYTHONPATH")])]
        return {"PYTHONPATH": ":".join(paths), **SAFE}

    def close(self) -> None:
        """Take back what was lent."""
        if self.lent is not None:
            self.lent.cleanup()


async def interpreter(python: Path | None) -> Interpreter:
    """The Python of a worker.

    Raises:
        InvalidRequestError: it cannot be run, is too old, or lacks what a worker imports; says what
            to install.
    """
    if python is None:
        return Interpreter(sys.executable)
    release, versions = await _asked(python)
    if tuple(release[:2]) < LEAST_PYTHON:
        raise InvalidRequestError(
            f"--engine-python {python} is Python {'.'.join(map(str, release))}; inlay needs "
            f"{'.'.join(map(str, LEAST_PYTHON))} or later",
            param="engine_python",
        )
    lacking = [
        f'"{name}>={least}"'
        for name, least in NEEDED.items()
        if (found := versions.get(name)) is None or _numbers(found) < _numbers(least)
    ]
    if lacking:
        raise InvalidRequestError(
            f"--engine-python {python} lacks what a worker imports; run: {python} -m pip install "
            f"{' '.join(lacking)}",
            param="engine_python",
        )
    return Interpreter(str(python), _lent())


def _lent() -> "TemporaryDirectory[str]":
    """A directory to import from that holds inlay and its extensions alone.

    Its neighbours would hide the other environment's.
    """
    lent = TemporaryDirectory(prefix="inlay-lent-")
    (Path(lent.name) / "inlay").symlink_to(
        Path(inlay.__file__).resolve().parent, target_is_directory=True
    )
    extension.lend(Path(lent.name))
    return lent


async def _asked(python: Path) -> tuple[list[int], dict[str, str | None]]:
    """The version of `python`, and of each of `NEEDED` in its environment."""
    try:
        process = await asyncio.create_subprocess_exec(
            *(str(python), "-c", _ASK, *NEEDED),
            env={**os.environ, **SAFE},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise InvalidRequestError(
            f"--engine-python {python} cannot be run: {error.strerror}", param="engine_python"
        ) from error
    try:
        async with liveness.timeout(_SECONDS):
            told, complaint = await process.communicate()
    except TimeoutError as error:
        process.kill()
        await process.wait()
        raise InvalidRequestError(
            f"--engine-python {python} did not answer within {_SECONDS:g} s", param="engine_python"
        ) from error
    try:
        release, versions = json.loads(told)
    except ValueError as error:
        last = (complaint.decode(errors="replace").strip().splitlines() or ["nothing"])[-1]
        raise InvalidRequestError(
            f"--engine-python {python} is no Python that runs: it said {last!r}",
            param="engine_python",
        ) from error
    return release, versions


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version."""
    found: list[int] = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits))
    return tuple(found)
