"""What has come of one work's answer and was not read yet."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence

from inlay.errors import InlayError
from inlay.protocol.work import Delta


class DeltaQueue:
    """Deltas in the order they came, for one reader.

    Attributes:
        waiting: those it has not read.
    """

    def __init__(self) -> None:
        self.waiting: deque[Delta] = deque()
        self._changed = asyncio.Event()
        self._error: InlayError | None = None

    def put(self, delta: Delta) -> None:
        """Have the reader see `delta`."""
        self.waiting.append(delta)
        self._changed.set()

    def fail(self, error: InlayError) -> None:
        """End with `error` after what has come."""
        self._error = error
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[Sequence[Delta]]:
        """All that waits, each time something does; ends after a delta with a finish reason.

        Raises:
            InlayError: a delta carried it, or `fail` was given it.
        """
        while True:
            await self._changed.wait()
            self._changed.clear()
            batch: list[Delta] = []
            while self.waiting:
                delta = self.waiting.popleft()
                if delta.error is not None:
                    self._error = delta.error.to_error()
                    break
                batch.append(delta)
            if batch:
                yield batch
                if batch[-1].finish_reason is not None:
                    return
            if self._error is not None:
                raise self._error


__all__ = ["DeltaQueue"]
