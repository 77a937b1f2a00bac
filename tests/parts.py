"""Commands of inlay as processes that say when they are ready, for tests of several together."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import psutil

READY_SECONDS = 180.0
END_SECONDS = 90.0


class Part:
    """`inlay WORDS` as a process; ready once it has said `until` on standard error.

    With `variables` over those of this process.
    """

    def __init__(
        self, *words: object, until: str, variables: Mapping[str, str] | None = None
    ) -> None:
        self.said: list[str] = []
        self._until = until
        self._ready = threading.Event()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "inlay.cli", *map(str, words)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if self._until in line:
                self._ready.set()
        # At its end, nobody need wait any longer.
        self._ready.set()

    def wait_ready(self) -> "Part":
        """Return once it is. Raises `RuntimeError` when it ended before, or took too long."""
        ready = self._ready.wait(READY_SECONDS)
        if not ready or not any(self._until in line for line in self.said):
            raise RuntimeError("not ready: " + "".join(self.said[-20:]))
        return self

    def send(self, number: signal.Signals) -> None:
        """Signal it."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        return self.process.wait(END_SECONDS)

    def end(self) -> None:
        """End it, if it has not ended: as Ctrl-C does, and for certain."""
        if self.process.poll() is None:
            self.send(signal.SIGCONT)
            self.send(signal.SIGINT)
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._listening.join(END_SECONDS)
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextmanager
def running(*words: object, until: str) -> Iterator[Part]:
    """A part until the block ends."""
    part = Part(*words, until=until)
    try:
        yield part.wait_ready()
    finally:
        part.end()


def workers_of(pid: int) -> list[psutil.Process]:
    """The processes with engines that process `pid` has started: each leads a session."""
    found = []
    for child in psutil.Process(pid).children():
        with suppress(ProcessLookupError):
            if os.getsid(child.pid) == child.pid and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found
