"""The requests of an engine that makes payloads: each ends once, in time, and gives its turn up."""

import asyncio
from collections.abc import Container
from typing import Generic, Protocol, TypeVar

from inlay.base.errors import (
    DeadlineExceededError,
    InlayError,
    InvalidRequestError,
    OverloadedError,
)
from inlay.base.fair_queue import FairQueue
from inlay.messages.request import FinishReason, Request

_BACKLOG = 8
"""Requests in the engine at most, as a multiple of `max_num_seqs`: the router keeps fewer there."""


class Job(Protocol):
    """One request in the engine.

    Attributes:
        timer: of its deadline.
    """

    timer: asyncio.TimerHandle | None

    @property
    def request(self) -> Request:
        """The request, as it was sent."""

    def end(self, reason: FinishReason, *, error: InlayError | None = None) -> None:
        """Emit the last output, unless it was emitted."""


J = TypeVar("J", bound=Job)


class Jobs(Generic[J]):
    """The requests that have not ended, and the turns of those for which something can be done.

    On the event loop.

    Args:
        max_num_seqs: of the engine's settings.
        made: what a request makes, for the error of one whose deadline passes.
        adapters: keys of those that requests may name.

    Attributes:
        queue: those that wait for a turn, client by client.
        work: set when one begins to wait for a turn.
    """

    def __init__(
        self, max_num_seqs: int, made: str, adapters: Container[str] = frozenset()
    ) -> None:
        self.queue: FairQueue[J] = FairQueue()
        self.work = asyncio.Event()
        self._most = _BACKLOG * max_num_seqs
        self._made = made
        self._adapters = adapters
        self._by_id: dict[str, J] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, request_id: str) -> J | None:
        """Return a request, if it has not ended."""
        return self._by_id.get(request_id)

    def check(self, request: Request) -> None:
        """Refuse a request that there is no place for.

        Raises:
            InvalidRequestError: one with its id is under way, or it names an adapter.
            OverloadedError: too many wait already.
        """
        if request.id in self._by_id:
            raise InvalidRequestError(f"a request with id {request.id!r} is under way")
        if request.adapter is not None and request.adapter not in self._adapters:
            raise InvalidRequestError(f"adapter {request.adapter!r} does not exist", param="model")
        if len(self._by_id) >= self._most:
            raise OverloadedError(f"{self._most} requests are queued already", retry_after=1.0)

    def add(self, job: J) -> None:
        """Add a request, without a turn."""
        self._by_id[job.request.id] = job
        if job.request.deadline is not None:
            loop = asyncio.get_running_loop()
            job.timer = loop.call_later(job.request.deadline, self._expire, job)

    def enqueue(self, job: J) -> None:
        """Give a request a turn, unless it waits for one."""
        if job not in self.queue:
            self.queue.push(job, job.request.client, job.request.priority)
            self.work.set()

    def dequeue(self, job: J) -> None:
        """Take its turn from a request, if it waits for one."""
        if job in self.queue:
            self.queue.remove(job, job.request.client, job.request.priority)

    def leave(self, job: J) -> None:
        """Take a request out; what is computed for it now is dropped when done."""
        # A further attempt at it has the same id.
        if self._by_id.get(job.request.id) is job:
            del self._by_id[job.request.id]
            self.dequeue(job)

    def abort(self, request_id: str) -> None:
        """End a request. Unknown ids are ignored."""
        job = self._by_id.get(request_id)
        if job is not None:
            self.leave(job)
            job.end("abort")

    def abort_all(self) -> None:
        """End every request, and wake who waits for work."""
        for request_id in tuple(self._by_id):
            self.abort(request_id)
        self.work.set()

    def fail(self, job: J, error: InlayError) -> None:
        """End a request with `error`."""
        self.leave(job)
        job.end("error", error=error)

    def fail_all(self, error: InlayError) -> None:
        """End every request with `error`."""
        for job in tuple(self._by_id.values()):
            self.fail(job, error)

    def _expire(self, job: J) -> None:
        late = f"the deadline passed before {self._made}"
        self.fail(job, DeadlineExceededError(late))
