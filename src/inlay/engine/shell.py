"""The life of an engine on the event loop, and of each request in it."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Generic, Protocol, TypeVar

from inlay.base.errors import (
    DeadlineExceededError,
    EngineError,
    InlayError,
    InvalidRequestError,
    OverloadedError,
)
from inlay.messages.request import Emit, FinishReason, Output, Request

log = logging.getLogger(__name__)


class Job(Protocol):
    """A request in an engine."""

    @property
    def request(self) -> Request:
        """The request, as it was sent."""

    def end(self, reason: FinishReason, *, error: InlayError | None = None) -> None:
        """Emit the last output, unless it was emitted."""


J = TypeVar("J", bound=Job)


class EngineShell(Generic[J]):
    """Common part of engines: requests by id, their deadlines, tasks, and one failure.

    Args:
        stop: called with a request that is to end before the engine has ended it.
        late: what the error of a request says whose deadline passes.

    Attributes:
        closing: no request is admitted any more.
    """

    def __init__(
        self,
        stop: Callable[[J], None] = lambda _: None,
        late: Callable[[J], str] = lambda _: "the request's deadline passed",
    ) -> None:
        self.closing = False
        self._stop = stop
        self._late = late
        self._jobs: dict[str, tuple[J, asyncio.TimerHandle | None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[EngineError] | None = None

    def __len__(self) -> int:
        """Number of requests that have not ended."""
        return len(self._jobs)

    def __iter__(self) -> Iterator[J]:
        """The requests that have not ended, as they are now."""
        return iter([job for job, _ in self._jobs.values()])

    def get(self, request_id: str) -> J | None:
        """Return a request, if it has not ended."""
        return self._jobs.get(request_id, (None,))[0]

    def begin(self) -> None:
        """Start, once. Raises `EngineError` if it was started before."""
        if self._failure is not None:
            raise EngineError("the engine was started before")
        self._failure = asyncio.get_running_loop().create_future()

    async def close(self) -> bool:
        """End every request with "abort", and all tasks; False if it is closed already."""
        if self.closing:
            return False
        self.closing = True
        self.abort_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return True

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run a coroutine until it or the engine ends."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def fail(self, error: EngineError) -> None:
        """End every request with `error`; from now on the engine has failed."""
        if self._failure is not None and not self._failure.done():
            self._failure.set_result(error)
            self.end_all("error", error)

    async def failed(self) -> EngineError:
        """Wait for a failure, and return it. Raises `EngineError` before the start."""
        if self._failure is None:
            raise EngineError("the engine is not started")
        return await asyncio.shield(self._failure)

    def check_running(self) -> None:
        """Return if the engine can do something.

        Raises:
            EngineError: it has failed.
            OverloadedError: it is closing.
        """
        if self._failure is not None and self._failure.done():
            raise self._failure.result()
        if self.closing:
            raise OverloadedError("the engine is closing")

    def check(self, request: Request) -> None:
        """As `check_running`; raises `InvalidRequestError` for an id that is under way."""
        self.check_running()
        if request.id in self._jobs:
            raise InvalidRequestError(f"a request with id {request.id!r} is under way")

    def add(self, job: J) -> None:
        """Take in a request; its deadline runs from now on."""
        timer, deadline = None, job.request.deadline
        if deadline is not None:
            timer = asyncio.get_running_loop().call_later(max(0.0, deadline), self._expire, job)
        self._jobs[job.request.id] = job, timer

    def _expire(self, job: J) -> None:
        self.end(job, "error", DeadlineExceededError(self._late(job)))

    def leave(self, job: J) -> bool:
        """Forget a request; False if it has left. A further attempt at it has the same id."""
        known, timer = self._jobs.get(job.request.id, (None, None))
        if known is not job:
            return False
        del self._jobs[job.request.id]
        if timer is not None:
            timer.cancel()
        return True

    def end(self, job: J, reason: FinishReason, error: InlayError | None = None) -> None:
        """End a request that has not left; what is computed for it now is dropped."""
        if self.leave(job):
            self._stop(job)
            job.end(reason, error=error)

    def end_all(self, reason: FinishReason, error: InlayError | None = None) -> None:
        """End every request."""
        for job in self:
            self.end(job, reason, error)

    def abort(self, request_id: str) -> None:
        """End a request with "abort". Unknown ids are ignored."""
        job = self.get(request_id)
        if job is not None:
            self.end(job, "abort")

    def abort_all(self) -> None:
        """End every request with "abort"."""
        self.end_all("abort")


def send(request: Request, emit: Emit, output: Output) -> bool:
    """Emit an output; False if its receiver fails, and gets an error as the last one.

    So the others of its step or batch go on.
    """
    fault = fault_of(emit, output)
    if fault is not None:
        said = f"the answer could not be sent: {type(fault).__name__}: {fault}"
        fault_of(emit, request.end("error", EngineError(said)))
    return fault is None


def fault_of(emit: Emit, output: Output) -> Exception | None:
    """Emit an output, and return what its receiver raised, which harms no other."""
    try:
        emit(output)
    except Exception as error:
        log.exception("the receiver of request %s failed", output.request_id)
        return error
    return None
