"""Single flight: of several that want the same thing at once, one works and all get its result."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Hashable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class SingleFlight(Generic[K, T]):
    """Work under way in threads, by key."""

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
    """Work under way, and how many wait for it."""

    __slots__ = ("task", "waiting")

    def __init__(self, task: "asyncio.Task[T]") -> None:
        self.task = task
        self.waiting = 0


class AsyncSingleFlight(Generic[K, T]):
    """Work under way in one event loop, by key.

    It is cancelled when the last that waits for it leaves.
    """

    __slots__ = ("_under_way",)

    def __init__(self) -> None:
        self._under_way: dict[K, _TaskFlight[T]] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    async def run(self, key: K, request: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `request`, or of that of whoever came first with an equal key.

        Its errors likewise.

        Who is the last to be cancelled returns when the request has ended, so what it held for it
        is held until then.
        """
        flight = self._under_way.get(key)
        if flight is None:
            flight = self._under_way[key] = _TaskFlight(asyncio.create_task(request()))
        flight.waiting += 1
        try:
            # Whoever leaves must not take it from the others.
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting:
                # Before the end is waited for: nobody may join what is cancelled.
                del self._under_way[key]
                if not flight.task.done():
                    flight.task.cancel()
                    await asyncio.gather(flight.task, return_exceptions=True)

    def cancel(self) -> None:
        """End all that is under way; those that wait are cancelled."""
        for flight in self._under_way.values():
            flight.task.cancel()
