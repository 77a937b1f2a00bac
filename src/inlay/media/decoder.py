"""A process that decodes one file of a stranger by PyAV (FFmpeg), and can do nothing else.

Each file has a process of its own (`decoder_process.py`), which ends with it: no client's file
meets another's, and whoever takes it over holds a memory file and a pipe. It has no environment, no
descriptor but these, limits on memory and time, and a filter of system calls. Linux on x86-64 and
on 64-bit Arm have the filter; elsewhere nothing is decoded.
"""

import importlib.util
import json
import os
import platform
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self

from inlay.base.errors import InvalidRequestError
from inlay.base.pace import check_wanted

_SECONDS = 180
"""Time of one file where its process or the machine stands still."""

_PROGRAM = Path(__file__).with_name("decoder_process.py")
_MAX_REASON = 300
_LOOK_MILLISECONDS = 100


def can_decode() -> bool:
    """Return True if PyAV is installed and the system can confine it."""
    known = platform.machine() in ("x86_64", "aarch64")
    return sys.platform == "linux" and known and importlib.util.find_spec("av") is not None


class Decoder:
    """One file in the hands of its process, which ends with the `with` block.

    Args:
        what: word for it in errors: "a video".
        data: the file.
        task: of `decoder_process`: `memory` in bytes, `seconds` of processor time, and the rest.
    """

    def __init__(self, what: str, data: memoryview, task: dict[str, Any]) -> None:
        self._what = what
        self._seconds = task["seconds"]
        with os.fdopen(os.memfd_create("file", os.MFD_CLOEXEC), "w+b") as whole:
            whole.write(data)
            whole.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(_PROGRAM), json.dumps(task)],
                stdin=whole,
                stdout=subprocess.PIPE,
                bufsize=0,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                process_group=0,  # in a session of its own its niceness would not count
            )
        # A process that neither works nor ends.
        self._timer = threading.Timer(_SECONDS, self._process.kill)
        self._timer.daemon = True
        self._timer.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._process.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.wait()

    def read(self, count: int) -> bytearray:
        """Read `count` bytes, or as many as come; raises as `check_wanted` meanwhile."""
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        found = bytearray()
        while len(found) < count:
            check_wanted()
            if poll.poll(_LOOK_MILLISECONDS):
                came = os.read(pipe, count - len(found))
                if not came:
                    break
                found += came
        return found

    def failure(self, kind: bytes | bytearray) -> InvalidRequestError:
        """Return the error of a process that gave `kind` where the next piece should begin."""
        if kind == b"E":
            reason = self.read(_MAX_REASON).decode("ascii", "replace")
            printable = "".join(each for each in reason if each.isprintable())
            return InvalidRequestError(f"{self._what} cannot be decoded: {printable}")
        code = self._process.wait()
        if -code == signal.SIGXCPU:
            return InvalidRequestError(f"{self._what} takes more than {self._seconds} s to decode")
        name = signal.Signals(-code).name if code < 0 else f"status {code}"
        return InvalidRequestError(f"{self._what} cannot be decoded: its decoder ended with {name}")
