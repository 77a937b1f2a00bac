"""What has come of one request's answer and was not read yet."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence

from inlay.errors import InlayError
from inlay.request import Output


class OutputQueue:
    """Outputs in the order they came, for one reader.

    Attributes:
        waiting: those it has not read.
    """

    def __init__(self) -> None:
        self.waiting: deque[Output] = deque()
        self._changed = asyncio.Event()
        self._error: InlayError | None = None

    def put(self, output: Output) -> None:
        """Have the reader see `output`."""
        self.waiting.append(output)
        self._changed.set()

    def fail(self, error: InlayError) -> None:
        """End with `error` after what has come."""
        self._error = error
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[Sequence[Output]]:
        """All that waits, each time something does; ends after an output with a finish reason.

        Raises:
            InlayError: an output carried it, or `fail` was given it.
        """
        while True:
            await self._changed.wait()
            self._changed.clear()
            batch: list[Output] = []
            while self.waiting:
                output = self.waiting.popleft()
                if output.error is not None:
                    self._error = output.error.to_error()
                    break
                batch.append(output)
            if batch:
                yield batch
                if batch[-1].finish_reason is not None:
                    return
            if self._error is not None:
                raise self._error


__all__ = ["OutputQueue"]
