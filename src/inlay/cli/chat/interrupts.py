"""Ctrl-C in a chat: ends a line that is typed, or an answer, and never the chat."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


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
