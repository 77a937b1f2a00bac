"""The process of a command: its output streams, progress, signals and event loop."""

import logging
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, TextIO

# asyncio and uvloop are imported where they are used: `default_sigint` must be in force before
# anything that takes long to import.

EXIT_INTERRUPTED: Final = 130
"""Exit status by which shells know a command that SIGINT ended."""

SHOWN_AFTER: Final = 1.0
"""Seconds that a wait may take without a word."""

_REDRAWN_EVERY: Final = 0.25
_TOLD_EVERY: Final = 15.0
_CLEAR: Final = "\r\x1b[K"


@dataclass(frozen=True)
class Console:
    """Standard output for results, standard error for progress and errors.

    Output that a program may parse goes to `stdout` alone.
    """

    stdout: TextIO
    stderr: TextIO

    def out(self, text: str) -> None:
        """Write `text`, a result, as it is."""
        self.stdout.write(text)
        self.stdout.flush()

    def line(self, text: str) -> None:
        """Write one line of progress, whatever line breaks `text` has.

        A server goes on, and ends in order, where nobody reads its progress any more.
        """
        self._say(" ".join(text.split()), logging.INFO)

    def error(self, text: str) -> None:
        """As `line`, the error that ends the command."""
        self._say(" ".join(text.split()), logging.ERROR)

    def _say(self, line: str, level: int) -> None:
        if self.stderr is sys.stderr and _shows_json():
            # As all other lines are, not only those of loggers.
            logging.getLogger("inlay").log(level, "%s", line)
        else:
            self.progress(line + "\n")

    def progress(self, text: str) -> None:
        """Write `text` to `stderr` as it is, if somebody reads it."""
        with suppress(BrokenPipeError):
            self.stderr.write(text)
            self.stderr.flush()


def _shows_json() -> bool:
    from inlay.telemetry import shows_json

    return shows_json()


@contextmanager
def default_sigint() -> Iterator[None]:
    """Within it Ctrl-C ends the process at once, without a `KeyboardInterrupt`."""
    handler = signal.getsignal(signal.SIGINT)
    if (
        handler is not signal.default_int_handler
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def on_signals(act: Callable[[], object]) -> None:
    """Have SIGINT and SIGTERM call `act` on the running event loop.

    SIGINT too: a shell starts background jobs with it ignored, and then asyncio leaves it so.
    """
    import asyncio

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, act)


def run_until_signal(main: Coroutine[Any, Any, None]) -> int:
    """Run `main` in a new event loop; the first SIGINT or SIGTERM cancels it.

    `main` may replace that by calling `on_signals` itself.

    Returns:
        0, or `EXIT_INTERRUPTED` where it was cancelled.
    """
    import asyncio

    import uvloop

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_cancelled_by_signals(main))
    except asyncio.CancelledError:
        return EXIT_INTERRUPTED
    return 0


async def _cancelled_by_signals(main: Coroutine[Any, Any, None]) -> None:
    import asyncio

    task = asyncio.current_task()
    if task is not None:
        on_signals(task.cancel)
    await main


def columns() -> int:
    """Columns that text is wrapped to: the terminal's, at most 110; 100 where there is none."""
    return max(10, min(shutil.get_terminal_size((100, 24)).columns, 110))


@contextmanager
def waiting(console: Console, text: str | Callable[[], str]) -> Iterator[None]:
    """Say what is waited for, within it, from the first second on.

    On a terminal one line is drawn again and again, and wiped out in the end; elsewhere there is a
    line now and then.
    """
    done = threading.Event()
    thread = threading.Thread(
        target=_tell, args=(console, text, done), name="progress", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _tell(console: Console, text: str | Callable[[], str], done: threading.Event) -> None:
    began = time.monotonic()
    terminal = console.stderr.isatty()
    after = SHOWN_AFTER
    drawn = False
    while not done.wait(after):
        seconds = int(time.monotonic() - began)
        said = f"{text() if callable(text) else text} ({seconds} s)"
        if terminal:
            drawn = True
            width = shutil.get_terminal_size((80, 24)).columns
            # The cursor stays at the beginning, so that a line of somebody else begins there.
            console.progress(f"{_CLEAR}{said[: width - 1]}\r")
        else:
            console.line(said)
        after = _REDRAWN_EVERY if terminal else _TOLD_EVERY
    if drawn:
        console.progress(_CLEAR)
