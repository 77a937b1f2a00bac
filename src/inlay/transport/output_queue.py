"""Outputs of one request that its reader has not taken yet."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from inlay.base.errors import InvalidRequestError
from inlay.messages.outputs import coalesce
from inlay.messages.request import Output

MERGED = 64
"""Outputs that become one when so many wait: a reader that is late gets them together anyway."""
MAX_LOGPROBS = 1 << 18
"""Log-probabilities that may wait for a reader; ids are bounded by the model's context."""


TakeOutput: TypeAlias = Callable[[Output], bool]
"""Takes an output in place of a stream's reader; False, and nothing has happened, if it cannot."""


class DispatchQueue:
    """Queues of one connection whose outputs are to be taken at the end of this turn of the loop.

    One callback takes those of all streams, where each reader would be a task to wake. What comes
    for one stream within a turn is taken together.
    """

    __slots__ = ("_due",)

    def __init__(self) -> None:
        self._due: list[OutputQueue] = []

    def add(self, queue: "OutputQueue") -> None:
        """Have a queue deliver, once."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._deliver)
        self._due.append(queue)

    def _deliver(self) -> None:
        due, self._due = self._due, []
        for queue in due:
            try:
                queue.deliver()
            except Exception as error:  # raised again where the queue is read
                queue.waiting.clear()
                queue.fail(error)


class OutputQueue:
    """Outputs in the order they came, for one reader.

    Args:
        deliveries: of all queues of a connection; None where it has no other queue.

    Attributes:
        waiting: those it has not read.
    """

    __slots__ = (
        "_deliveries", "_ended", "_error", "_is_due", "_num_logprobs", "_single", "_take",
        "_waiter", "waiting",
    )  # fmt: skip

    def __init__(self, deliveries: DispatchQueue | None = None) -> None:
        self.waiting: deque[Output] = deque()
        self._deliveries = deliveries or DispatchQueue()
        self._take: TakeOutput | None = None
        self._is_due = False
        self._single = 0
        self._num_logprobs = 0
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._ended = False

    def set_inline_reader(self, take: TakeOutput | None) -> None:
        """Offer what comes while the reader waits to `take`; None ends it.

        The reader gets what is not taken, and all behind it until it waits again. What `take`
        raises ends the queue: the reader gets it in place of all that waits.
        """
        self._take = take

    def put(self, output: Output) -> bool:
        """Add an output; False, with an error for the reader, where too much waits already.

        Nothing is added behind an error: the end of a request that was cancelled would hide it.
        """
        if self._ended or self._error is not None:
            return False
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
        if self._take is None:
            self._wake()
        elif self._waiter is not None and not self._is_due:
            self._is_due = True
            self._deliveries.add(self)
        return True

    def deliver(self) -> None:
        """Have what waits taken, or wake the reader for it. Raises what its taking does."""
        self._is_due = False
        waiting, waiter, take = self.waiting, self._waiter, self._take
        if waiter is None or waiter.done() or not waiting:
            return  # the reader does not wait any more, or was cancelled
        outputs = waiting if len(waiting) == 1 else coalesce([*waiting])
        if take is not None and len(outputs) == 1:
            (output,), logprobs = outputs, self._num_logprobs
            waiting.clear()
            self._single = self._num_logprobs = 0
            if take(output):
                return
            waiting.appendleft(output)
            self._num_logprobs += logprobs
        self._wake()

    def fail(self, error: Exception) -> None:
        """End with `error` after what has come."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def __aiter__(self) -> "OutputQueue":
        return self

    async def __anext__(self) -> Sequence[Output]:
        """Return all that waits, once something does; ends after a finish reason.

        Raises:
            InlayError: an output carried it, or `fail` was given it.
        """
        if self._ended:
            raise StopAsyncIteration
        while not self.waiting:
            if self._error is not None:
                raise self._taken_error()
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._single = self._num_logprobs = 0
        if len(self.waiting) == 1 and self.waiting[0].error is None:
            self._ended = self.waiting[0].finish_reason is not None
            return (self.waiting.popleft(),)
        batch: list[Output] = []
        while self.waiting:
            output = self.waiting.popleft()
            if output.error is not None:
                self._error = output.error.to_error()
                self.waiting.clear()
                break
            batch.append(output)
        if not batch:
            raise self._taken_error()
        self._ended = batch[-1].finish_reason is not None
        return batch

    def _taken_error(self) -> Exception:
        """Return the error, which is kept no longer: its frames hold all that the reader has."""
        error, self._error = self._error, None
        self._ended = True
        return error or StopAsyncIteration()
