"""Outputs of one request that its reader has not taken yet."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence

from inlay.errors import InlayError, InvalidRequestError
from inlay.outputs import coalesce
from inlay.request import Output

MERGED = 64
"""Outputs that become one when so many wait: a reader that is late gets them together anyway."""
MAX_LOGPROBS = 1 << 18
"""Log-probabilities that may wait for a reader; ids are bounded by the model's context."""


class OutputQueue:
    """Outputs in the order they came, for one reader.

    Attributes:
        waiting: those it has not read.
    """

    def __init__(self) -> None:
        self.waiting: deque[Output] = deque()
        self._single = 0
        self._num_logprobs = 0
        self._changed = asyncio.Event()
        self._error: InlayError | None = None

    def put(self, output: Output) -> bool:
        """Add an output; False, with an error for the reader, where too much waits already."""
        if output.logprobs:
            self._num_logprobs += sum(1 + len(each.top) for each in output.logprobs)
            if self._num_logprobs > MAX_LOGPROBS:
                self.fail(
                    InvalidRequestError(
                        f"more than {MAX_LOGPROBS} log-probabilities wait, as the client does not "
                        "read its stream"
                    )
                )
                return False
        self.waiting.append(output)
        self._single += 1
        if self._single >= MERGED:
            newest = [self.waiting.pop() for _ in range(MERGED)]
            self.waiting.extend(coalesce(newest[::-1]))
            self._single = 0
        self._changed.set()
        return True

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
            self._single = self._num_logprobs = 0
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


__all__ = ["MAX_LOGPROBS", "MERGED", "OutputQueue"]
