"""Places in the batch of an engine with a scheduler of its own: vLLM and SGLang.

Such an engine starts requests in their order of arrival and shares nothing among clients. So it is
given no more requests than it has places (`max_num_seqs`), and the others wait here:

- A place that is free goes to a client within its share (`inlay.engine.fairness`), in turn; where
  there is none, to the others in turn. A client alone gets all places.
- Where a client within its share waits and no place is free, a sequence of a client beyond its
  share is preempted: the latest that can be resumed. It is aborted in the engine and waits again,
  first of its client's, with its output so far as `prior_output`. Then it has a turn: it is not
  preempted again before it has made `PROTECTED_TOKENS` tokens.
- Sequences that cannot be resumed may not take the last place, but for a client's first: so one
  place always comes back.

Probes do not wait: the engine is started with one place more, which is theirs.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Protocol

from inlay.base.fair_queue import FairQueue
from inlay.engine.fairness import PROTECTED_TOKENS, SequencePages, excess, shares_of_places
from inlay.messages.priority import FIRST
from inlay.messages.request import Request

PROBES = 1
"""Places that the engine has beside those of clients."""


class Tracker(Protocol):
    """A request, and how far it is."""

    @property
    def request(self) -> Request:
        """As it was sent."""

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""


class EngineSlot:
    """One request's place, or its wait for one.

    Attributes:
        client: of the request.
        order: (priority, arrival), lower first; unique.
        granted: True once it has its place; False once it has left without one.
        waited_seconds: time it waited for its first place.
        num_preemptions: times its place was taken back.
        resumable: its output goes on as it would have, from a `prior_output`.
        preempt: aborts it in the engine.
    """

    def __init__(
        self,
        tracker: Tracker,
        arrival: int,
        *,
        resumable: bool,
        preempt: Callable[[], None],
    ) -> None:
        self.client = tracker.request.client
        self.order = (tracker.request.priority, arrival)
        self._loop = asyncio.get_running_loop()
        self._entered = self._loop.time()
        self.granted: asyncio.Future[bool] = self._loop.create_future()
        self.waited_seconds = 0.0
        self.num_preemptions = 0
        self.resumable = resumable
        self.preempt = preempt
        self._tracker = tracker
        self._protected_until = 0

    @property
    def is_protected(self) -> bool:
        """True if it was preempted, and has not made `PROTECTED_TOKENS` tokens since."""
        return self._tracker.num_tokens < self._protected_until

    def grant(self) -> None:
        """It has its place."""
        if not self.num_preemptions:
            self.waited_seconds = self._loop.time() - self._entered
        self.granted.set_result(True)

    def end_turn(self) -> bool:
        """Return True if its turn has ended since the last call."""
        if not self._protected_until or self.is_protected:
            return False
        self._protected_until = 0
        return True

    def requeue(self) -> None:
        """Wait for another place after a preemption."""
        self.granted = self._loop.create_future()
        self.num_preemptions += 1
        self._protected_until = self._tracker.num_tokens + PROTECTED_TOKENS


class EngineSlots:
    """The places of one engine, and the requests that wait for them; on the event loop.

    Attributes:
        total: places for clients.
        num_preemptions: of all requests since the start.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.num_preemptions = 0
        self._arrivals = count()
        self._queue: FairQueue[EngineSlot] = FairQueue()
        self._waiting: Counter[str | None] = Counter()
        self._running: set[EngineSlot] = set()
        self._held: Counter[str | None] = Counter()
        self._yielding: set[EngineSlot] = set()

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Requests that have a place, probes not counted."""
        return len(self._running)

    def enter(
        self, tracker: Tracker, *, resumable: bool, preempt: Callable[[], None]
    ) -> EngineSlot:
        """Have a request wait for a place; `leave` when it has ended.

        Args:
            tracker: of the request.
            resumable: its output goes on as it would have, from a `prior_output`.
            preempt: aborts the request in the engine; `put_back` once it is out of it.
        """
        place = EngineSlot(tracker, next(self._arrivals), resumable=resumable, preempt=preempt)
        if place.order[0] <= FIRST:
            place.grant()
            return place
        self._waiting[place.client] += 1
        self._queue.push(place, place.client, place.order[0])
        self._assign()
        return place

    def leave(self, place: EngineSlot) -> None:
        """A request has ended, and is out of the engine if it was in it."""
        self.stop_waiting(place)
        if place in self._running:
            self._free(place)
            self._assign()

    def stop_waiting(self, place: EngineSlot | None) -> None:
        """A request waits no more, if it did: it has ended before it had a place."""
        if place is not None and not place.granted.done():
            self._queue.remove(place, place.client, place.order[0])
            self._count_out(place)
            place.granted.set_result(False)

    def put_back(self, place: EngineSlot) -> None:
        """A preempted request is out of the engine, and waits again."""
        self._free(place)
        place.requeue()
        self._waiting[place.client] += 1
        self._queue.put_back(place, place.client, place.order[0])
        self._assign()

    def note_progress(self, place: EngineSlot) -> None:
        """A request has made tokens: its turn may have ended."""
        if place.end_turn():
            self._reclaim()

    def _assign(self) -> None:
        while self._queue and len(self._running) < self.total:
            place = self._take_next()
            if place is None:
                break
            self._count_out(place)
            self._held[place.client] += 1
            self._running.add(place)
            place.grant()
        self._reclaim()

    def _take_next(self) -> EngineSlot | None:
        """The next to have a place; None where the last place is kept."""
        best, firsts = self._queue.first().order[0], self._firsts()
        kept_from = self._kept_from()
        kept_from |= {first.client for first in firsts if first.order[0] > best}
        beyond = {client for client in self._held if not self._is_within_share(client)}
        for without in (kept_from | beyond, kept_from):
            with suppress(IndexError):
                return self._queue.take(without)
        return None

    def _kept_from(self) -> set[str | None]:
        """Clients whose next request may not have the last place that could come back."""
        if self.total == 1 or sum(not place.resumable for place in self._running) < self.total - 1:
            return set()
        return {
            first.client
            for first in self._firsts()
            if first.client in self._held and not first.resumable
        }

    def _firsts(self) -> list[EngineSlot]:
        """The next request of each client that waits."""
        firsts = (self._queue.first_of(client) for client in self._waiting)
        return [first for first in firsts if first is not None]

    def _is_within_share(self, client: str | None) -> bool:
        """Return True if a client may have one place more and be within its share."""
        held, clients = self._held[client], len(self._held | self._waiting)
        return not held or not excess(held + 1, self.total, clients)

    def _reclaim(self) -> None:
        """Preempt, for each client that waits within its share, one sequence beyond another's."""
        if len(self._running) < self.total:
            return
        kept = sorted(self._running - self._yielding, key=lambda place: place.order)
        worst = max((place.order[0] for place in kept), default=0)
        wanting = [
            (first.order[0], not within, first.order[1], first)
            for first in self._firsts()
            if (within := self._is_within_share(first.client)) or first.order[0] < worst
        ]
        # Where none yields to one of these, none yields to those behind it.
        for *_, first in sorted(wanting, key=lambda entry: entry[:3])[len(self._yielding) :]:
            clients = len(self._held | self._waiting)
            shares = shares_of_places(self.total, clients, kept)
            for place in shares.yielding(first, SequencePages()):
                if place.resumable and not place.is_protected:
                    break
            else:
                return
            kept.remove(place)
            self._yielding.add(place)
            self.num_preemptions += 1
            place.preempt()

    def _free(self, place: EngineSlot) -> None:
        self._running.remove(place)
        self._yielding.discard(place)
        self._held[place.client] -= 1
        if not self._held[place.client]:
            del self._held[place.client]

    def _count_out(self, place: EngineSlot) -> None:
        self._waiting[place.client] -= 1
        if not self._waiting[place.client]:
            del self._waiting[place.client]
