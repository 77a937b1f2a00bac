"""Costly tasks on a few threads, on which clients take turns."""

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from inlay.base.errors import OverloadedError
from inlay.base.fair_queue import FairQueue

T = TypeVar("T")


class SharedTask(Generic[T]):
    """A task, and the clients that wait for it.

    Attributes:
        done: its result.
        begun: it runs, or has run.
        stop: ends it early, as far as that is possible.
    """

    __slots__ = ("_function", "_waiting", "begun", "done", "stop")

    def __init__(self, function: Callable[[], T], stop: Callable[[], None] = lambda: None) -> None:
        """A task that calls `function`."""
        self.done: Future[T] = Future()
        self.begun = False
        self.stop = stop
        self._function = function
        self._waiting: Counter[Hashable] = Counter()

    @property
    def clients(self) -> tuple[Hashable, ...]:
        """Clients that wait for it, each once."""
        return tuple(self._waiting)

    def subscribe(self, client: Hashable) -> bool:
        """Add a client that waits; True if it did not wait before."""
        self._waiting[client] += 1
        return self._waiting[client] == 1

    def unsubscribe(self, client: Hashable) -> bool:
        """Take a wait of a client back; True if the client waits no more."""
        self._waiting[client] -= 1
        if self._waiting[client]:
            return False
        del self._waiting[client]
        return True

    def run(self) -> None:
        """Run it, and set the result."""
        try:
            result = self._function()
        except BaseException as error:  # its waiters get it, whatever it is
            self.done.set_exception(error)
        else:
            self.done.set_result(result)


class FairExecutor(Generic[T]):
    """Runs jobs on threads, which nothing can interrupt. Safe to use from any thread.

    Clients take turns, and none has more than its share running: one that asks for much, or for
    what takes long, delays its own. A job for which several wait is done at the first turn of any
    of them. One that no client waits for any more is never begun. The threads give way to those
    that run the model.
    """

    def __init__(self, threads: int, name: str, *, share: int = 1) -> None:
        """On `threads` threads called `name`, of which one client has `share` at a time."""
        self._free = threads
        self._share = share
        self._threads = ThreadPoolExecutor(threads, name, yield_to_others)
        self._lock = threading.Lock()
        self._queue: FairQueue[tuple[SharedTask[T], Hashable]] = FairQueue()
        self._running: Counter[Hashable] = Counter()
        self._busy: set[Hashable] = set()
        self._closed = False

    def close(self) -> None:
        """Begin nothing more."""
        with self._lock:
            self._closed = True
        self._threads.shutdown(wait=False)

    def submit(self, job: SharedTask[T], client: Hashable) -> None:
        """Have a client wait for a job, which gets into the client's line unless it has begun.

        Raises `OverloadedError` when closed.
        """
        with self._lock:
            if self._closed:
                raise OverloadedError("the engine is closing")
            if job.subscribe(client) and not job.begun:
                self._queue.push((job, client), client, 0)
            self._begin()

    def unsubscribe(self, job: SharedTask[T], client: Hashable) -> bool:
        """A client waits no more; True if none does: then a task that has not begun never will."""
        with self._lock:
            if job.unsubscribe(client) and not job.begun:
                self._queue.remove((job, client), client, 0)
            return not job.clients

    def _begin(self) -> None:
        """Begin what may begin now, with the lock held."""
        while self._free and not self._closed:
            try:
                job, client = self._queue.take(without=self._busy)
            except IndexError:
                return
            for other in job.clients:
                if other != client:
                    self._queue.remove((job, other), other, 0)
            job.begun = True
            self._free -= 1
            self._running[client] += 1
            if self._running[client] >= self._share:
                self._busy.add(client)
            self._threads.submit(self._run, job, client)

    def _run(self, job: SharedTask[T], client: Hashable) -> None:
        job.run()
        with self._lock:
            self._busy.discard(client)
            self._running[client] -= 1
            if not self._running[client]:
                del self._running[client]
            self._free += 1
            self._begin()


def yield_to_others() -> None:
    """Have the calling thread give way to those that run the model.

    Linux has a niceness for each thread.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)
