"""Computations that go on when a caller leaves: one for equal keys at a time, or shielded.

Of single flights all callers get the result.
"""

import asyncio
import threading
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Hashable,
    Iterable,
    Sequence,
)
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

from inlay.base.pace import wanted_by_others

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class _Flight(Generic[K, T]):
    """A running computation of some keys, and the number of its callers."""

    __slots__ = ("keys", "task", "waiting")

    def __init__(self, keys: Sequence[K], task: "asyncio.Task[dict[K, T]]") -> None:
        self.keys = keys
        self.task = task
        self.waiting = 0


class SingleFlight(Generic[K, T]):
    """Running computations in one event loop, by key.

    Each is a task of its own, which no caller ends but the last of all its keys: a caller that is
    cancelled never takes the others' result along.

    Args:
        finishes: a computation whose last caller left goes on, for callers to come. Without it,
            it is cancelled.
    """

    __slots__ = ("_finishes", "_flights")

    def __init__(self, *, finishes: bool = False) -> None:
        self._finishes = finishes
        self._flights: dict[K, _Flight[K, T]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, key: K) -> bool:
        return key in self._flights

    async def run(self, key: K, compute: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `compute`, or of the running one of an equal key; errors likewise.

        The last caller to be cancelled returns when the computation that it ends has ended, so
        resources that it holds for it are held until then.
        """

        async def one(_: Sequence[K]) -> Sequence[T]:
            return [await compute()]

        flight = self._flights.get(key) or self._begin([key], one)
        async with self._joined([flight]):
            return (await shielded(flight.task))[key]

    async def run_many(
        self,
        keys: Iterable[K],
        compute: Callable[[Sequence[K]], Coroutine[Any, Any, Sequence[T]]],
    ) -> dict[K, T]:
        """The results of `keys`, some of which may be running for other callers.

        Of these, those that fail are left out: an error is that of the caller who began.

        Args:
            keys: any number.
            compute: returns the results of some of them, in order.

        Raises:
            BaseException: any error of `compute`.
        """
        keys = dict.fromkeys(keys)
        new = [key for key in keys if key not in self._flights]
        own = self._begin(new, compute) if new else None
        # The own one comes first: its error need not wait for the others.
        flights = dict.fromkeys(self._flights[key] for key in (*new, *keys))
        found: dict[K, T] = {}
        async with self._joined(flights):
            for flight in flights:
                try:
                    computed = await shielded(flight.task)
                except Exception:
                    if flight is own:
                        raise
                else:
                    found |= computed
        return {key: found[key] for key in keys if key in found}

    def _begin(
        self, keys: Sequence[K], compute: Callable[[Sequence[K]], Coroutine[Any, Any, Sequence[T]]]
    ) -> _Flight[K, T]:
        flight = _Flight(keys, asyncio.create_task(self._computed(keys, compute)))
        self._flights |= dict.fromkeys(keys, flight)
        return flight

    async def _computed(
        self, keys: Sequence[K], compute: Callable[[Sequence[K]], Coroutine[Any, Any, Sequence[T]]]
    ) -> dict[K, T]:
        try:
            return dict(zip(keys, await compute(keys), strict=True))
        finally:
            # At once: whoever comes now starts anew.
            self._drop(keys, asyncio.current_task())

    @asynccontextmanager
    async def _joined(self, flights: Collection[_Flight[K, T]]) -> AsyncIterator[None]:
        """Wait for computations within; those that nobody else waits for end with the block."""
        for flight in flights:
            flight.waiting += 1
        try:
            yield
        finally:
            ended = []
            for flight in flights:
                flight.waiting -= 1
                if not (flight.waiting or self._finishes or flight.task.done()):
                    # Before waiting for the end: no caller may join a cancelled computation.
                    self._drop(flight.keys, flight.task)
                    flight.task.cancel()
                    ended.append(flight.task)
            if ended:
                await asyncio.gather(*ended, return_exceptions=True)

    def _drop(self, keys: Sequence[K], task: "asyncio.Task[Any] | None") -> None:
        """Forget a computation; once it is abandoned, others may have its keys."""
        for key in keys:
            flight = self._flights.get(key)
            if flight is not None and flight.task is task:
                del self._flights[key]

    def cancel(self) -> "list[asyncio.Task[dict[K, T]]]":
        """Cancel all computations and their callers; return the tasks that end now."""
        tasks = [flight.task for flight in dict.fromkeys(self._flights.values())]
        self._flights.clear()
        for task in tasks:
            task.cancel()
        return tasks


class Paced(Generic[T]):
    """Results of a computation that begins at most once in a while, for all who ask meanwhile.

    Whoever asks gets a result of a computation that begins afterwards; it may begin later.

    Args:
        compute: makes the result.
        seconds: from the begin of one computation to the next.
    """

    __slots__ = ("_compute", "_due", "_next", "_seconds")

    def __init__(self, compute: Callable[[], Coroutine[Any, Any, T]], seconds: float) -> None:
        self._compute = compute
        self._seconds = seconds
        self._due = 0.0
        self._next: asyncio.Task[T] | None = None

    async def result(self) -> T:
        """The next result; errors likewise. It is made even if nobody waits for it any more."""
        if self._next is None:
            self._next = asyncio.create_task(self._made())
        return await shielded(self._next)

    async def _made(self) -> T:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._due - loop.time())
        self._due = loop.time() + self._seconds
        self._next = None
        return await self._compute()


class ThreadSingleFlight(Generic[K, T]):
    """Running computations in threads, by key."""

    __slots__ = ("_lock", "_under_way")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[K, Future[T]] = {}

    def run(self, key: K, compute: Callable[[], T]) -> T:
        """The result of `compute`, run here or by the thread that came first with an equal key.

        Its errors likewise. It goes on when the caller of the thread that computes leaves.
        """
        with self._lock:
            flight = self._under_way.get(key)
            leads = flight is None
            if flight is None:
                flight = self._under_way[key] = Future()
        if not leads:
            return flight.result()
        try:
            with wanted_by_others():
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
