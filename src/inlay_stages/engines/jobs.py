"""The requests of an engine that makes payloads, and the turns of those that can go on."""

import asyncio
from collections.abc import Container
from typing import Generic, TypeVar

from inlay.base.errors import InvalidRequestError, OverloadedError
from inlay.base.fair_queue import FairQueue
from inlay.engine.shell import EngineShell, Job
from inlay.messages.request import Request

_BACKLOG = 8
"""Requests in the engine at most, as a multiple of `max_num_seqs`: the router keeps fewer there."""

J = TypeVar("J", bound=Job)


class EngineJobs(Generic[J]):
    """The requests that have not ended, and the turns of those for which something can be done.

    On the event loop.

    Args:
        max_num_seqs: of the engine's settings.
        made: what a request makes, for the error of one whose deadline passes.
        adapters: keys of those that requests may name.

    Attributes:
        max_num_seqs: as above.
        shell: all of them.
        queue: those that wait for a turn, client by client.
        work: set when one begins to wait for a turn.
    """

    def __init__(
        self, max_num_seqs: int, made: str, adapters: Container[str] = frozenset()
    ) -> None:
        self.shell: EngineShell[J] = EngineShell(
            self.dequeue, lambda _: f"the deadline passed before {made}"
        )
        self.queue: FairQueue[J] = FairQueue()
        self.work = asyncio.Event()
        self.max_num_seqs = max_num_seqs
        self._adapters = adapters

    def check(self, request: Request) -> None:
        """Refuse a request that there is no place for.

        Raises:
            InvalidRequestError: one with its id is under way, or it names an adapter.
            EngineError: the engine has failed.
            OverloadedError: too many wait already, or the engine is closing.
        """
        self.shell.check(request)
        if request.adapter is not None and request.adapter not in self._adapters:
            raise InvalidRequestError(f"adapter {request.adapter!r} does not exist", param="model")
        most = _BACKLOG * self.max_num_seqs
        if len(self.shell) >= most:
            raise OverloadedError(f"{most} requests are queued already", retry_after=1.0)

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
        """Take a request out that has made all."""
        if self.shell.leave(job):
            self.dequeue(job)
