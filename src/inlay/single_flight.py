"""Computations that go on when a caller leaves: one for equal keys at a time, or shielded.

Of single flights all callers get the result.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Hashable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class _Flight(Generic[T]):
    """A running computation, and the number of its callers."""

    __slots__ = ("task", "waiting")

    def __init__(self, task: "asyncio.Task[T]") -> None:
        self.task = task
        self.waiting = 0


class SingleFlight(Generic[K, T]):
    """Running computations in one event loop, by key.

    A caller that is cancelled never takes the others' result along.

    Args:
        finishes: a computation whose last caller left goes on, for callers to come. Without it,
            it is cancelled.
    """

    __slots__ = ("_finishes", "_flights")

    def __init__(self, *, finishes: bool = False) -> None:
        self._finishes = finishes
        self._flights: dict[K, _Flight[T]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    async def run(self, key: K, compute: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `compute`, or of the running one of an equal key; errors likewise.

        The last caller to be cancelled returns when the computation that it ends has ended, so
        resources that it holds for it are held until then.
        """
        flight = self._flights.get(key)
        if flight is None:
            task = asyncio.create_task(self._computed(key, compute))
            flight = self._flights[key] = _Flight(task)
        flight.waiting += 1
        try:
            return await shielded(flight.task)
        finally:
            flight.waiting -= 1
            if not (flight.waiting or self._finishes or flight.task.done()):
                # Before waiting for the end: no caller may join a cancelled computation.
                self._drop(key, flight.task)
                flight.task.cancel()
                await asyncio.gather(flight.task, return_exceptions=True)

    async def _computed(self, key: K, compute: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            return await compute()
        finally:
            # At once: whoever comes now starts anew.
            self._drop(key, asyncio.current_task())

    def _drop(self, key: K, task: "asyncio.Task[T] | None") -> None:
        """Forget a computation; once it is abandoned, another may have its key."""
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]

    def cancel(self) -> "list[asyncio.Task[T]]":
        """Cancel all computations and their callers; return the tasks that end now."""
        tasks = [flight.task for flight in self._flights.values()]
        self._flights.clear()
        for task in tasks:
            task.cancel()
        return tasks


class ThreadSingleFlight(Generic[K, T]):
    """Running computations in threads, by key."""

    __slots__ = ("_lock", "_under_way")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[K, Future[T]] = {}

    def run(self, key: K, compute: Callable[[], T]) -> T:
        """The result of `compute`, run here or by the thread that came first with an equal key.

        Its errors likewise.
        """
        with self._lock:
            flight = self._under_way.get(key)
            leads = flight is None
            if flight is None:
                flight = self._under_way[key] = Future()
        if not leads:
            return flight.result()
        try:
            result = compute()
        except BaseException as error:
            flight.set_exception(error)
            raise
        else:
            flight.set_result(result)
            return result
        finally:
            with self._lock:
                del self._under_way[key]


def shielded(running: "asyncio.Future[T]") -> "asyncio.Future[T]":
    """Return a future of what `running` returns, which goes on when its caller is cancelled.

    As `asyncio.shield`, which has an error that nobody waits for then logged with its stack.
    """
    running.add_done_callback(_heard)
    return asyncio.shield(running)


def _heard(running: "asyncio.Future[Any]") -> None:
    if not running.cancelled():
        running.exception()
