"""What ties a response to the world outside its handler.

The client may leave, the server may shut down.

Either ends the handler's task at whatever it awaits: with `ClientGone`, or with the error the
server gives. The mechanism is that of `asyncio.timeout`: cancel the task, and turn the cancellation
into the reason on the way out.
"""

import asyncio
from types import TracebackType
from typing import NamedTuple

from inlay.errors import InlayError, OverloadedError
from inlay.frontend.bodies.body import Receive
from inlay.frontend.callers.clients import RETRY_AFTER
from inlay.frontend.errors import ClientGone


class Deadline(NamedTuple):
    """The seconds something may still take, and how it ends when they have passed."""

    seconds: float
    error: InlayError


class RequestScope:
    """`async with`: the block ends with `ClientGone` when `receive` tells of a disconnect, or with what `end` was given.

    Args:
        inflight: the requests under way; all of them can be ended.
        receive: of the request.
        deadline: when the block ends by itself, or None.
    """

    __slots__ = ("_deadline", "_inflight", "_reason", "_receive", "_task", "_timer", "_watcher")

    def __init__(
        self, inflight: "Inflight", receive: Receive, deadline: Deadline | None = None
    ) -> None:
        self._deadline = deadline
        self._timer: asyncio.TimerHandle | None = None
        self._inflight = inflight
        self._receive = receive
        self._reason: InlayError | ClientGone | None = None
        self._task: asyncio.Task[object] | None = None
        self._watcher: asyncio.Task[None] | None = None

    def end(self, reason: InlayError | ClientGone) -> None:
        """End the block with `reason`; only the first counts."""
        if self._reason is None and self._task is not None:
            self._reason = reason
            self._task.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue
        self.end(ClientGone())

    async def __aenter__(self) -> "RequestScope":
        self._task = asyncio.current_task()
        self._inflight.lines.add(self)
        self._watcher = asyncio.create_task(self._watch())
        if self._deadline is not None:
            seconds, error = self._deadline
            self._timer = asyncio.get_running_loop().call_later(seconds, self.end, error)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._inflight.lines.discard(self)
        task, self._task = self._task, None
        if self._watcher is not None:
            self._watcher.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._reason is None or task is None or task.uncancel() > 0:
            return
        if error is None or isinstance(error, asyncio.CancelledError):
            raise self._reason from error


class Inflight:
    """The requests under way.

    Attributes:
        count: requests that have been admitted.
        draining: no new ones are.
        lines: what ends those that generate.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.count = 0
        self.draining = False
        self.lines: set[RequestScope] = set()

    def __enter__(self) -> "Inflight":
        """Admit a request. Raises `OverloadedError` when there are too many, or the server drains."""
        if self.draining:
            raise shutting_down()
        if self.count >= self._limit:
            raise OverloadedError(
                f"{self.count} requests are under way, which is the limit", retry_after=RETRY_AFTER
            )
        self.count += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.count -= 1

    def end_all(self) -> None:
        """End every generating request with the error of a server that shuts down."""
        for line in list(self.lines):
            line.end(shutting_down())


def shutting_down() -> OverloadedError:
    """The error of requests a server that shuts down does not take, or does not finish."""
    return OverloadedError("the server is shutting down", retry_after=RETRY_AFTER)
