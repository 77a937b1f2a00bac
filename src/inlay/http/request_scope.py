"""Cancellation of a request when its client leaves, its time is up, or the server shuts down.

The handler's task is cancelled where it awaits, and ends with `ClientGone` or the given error. The
mechanism is that of `asyncio.timeout`: cancel the task, and replace the cancellation by the reason
at the end of the block.
"""

import asyncio
from types import TracebackType
from typing import NamedTuple

from inlay.base.errors import InlayError, OverloadedError
from inlay.http.asgi import Receive
from inlay.http.callers.clients import RETRY_AFTER
from inlay.http.errors import ClientGone


class Deadline(NamedTuple):
    """Remaining seconds, and the error when they have passed."""

    seconds: float
    error: InlayError


class RequestScope:
    """Block of a handler: ends with `ClientGone` on a disconnect, or with the error given to `end`.

    Args:
        inflight: the running requests, which the server can end together.
        receive: the ASGI receive function of the request.
        deadline: time limit of the block, or None.
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
        """End the block with `reason`; only the first call counts."""
        if self._reason is None and self._task is not None:
            self._reason = reason
            self._task.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue
        self.end(ClientGone())

    async def __aenter__(self) -> "RequestScope":
        self._task = asyncio.current_task()
        self._inflight.open_scopes.add(self)
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
        self._inflight.open_scopes.discard(self)
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
    """The running requests.

    Attributes:
        count: number of admitted requests.
        draining: True if no new requests are admitted.
        open_scopes: scopes of the generating requests.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.count = 0
        self.draining = False
        self.open_scopes: set[RequestScope] = set()

    def __enter__(self) -> "Inflight":
        """Admit a request. Raises `OverloadedError` if there are too many or the server drains."""
        if self.draining:
            raise shutting_down()
        if self.count >= self._limit:
            raise OverloadedError(
                f"{self.count} requests are under way, which is the limit "
                "(--max-inflight-requests)",
                retry_after=RETRY_AFTER,
            )
        self.count += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.count -= 1

    def end_all(self) -> None:
        """End every generating request with the error of `shutting_down`."""
        for line in list(self.open_scopes):
            line.end(shutting_down())


def shutting_down() -> OverloadedError:
    """Return the error of requests that a stopping server refuses or does not finish."""
    return OverloadedError("the server is shutting down", retry_after=RETRY_AFTER)
