"""A command in a terminal, for tests: a pseudo-terminal that is read and typed into."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

BOUND = 120.0
"""Seconds after which a test gives up; nothing is asserted about time."""


LONGEST = 4096
"""Characters that a pattern may cover."""

_LOCAL = 3
"""Index of the local modes in what `termios.tcgetattr` returns."""


class Terminal:
    """The master's end of a pseudo-terminal."""

    def __init__(self, master: int, process: "subprocess.Popen[bytes]") -> None:
        self.master = master
        self.process = process
        self.seen = ""

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self.master, text.encode())

    def until(self, pattern: str) -> str:
        """All that was shown up to and with `pattern`, which is then forgotten."""
        return self._until(pattern, None)

    def press_until(self, key: str, pattern: str) -> str:
        """As `until`, pressing a key again every two seconds.

        A terminal's Ctrl-C is lost where it comes just as a prompt begins to wait, or just as what
        it would have stopped has ended.
        """
        return self._until(pattern, key)

    def _until(self, pattern: str, key: str | None) -> str:
        compiled = re.compile(pattern)
        deadline, again, searched = time.monotonic() + BOUND, time.monotonic(), 0
        # What has been searched is not searched again: an answer may be long.
        while (found := compiled.search(self.seen, max(0, searched - LONGEST))) is None:
            searched = len(self.seen)
            assert time.monotonic() < deadline, self.seen[-2000:]
            if key is not None and time.monotonic() >= again:
                self.type(key)
                again = time.monotonic() + 2
            assert self.read(), f"ended without {pattern!r}: {self.seen[-2000:]!r}"
        shown, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return shown

    def read(self) -> bool:
        """Take in what is shown; False at the end."""
        ready, _, _ = select.select([self.master], [], [], 1.0)
        if not ready:
            return True
        try:
            data = os.read(self.master, 65536)
        except OSError:
            return False
        self.seen += data.decode(errors="replace")
        return bool(data)

    def ended(self) -> int:
        """The exit status."""
        while self.read():
            pass
        return self.process.wait(BOUND)


@contextmanager
def terminal(
    *words: str,
    width: int = 80,
    environment: dict[str, str] | None = None,
    program: Sequence[str] = (sys.executable, "-m", "inlay.cli"),
) -> Iterator[Terminal]:
    """`inlay WORDS`, or another program, in a terminal of `width` columns."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    # Otherwise Ctrl-C also discards what the command has written and the test has not yet read.
    modes = termios.tcgetattr(slave)
    modes[_LOCAL] |= termios.NOFLSH
    termios.tcsetattr(slave, termios.TCSANOW, modes)
    given = {**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1", **(environment or {})}
    given.pop("COLUMNS", None)

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [*program, *words],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=given,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(slave)
    try:
        yield Terminal(master, process)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(master)
