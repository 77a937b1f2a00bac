"""Single flight: one computation for equal keys at a time; all callers get its result."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Hashable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class SingleFlight(Generic[K, T]):
    """Running computations in threads, by key."""

    __slots__ = ("_lock", "_under_way")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[K, Future[T]] = {}

    def run(self, key: K, request: Callable[[], T]) -> T:
        """The result of `request`, run here or by the thread that came first with an equal key.

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
            result = request()
        except BaseException as error:
            flight.set_exception(error)
            raise
        else:
            flight.set_result(result)
            return result
        finally:
            with self._lock:
                del self._under_way[key]


class _TaskFlight(Generic[T]):
    """A running computation, and the number of its callers."""

    __slots__ = ("task", "waiting")

    def __init__(self, task: "asyncio.Task[T]") -> None:
        self.task = task
        self.waiting = 0


class AsyncSingleFlight(Generic[K, T]):
    """Running computations in one event loop, by key.

    One is cancelled when its last caller leaves.
    """

    __slots__ = ("_under_way",)

    def __init__(self) -> None:
        self._under_way: dict[K, _TaskFlight[T]] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    async def run(self, key: K, request: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `request`, or of the running one of an equal key; errors likewise.

        The last caller to be cancelled returns when the computation has ended, so resources that it
        holds for it are held until then.
        """
        flight = self._under_way.get(key)
        if flight is None:
            flight = self._under_way[key] = _TaskFlight(asyncio.create_task(request()))
        flight.waiting += 1
        try:
            # A caller that leaves must not cancel it for the others.
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting:
                # Before waiting for the end: no caller may join a cancelled computation.
                del self._under_way[key]
                if not flight.task.done():
                    flight.task.cancel()
                    await asyncio.gather(flight.task, return_exceptions=True)

    def cancel(self) -> None:
        """Cancel all computations and their callers."""
        for flight in self._under_way.values():
            flight.task.cancel()
