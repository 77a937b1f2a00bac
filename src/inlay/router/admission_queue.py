"""Requests that wait while all workers that could serve them are full."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable
from itertools import count
from typing import Generic, TypeVar

from inlay.errors import OverloadedError, RateLimitedError
from inlay.fair_queue import FairQueue
from inlay.router.settings import RouterSettings

L = TypeVar("L", bound=Hashable)
P = TypeVar("P")

_REMEMBERED_SECONDS = 10.0
_LONGEST_RETRY = 60.0


class _Rate:
    """Rate of recent events, as an exponentially decaying mean."""

    __slots__ = ("_at", "_clock", "_value")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._at = clock()
        self._value = 0.0

    def count(self, number: int = 0) -> float:
        """It happened so many times more. Times a second."""
        now = self._clock()
        self._value *= math.exp((self._at - now) / _REMEMBERED_SECONDS)
        self._value += number / _REMEMBERED_SECONDS
        self._at = now
        return self._value


class _Ticket(Generic[L, P]):
    """Someone who waits."""

    __slots__ = (
        "client", "num_requests", "number", "place", "placed", "priority", "queue", "waits",
    )  # fmt: skip

    def __init__(
        self,
        line: L,
        number: int,
        place: Callable[[], P | None],
        *,
        num_requests: int,
        client: Hashable,
        priority: int,
    ) -> None:
        self.queue = line
        self.number = number
        self.place = place
        self.num_requests = num_requests
        self.client = client
        self.priority = priority
        self.waits = True
        self.placed: asyncio.Future[P] = asyncio.get_running_loop().create_future()


class AdmissionQueue(Generic[L, P]):
    """Bounded queues of requests, one for each set of workers that may serve them.

    A request that is placed gets a `P`.

    Args:
        settings: of the router.
        undo: gives a place back whose request was cancelled before it took it.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        settings: RouterSettings,
        undo: Callable[[P], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._undo = undo
        self._lines: dict[L, FairQueue[_Ticket[L, P]]] = {}
        self._requests_of: Counter[Hashable] = Counter()
        self._requests_in: Counter[L] = Counter()
        self._ended = _Rate(clock)
        self._numbers = count()
        self._marked = False
        self._freed: dict[Hashable, None] = {}
        self._placing = False

    @property
    def num_requests(self) -> int:
        """Requests that wait."""
        return self._requests_of.total()

    @property
    def queues(self) -> dict[L, int]:
        """Requests that wait in each line where any do."""
        return dict(self._requests_in)

    def waits(self, line: L, client: Hashable) -> bool:
        """Return True if a request of a client waits in a queue."""
        return line in self._lines and self._lines[line].first_of(client) is not None

    async def wait(
        self,
        line: L,
        place: Callable[[], P | None],
        *,
        num_requests: int,
        client: Hashable,
        priority: int,
        admitted: bool = False,
    ) -> P:
        """Wait for a place.

        Args:
            line: those in one line want the same kind of place.
            place: takes one; None where there is none.
            num_requests: that want it.
            client: clients take turns.
            priority: lower is sooner.
            admitted: they may wait however many do.

        Raises:
            RateLimitedError: so much of the client's waits that it has to wait with its asking.
            OverloadedError: too much waits, or it has waited too long.
            Exception: of `place`.
        """
        if not admitted:
            self._check(num_requests, client)
        ticket = _Ticket(
            line,
            next(self._numbers),
            place,
            num_requests=num_requests,
            client=client,
            priority=priority,
        )
        self._lines.setdefault(line, FairQueue()).push(ticket, client, priority)
        self._requests_of[client] += num_requests
        self._requests_in[line] += num_requests
        timeout = self._settings.router_queue_timeout
        timer = (
            None
            if timeout is None
            else asyncio.get_running_loop().call_later(timeout, self._expire, ticket, timeout)
        )
        try:
            return await ticket.placed
        except asyncio.CancelledError:
            if ticket.placed.cancelled():
                self._leave(ticket)
            elif ticket.placed.exception() is None:
                self._undo(ticket.placed.result())
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _check(self, num_requests: int, client: Hashable) -> None:
        size, waiting = self._settings.router_queue_size, self.num_requests
        share = max(1, size // 2)
        own = self._requests_of[client]
        if own and own + num_requests > share and waiting + num_requests <= size:
            raise RateLimitedError(
                f"{own} of your requests' choices wait for a worker; {num_requests} more would "
                f"pass your share of {share} (half of --router-queue-size)",
                retry_after=self.retry_after(),
            )
        if waiting + num_requests > size and (waiting or not size):
            raise OverloadedError(
                f"all workers are full and {waiting} choices wait; {num_requests} more would pass "
                f"the limit of {size} (--router-queue-size)",
                retry_after=self.retry_after(),
            )

    def retry_after(self) -> float:
        """Seconds until what waits has been placed, going by the last seconds.

        Whole, from 1 to 60.
        """
        rate = self._ended.count()
        return (
            min(_LONGEST_RETRY, max(1.0, math.ceil((self.num_requests + 1) / rate)))
            if rate
            else 1.0
        )

    def _expire(self, ticket: _Ticket[L, P], timeout: float) -> None:
        if not ticket.placed.done():
            self._leave(ticket)
            ticket.placed.set_exception(
                OverloadedError(
                    f"all workers were full for {timeout:g} s", retry_after=self.retry_after()
                )
            )

    def _leave(self, ticket: _Ticket[L, P]) -> None:
        if ticket.waits:
            queue = self._lines[ticket.queue]
            queue.remove(ticket, ticket.client, ticket.priority)
            self._left(ticket, queue)

    def _left(self, ticket: _Ticket[L, P], queue: FairQueue[_Ticket[L, P]]) -> None:
        ticket.waits = False
        if not queue:
            del self._lines[ticket.queue]
        self._requests_in[ticket.queue] -= ticket.num_requests
        if not self._requests_in[ticket.queue]:
            del self._requests_in[ticket.queue]
        self._requests_of[ticket.client] -= ticket.num_requests
        if not self._requests_of[ticket.client]:
            del self._requests_of[ticket.client]

    def ended(self, num_requests: int = 1) -> None:
        """Count ended requests, for the estimate of waiting times; `mark` fills the room."""
        self._ended.count(num_requests)

    def mark(self, *clients: Hashable) -> None:
        """There may be room: place waiting requests soon, and those of clients that run fewer.

        What placing cancels may give room back, so this only notes it: the loop calls `settle`.
        """
        if not self._lines:
            return
        self._freed |= dict.fromkeys(clients)
        if not self._marked:
            self._marked = True
            asyncio.get_running_loop().call_soon(self.settle)

    def settle(self) -> None:
        """Place what `mark` has announced, before another takes the room."""
        if not self._marked:
            return
        self._marked = False
        freed, self._freed = self._freed, {}
        self.wake()
        for client in freed:
            self.call_client(client)

    def wake(self) -> None:
        """Place waiting requests in turn, as long as there is room."""
        stuck: set[L] = set()
        while True:
            heads = [
                (queue.first(), queue) for line, queue in self._lines.items() if line not in stuck
            ]
            if not heads:
                return
            ticket, queue = min(heads, key=lambda head: (head[0].priority, head[0].number))
            if not self._place(ticket):
                stuck.add(ticket.queue)
            elif ticket.waits:
                queue.take()
                self._left(ticket, queue)

    def call_client(self, client: Hashable) -> None:
        """Place requests of a client that runs fewer now: it may have room that others lack."""
        for line in [
            line for line, queue in self._lines.items() if queue.first_of(client) is not None
        ]:
            while self.waits(line, client):
                ticket = self._lines[line].first_of(client)
                if ticket is None or not self._place(ticket):
                    break
                self._leave(ticket)

    def _place(self, ticket: _Ticket[L, P]) -> bool:
        """True if a ticket no longer waits: it has a place, cannot have one, or its owner left."""
        if ticket.placed.done():
            self._leave(ticket)
            return True
        if self._placing:
            raise RuntimeError("a waiting request is placed by what placing another calls")
        self._placing = True
        try:
            placed = ticket.place()
        except Exception as error:  # it is that request's alone
            ticket.placed.set_exception(error)
            return True
        finally:
            self._placing = False
        if placed is not None:
            ticket.placed.set_result(placed)
        return placed is not None
