"""Requests that wait while all workers that could serve them are full."""

import asyncio
from collections import Counter
from collections.abc import Collection, Hashable
from itertools import count
from typing import Generic, TypeVar

from inlay.base.errors import OverloadedError, RateLimitedError
from inlay.base.fair_queue import FairQueue

L = TypeVar("L", bound=Hashable)
P = TypeVar("P")
R = TypeVar("R")


class QueueTicket(Generic[L, P, R]):
    """Requests that wait together.

    Attributes:
        line: those in one line wait for the same workers.
        payload: what is to be placed.
        num_requests: that it stands for.
        client: that sent them; clients take turns.
        priority: lower is sooner.
        number: in the order in which all came.
        waits: it is in its line.
        placed: the result, or the error, once there is one.
    """

    __slots__ = (
        "client", "line", "num_requests", "number", "payload", "placed", "priority", "waits",
    )  # fmt: skip

    def __init__(
        self, line: L, payload: P, *, num_requests: int, client: str | None, priority: int
    ) -> None:
        self.line = line
        self.payload = payload
        self.num_requests = num_requests
        self.client = client
        self.priority = priority
        self.number = 0
        self.waits = False
        self.placed: asyncio.Future[R] = asyncio.get_running_loop().create_future()


class AdmissionQueue(Generic[L, P, R]):
    """Bounded lines of tickets. It knows whose turn it is, and places nothing.

    Args:
        size: requests that may wait; one client may have half.

    Attributes:
        num_requests: requests that wait.
    """

    def __init__(self, size: int) -> None:
        self.num_requests = 0
        self._size = size
        self._lines: dict[L, FairQueue[QueueTicket[L, P, R]]] = {}
        self._requests_of: Counter[str | None] = Counter()
        self._requests_in: Counter[L] = Counter()
        self._numbers = count()

    @property
    def requests_in(self) -> dict[L, int]:
        """Requests that wait in each line where any do."""
        return dict(self._requests_in)

    def waits(self, line: L, client: str | None) -> bool:
        """True if a request of a client waits in a line."""
        return line in self._lines and self._lines[line].first_of(client) is not None

    def check(self, num_requests: int, client: str | None, retry_after: float) -> None:
        """Check that so many more may wait.

        Raises:
            RateLimitedError: so much of the client's waits that it has to wait with its asking.
            OverloadedError: too much waits.
        """
        size, waiting = self._size, self.num_requests
        share, own = max(1, size // 2), self._requests_of[client]
        if own and own + num_requests > share and waiting + num_requests <= size:
            raise RateLimitedError(
                f"{own} of your requests' choices wait for a worker; {num_requests} more would "
                f"pass your share of {share} (half of --router-queue-size)",
                retry_after=retry_after,
            )
        if waiting + num_requests > size and (waiting or not size):
            raise OverloadedError(
                f"all workers are full and {waiting} choices wait; {num_requests} more would pass "
                f"the limit of {size} (--router-queue-size)",
                retry_after=retry_after,
            )

    def push(self, ticket: QueueTicket[L, P, R]) -> None:
        """Add a ticket."""
        ticket.number, ticket.waits = next(self._numbers), True
        line = self._lines.setdefault(ticket.line, FairQueue())
        line.push(ticket, ticket.client, ticket.priority)
        self._count(ticket, ticket.num_requests)

    def next(self, stuck: Collection[L]) -> QueueTicket[L, P, R] | None:
        """Return the ticket whose turn it is, in lines that are not stuck; None without one."""
        heads = [line.first() for key, line in self._lines.items() if key not in stuck]
        return min(heads, key=lambda head: (head.priority, head.number), default=None)

    def next_of(self, client: str | None, stuck: Collection[L]) -> QueueTicket[L, P, R] | None:
        """Return a client's first ticket in a line that is not stuck; None without one."""
        firsts = (line.first_of(client) for key, line in self._lines.items() if key not in stuck)
        return next((first for first in firsts if first is not None), None)

    def take(self, ticket: QueueTicket[L, P, R]) -> None:
        """Remove the ticket whose turn it is: its client's next turn is after the others'."""
        self._lines[ticket.line].take()
        self._left(ticket)

    def remove(self, ticket: QueueTicket[L, P, R]) -> None:
        """Remove a ticket, if it waits."""
        if ticket.waits:
            self._lines[ticket.line].remove(ticket, ticket.client, ticket.priority)
            self._left(ticket)

    def _left(self, ticket: QueueTicket[L, P, R]) -> None:
        ticket.waits = False
        if not self._lines[ticket.line]:
            del self._lines[ticket.line]
        self._count(ticket, -ticket.num_requests)

    def _count(self, ticket: QueueTicket[L, P, R], change: int) -> None:
        self.num_requests += change
        self._requests_of[ticket.client] += change
        self._requests_in[ticket.line] += change
        if not self._requests_of[ticket.client]:
            del self._requests_of[ticket.client]
        if not self._requests_in[ticket.line]:
            del self._requests_in[ticket.line]
