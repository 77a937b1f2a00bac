"""The terminal of a chat: plain unless it is one, and Ctrl-C in it."""

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from inlay.cli.process import Console

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_DIM, _RESET = "\x1b[2m", "\x1b[0m"


class Screen:
    """Writes answers.

    What a model says is not trusted: on a terminal its control characters are shown, not obeyed.

    Args:
        console: its streams.
        terminal: True if standard output is a terminal; asked of it unless given.
    """

    def __init__(self, console: Console, terminal: bool | None = None) -> None:
        self.console = console
        self.terminal = console.stdout.isatty() if terminal is None else terminal
        self.colour = (
            self.terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        )
        self._ended = True

    def text(self, text: str) -> None:
        """A piece of an answer."""
        self.console.out(self._safe(text))
        self._ended = text.endswith("\n")

    def aside(self, text: str) -> None:
        """A piece of the model's reasoning: dim on a terminal, left out elsewhere."""
        if self.terminal:
            safe = self._safe(text)
            self.console.out(f"{_DIM}{safe}{_RESET}" if self.colour else safe)
            self._ended = text.endswith("\n")

    def end(self) -> None:
        """End the line, unless it is ended."""
        if not self._ended:
            self.console.out("\n")
        self._ended = True

    def note(self, text: str) -> None:
        """A line that is no answer, on standard error."""
        self.console.line(self._safe(text))

    def _safe(self, text: str) -> str:
        if not self.terminal:
            return text
        return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


class Interrupts:
    """Handles SIGINT between `__enter__` and `__exit__`, in the main thread.

    A `KeyboardInterrupt` is raised within `typing` alone, and once, so that keys pressed in a row
    do nothing more than the first.
    """

    def __init__(self) -> None:
        self._typing = False
        self._answer: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._before: Any = None

    def __enter__(self) -> "Interrupts":
        self._before = signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    @contextmanager
    def typing(self) -> Iterator[None]:
        """Raise `KeyboardInterrupt` at the first Ctrl-C within."""
        self._typing = True
        try:
            yield
        except SystemError as error:
            # `input` runs the handlers of further signals while the first one's exception is set,
            # and CPython rejects a handler that then returns.
            if not isinstance(error.__cause__, KeyboardInterrupt):
                raise
            raise KeyboardInterrupt from error
        finally:
            self._typing = False

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Cancel the running task at the first Ctrl-C within."""
        self._loop, self._answer = asyncio.get_running_loop(), asyncio.current_task()
        try:
            yield
        finally:
            self._answer = None

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self._typing:
            self._typing = False
            raise KeyboardInterrupt
        if self._loop is not None and self._answer is not None:
            # The loop may be waiting: this wakes it.
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._answer is not None:
            self._answer.cancel()
            self._answer = None
