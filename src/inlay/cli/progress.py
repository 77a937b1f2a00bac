"""Progress of waits that take longer than a second, on standard error."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from inlay.cli.process import Console

SHOWN_AFTER: Final = 1.0
"""Seconds that a wait may take without a word."""

_REDRAWN_EVERY: Final = 0.25
_TOLD_EVERY: Final = 15.0
_CLEAR: Final = "\r\x1b[K"


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
