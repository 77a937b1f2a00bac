"""Inputs of a request that come while it runs."""

import asyncio
from collections.abc import Callable, Sequence

from inlay.base.errors import InlayError
from inlay.messages.edges import Window
from inlay.messages.request import Input


class InputStream:
    """Inputs in the order they come in, of one stream or several. For one event loop.

    Attributes:
        error: why it ended before its end, or None.
    """

    def __init__(self, inputs: Sequence[Input] = (), streams: int = 1) -> None:
        self._waiting = list(inputs)
        self._streams = streams
        self._room = asyncio.Event()
        self._tell: Callable[[], None] = lambda: None
        self._unwanted = False
        self.error: InlayError | None = None

    @classmethod
    def of(cls, inputs: Sequence[Input]) -> "InputStream":
        """Return one that has all its inputs."""
        return cls(inputs, 0)

    @property
    def ended(self) -> bool:
        """All is taken, and nothing more comes: there is no end to what breaks off by an error."""
        return not self._streams and not self._waiting and self.error is None

    @property
    def has_news(self) -> bool:
        """Something waits to be taken, or nothing more comes."""
        return not self._streams or bool(self._waiting)

    def watch(self, tell: Callable[[], None]) -> None:
        """Call `tell` whenever something has come, or the end."""
        self._tell = tell

    def take(self) -> list[Input]:
        """Return the inputs that have come, and make room for others."""
        taken, self._waiting = self._waiting, []
        self._room.set()
        return taken

    def drain(self) -> None:
        """Drop all that comes from now on: who makes it must not wait for a reader."""
        self._unwanted = True
        self.take()

    def put(self, inputs: Sequence[Input]) -> None:
        """Add inputs."""
        if not self._unwanted:
            self._waiting += inputs
            self._tell()

    def end(self, error: InlayError | None = None) -> None:
        """A stream has ended; an error ends them all."""
        self._streams = 0 if error is not None else max(0, self._streams - 1)
        self.error = self.error or error
        self._tell()

    async def room(self, window: Window) -> Window:
        """Return how much may come of a stream, once that is something."""
        while True:
            size = len(self._waiting), sum(len(one.value.data) for one in self._waiting)
            if not window.full(*size):
                return window.left(*size)
            self._room.clear()
            await self._room.wait()
