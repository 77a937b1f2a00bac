"""Places requests: what `decide` says is sent, and what has no room waits for its turn."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from inlay.base.errors import InlayError, OverloadedError
from inlay.messages.card import ModelCard
from inlay.messages.digest import Secret
from inlay.messages.priority import BACKGROUND
from inlay.messages.prompt import Media, Prompt
from inlay.messages.request import Request, Task
from inlay.messages.routing import routing_chain
from inlay.router.admission_queue import AdmissionQueue, QueueTicket
from inlay.router.background import SECONDS
from inlay.router.decide import Ask, Refuse, Wait, decide
from inlay.router.fleet import Fleet
from inlay.router.handover import is_divisible
from inlay.router.index import Keys, keys_of
from inlay.router.resume import ResumingStream
from inlay.router.sending import Attempt, GoneError, Order, Sender, Started, cancel
from inlay.router.settings import RouterSettings
from inlay.router.snapshot import Pool, PoolKey
from inlay.transport.api import Worker

_LONG = 8192
"""Positions of a prompt from which on its chain is made off the event loop."""
_REMEMBERED_SECONDS = 10.0
_LONGEST_RETRY = 60.0


class WaitingLine(NamedTuple):
    """Key of requests that wait for the same workers."""

    pool: PoolKey
    adapter: str | None
    rows: bool


_Ticket: TypeAlias = QueueTicket[WaitingLine, Order, list[Started]]


class Dispatcher:
    """Sends requests to workers, and those that wait as soon as there is room.

    Nothing but `submit` and `_run` places requests, and neither within the other: whatever ends,
    joins or leaves only marks that there may be room.

    Args:
        fleet: the pools.
        equivalent_workers: the ready workers that would answer a request as the one with this card.
        refused: the error of a request for this model that no worker could have.
        settings: of the router.
        secret: of the namespace. Without it caches are not considered.
        clock: monotonic seconds.

    Attributes:
        stats: counters of its decisions.
        waiting: requests that wait.
    """

    def __init__(
        self,
        fleet: Fleet,
        equivalent_workers: Callable[[ModelCard, Request], Sequence[Worker]],
        refused: Callable[[str, str | None, Refuse], InlayError],
        settings: RouterSettings,
        secret: Secret | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sender = Sender(fleet, self._released, clock)
        self.stats = self._sender.stats
        self._equivalent_workers = equivalent_workers
        self.waiting: AdmissionQueue[WaitingLine, Order, list[Started]] = AdmissionQueue(
            settings.router_queue_size
        )
        self._fleet = fleet
        self._refused = refused
        self._timeout = settings.router_queue_timeout
        self._secret = secret
        self._clock = clock
        self._rate = _Rate(clock)
        self._placing = False
        self._marked = False
        self._freed: dict[str | None, None] = {}
        self._watching: asyncio.Task[None] | None = None
        self._later: asyncio.TimerHandle | None = None

    async def submit(
        self,
        name: str,
        key: PoolKey,
        requests: Sequence[Request],
        *,
        session: str | None = None,
        failed_on: set[str] | None = None,
        admitted: bool = False,
    ) -> list[ResumingStream]:
        """Send requests to one worker of a pool, once one has room.

        Arguments and errors as of `Router.send`.
        """
        first = requests[0]
        failed = set[str]() if failed_on is None else failed_on
        pool = self._fleet.of(key)
        keys = await self._keys(pool, first) if len(pool.seated) > 1 else None
        order = Order(name, key, requests, failed, session, keys, self._clock())
        if self._marked:
            self._run()
        started = None
        if not (self.waiting.num_requests and self._waits_before(order)):
            started = self._place(order)
        if started is None:
            started = await self._wait(order, admitted=admitted)
        streams: list[ResumingStream] = []
        for request, sent, handover in started:
            streams.append(ResumingStream(request, sent, self, handover, failed))
        return streams

    def send_again(
        self, workers: Sequence[Worker], request: Request, holder: ModelCard | None
    ) -> Attempt:
        """Send a further attempt to one of some workers, without waiting: it has had its turn.

        `holder` is of the worker that has the pages of the attempt before.

        Raises:
            OverloadedError: they are gone.
        """
        card = workers[0].card
        key = self._fleet.key_of(card)
        chain = self._chain(self._fleet.of(key), request)
        started = self._place(
            Order(
                card.name,
                key,
                [request],
                set(),
                keys=None if chain is None else chain(),
                only=[worker.id for worker in workers],
                holder=holder,
            )
        )
        if started is None:
            raise self._refused(card.name, None, Refuse("none"))
        return started[0].sent

    def equivalent_workers(self, card: ModelCard, request: Request) -> Sequence[Worker]:
        """The ready workers that would answer a request as the one with this card."""
        return self._equivalent_workers(card, request)

    def close(self) -> None:
        """Watch for nothing more."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        if self._later is not None:
            self._later.cancel()
            self._later = None

    # Waiting.

    def _waits_before(self, order: Order) -> bool:
        """True if a request has to wait: its client's others do, or any do and it is background."""
        line, first = self._line(order), order.requests[0]
        if first.priority >= BACKGROUND:
            return line in self.waiting.requests_in
        return self.waiting.waits(line, first.client)

    def _line(self, order: Order) -> WaitingLine:
        first = order.requests[0]
        rows = self._fleet.of(order.pool).differ_in_rows and first.has_embeds
        return WaitingLine(order.pool, first.adapter, rows)

    async def _wait(self, order: Order, *, admitted: bool) -> list[Started]:
        first, number = order.requests[0], len(order.requests)
        if not admitted:
            self.waiting.check(number, first.client, self.retry_after())
        ticket: _Ticket = QueueTicket(
            self._line(order),
            order,
            num_requests=number,
            client=first.client,
            priority=first.priority,
        )
        self.waiting.push(ticket)
        if self._watching is None and not self._fleet.watching:
            self._watching = asyncio.create_task(self._watch())
        timer = None
        if self._timeout is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(self._timeout, self._expire, ticket, self._timeout)
        try:
            return await ticket.placed
        except asyncio.CancelledError:
            if ticket.placed.cancelled():
                self.waiting.remove(ticket)
            elif ticket.placed.exception() is None:
                cancel(ticket.placed.result())
            raise
        finally:
            if timer is not None:
                timer.cancel()
            if not self.waiting.num_requests:
                self.close()

    async def _watch(self) -> None:
        """While requests wait, watch for workers that come, wake up or leave."""
        while True:
            await self._fleet.changed()
            self.mark()

    def _expire(self, ticket: _Ticket, timeout: float) -> None:
        if not ticket.placed.done():
            self.waiting.remove(ticket)
            ticket.placed.set_exception(
                OverloadedError(
                    f"all workers were full for {timeout:g} s", retry_after=self.retry_after()
                )
            )

    def retry_after(self) -> float:
        """Seconds until what waits has been placed, going by the last seconds.

        Whole, from 1 to 60.
        """
        rate = self._rate.count()
        if not rate:
            return 1.0
        return min(_LONGEST_RETRY, max(1.0, math.ceil((self.waiting.num_requests + 1) / rate)))

    def mark(self, *clients: str | None) -> None:
        """Note that there may be room, and that these clients run fewer requests than before.

        It places nothing: what is waiting is placed by the event loop's next turn, or by who comes
        before that.
        """
        if not self.waiting.num_requests:
            return
        self._freed |= dict.fromkeys(clients)
        if not self._marked:
            self._marked = True
            asyncio.get_running_loop().call_soon(self._run)

    def _released(self, client: str | None) -> None:
        # What a placing has booked and drops again leaves no more room than there was.
        if not self._placing:
            self._rate.count(1)
            if self.waiting.num_requests:
                self.mark(client)

    def _run(self) -> None:
        """Place waiting requests in turn as long as there is room, then those of freed clients."""
        if self._placing:
            raise RuntimeError("what waits is placed by what placing another calls")
        if not self._marked:
            return
        self._marked = False
        freed, self._freed = self._freed, {}
        stuck = set[WaitingLine]()
        while (ticket := self.waiting.next(stuck)) is not None:
            if not self._settle(ticket):
                stuck.add(ticket.line)
            elif ticket.waits:
                self.waiting.take(ticket)
        for client in freed:
            # It may have room that others lack.
            stuck = set()
            while (ticket := self.waiting.next_of(client, stuck)) is not None:
                if self._settle(ticket):
                    self.waiting.remove(ticket)
                else:
                    stuck.add(ticket.line)

    def _settle(self, ticket: _Ticket) -> bool:
        """True if a ticket no longer waits: it is placed, cannot be, or its owner left."""
        if ticket.placed.done():
            self.waiting.remove(ticket)
            return True
        try:
            started = self._place(ticket.payload)
        except Exception as error:  # it is that request's alone
            ticket.placed.set_exception(error)
            return True
        if started is not None:
            ticket.placed.set_result(started)
        return started is not None

    # Placing.

    def _place(self, order: Order) -> list[Started] | None:
        """Send the requests now; None where no worker has room.

        A worker that turns out to be gone is not chosen again, so there are at most as many tries
        as workers.

        Raises:
            NotFoundError, OverloadedError: no worker could have them.
            DeadlineExceededError: their time is over.
        """
        if self._placing:
            raise RuntimeError("a request is placed by what placing another calls")
        self._placing = True
        try:
            pool = self._fleet.of(order.pool)
            if not self._may_run(pool, order):
                return None
            ask = self._ask(pool, order)
            while True:
                decision = decide(pool.view(), ask)
                if isinstance(decision, Wait):
                    return None
                if isinstance(decision, Refuse):
                    raise self._refused(order.name, ask.adapter, decision)
                try:
                    return self._sender.start(pool, decision, ask, order)
                except GoneError as error:
                    pool.set_gone(error.member)
                    self._fleet.look_again()
        finally:
            self._placing = False

    def _may_run(self, pool: Pool, order: Order) -> bool:
        """False for background requests that the pool does not run beside others now."""
        if order.requests[0].priority < BACKGROUND or order.only is not None:
            return True
        others = pool.num_own - pool.background.running
        if pool.background.admits(len(order.requests), others, pool.num_slots):
            return True
        if self._later is None:
            self._later = asyncio.get_running_loop().call_later(SECONDS, self._look_again)
        return False

    def _look_again(self) -> None:
        """Note that the window of background requests may be wider, by time alone."""
        self._later = None
        self.mark()

    def _ask(self, pool: Pool, order: Order) -> Ask:
        first, card = order.requests[0], pool.card
        work: int | None = getattr(first.params, "work", None)
        return Ask(
            first.num_positions + len(first.prior_output) if work is None else work,
            order.keys,
            first.adapter,
            pool.differ_in_rows and first.has_embeds,
            order.session,
            first.client,
            order.only,
            order.failed_on,
            order.only is not None,
            pool.has_prefill_workers
            and order.only is None
            and len(order.requests) == 1
            and card is not None
            and is_divisible(first, card),
            _media(first.prompt) if pool.encoders and first.task is Task.GENERATE else {},
            first.salt,
            order.holder,
            first.priority >= BACKGROUND,
        )

    # Block keys.

    async def _keys(self, pool: Pool, request: Request) -> Keys | None:
        """Block keys of a prompt, if the choice needs them."""
        chain = self._chain(pool, request)
        if chain is None:
            return None
        return chain() if request.num_positions < _LONG else await asyncio.to_thread(chain)

    def _chain(self, pool: Pool, request: Request) -> Callable[[], Keys] | None:
        """Function that computes the block keys of a request, if the choice needs them."""
        secret, card = self._secret, pool.card
        if (
            secret is None
            or card is None
            or request.task is not Task.GENERATE
            or not pool.asks_for_chain(
                request.adapter, rows=pool.differ_in_rows and request.has_embeds
            )
        ):
            return None
        adapter = None if request.adapter is None else pool.content_id(request.adapter)
        return lambda: keys_of(
            routing_chain(
                request.prompt,
                card,
                secret,
                adapter=adapter,
                salt=request.salt,
                output=request.prior_output,
            )
        )


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


def _media(prompt: Prompt) -> Mapping[bytes, int]:
    """Rows of each item of media in a prompt by its digest."""
    return {
        segment.digest: segment.total for segment in prompt.segments if isinstance(segment, Media)
    }
