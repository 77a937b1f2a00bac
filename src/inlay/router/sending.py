"""Sends requests to the workers that were chosen for them, and books their load there."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from inlay.base.errors import (
    KV_LOST,
    DeadlineExceededError,
    EngineError,
    InlayError,
    OverloadedError,
)
from inlay.messages.card import ModelCard
from inlay.messages.digest import BLOCK_SIZE
from inlay.messages.priority import BACKGROUND
from inlay.messages.request import PORTS, Output, Request, Task
from inlay.router.decide import Ask, Part, Placement
from inlay.router.fleet import Fleet
from inlay.router.handover import first_part, prefetch_of, prompt_part, room_at
from inlay.router.index import Keys
from inlay.router.member import PoolMember
from inlay.router.snapshot import EncodeWorker, Pool, PoolKey
from inlay.transport.api import Stream, Worker

log = logging.getLogger(__name__)

_GROWS_BY = 16
"""Output tokens after which a sequence counts as longer: not each is worth the arithmetic."""


class Booking:
    """A request's part of its worker's load, from its beginning to its end.

    Args:
        pool: of the worker.
        member: the worker.
        prefill: positions it has to compute before the first token.
        length: positions of the prompt.
        client: that sent it.
        released: called with the client once it has ended.
        encoding: by item of its media, the worker that is to encode it, and its rows: these are
            load there until the prompt has been computed, or will not be.
        first_token: called when the first output token comes.
        background: of the background class; the pool's window counts it, and what others wait.
        clock: monotonic seconds.
    """

    __slots__ = (
        "_background",
        "_came",
        "_client",
        "_clock",
        "_decode",
        "_encoding",
        "_first_token",
        "_length",
        "_member",
        "_new",
        "_pool",
        "_prefill",
        "_released",
    )  # fmt: skip

    def __init__(
        self,
        pool: Pool,
        member: PoolMember,
        *,
        prefill: int,
        length: int,
        client: str | None,
        released: Callable[[str | None], None],
        encoding: Sequence[tuple[EncodeWorker, int]] = (),
        first_token: Callable[[], object] | None = None,
        background: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._member = member
        self._prefill = prefill
        self._length = length
        self._client = client
        self._released: Callable[[str | None], None] | None = released
        self._encoding = encoding
        self._first_token = first_token
        self._decode = self._new = 0
        self._background = background
        self._clock = clock
        self._came = 0.0
        if background:
            pool.background.began()
        elif pool.background.active:
            self._came = clock()
        pool.change(member, requests=1, prefill=prefill, client=client)
        for one, rows in encoding:
            one.pool.change(one.member, requests=1, prefill=rows, client=client)

    def take(self, outputs: Sequence[Output]) -> None:
        """Count the tokens of new outputs."""
        tokens = 0
        for output in outputs:
            tokens += len(output.token_ids)
        self.add(tokens)

    def add(self, tokens: int) -> None:
        """Count so many new tokens."""
        if self._released is None:
            return
        if tokens and self._pool.background.active and not self._background:
            before, self._came = self._came, self._clock()
            if before:
                waited = (self._came - before) / tokens
                self._pool.background.waited(waited, first=not self._decode)
        self._new += tokens
        if not self._decode and self._new:
            self._decode = self._length
            self._pool.change(self._member, prefill=-self._prefill, decode=self._length)
            self._prefill = 0
            if self._first_token is not None:
                self._first_token()
            if self._encoding:
                self._end_encoding()
        elif self._new >= _GROWS_BY:
            self._decode += self._new
            self._pool.change(self._member, decode=self._new)
            self._new = 0

    @property
    def has_begun(self) -> bool:
        """True once an output token has come."""
        return self._decode > 0

    def end(self) -> None:
        """Release the load. May be called again."""
        released, self._released = self._released, None
        if released is not None:
            if self._background:
                self._pool.background.ended()
            self._pool.change(
                self._member,
                requests=-1,
                prefill=-self._prefill,
                decode=-self._decode,
                client=self._client,
            )
            if self._encoding:
                self._end_encoding()
            released(self._client)

    def _end_encoding(self) -> None:
        for one, rows in self._encoding:
            one.pool.change(one.member, requests=-1, prefill=-rows, client=self._client)
        self._encoding = ()


class GivenUpError(OverloadedError):
    """The worker gave the request up by itself; it still has its pages."""


class Attempt:
    """One attempt: a worker, what it answers, and the load that it adds there until it ends.

    A prefill worker may have the prompt at the same time; the other's tokens are all that is shown.

    Attributes:
        failure: why the prefill worker gives no keys and values, or None. The attempt is stopped
            then.
    """

    __slots__ = ("_prompt", "_reading", "card", "failure", "load", "stream", "worker")

    def __init__(self, worker: Worker, stream: Stream, load: Booking) -> None:
        self.worker = worker
        self.card = worker.card
        self.stream = stream
        self.load = load
        self.failure: InlayError | None = None
        self._prompt: Attempt | None = None
        self._reading: asyncio.Task[None] | None = None

    def add_prompt(self, prompt: "Attempt") -> None:
        """A prefill worker has the prompt: the attempt ends with that part's failure."""
        self._prompt = prompt
        self._reading = asyncio.create_task(self._read(prompt))

    async def _read(self, prompt: "Attempt") -> None:
        try:
            async for outputs in prompt.stream:
                prompt.load.take(outputs)
                if outputs[-1].finish_reason == "abort":
                    raise GivenUpError("the prefill worker gave the request up", retry_after=1)
        except InlayError as error:
            self._fail(error)
        except Exception:
            # The decode worker must not wait for what nobody reads.
            log.exception("reading what a prefill worker answers failed")
            self._fail(EngineError("the prefill worker's answer could not be read"))
        finally:
            prompt.load.end()

    def _fail(self, error: InlayError) -> None:
        if not self.load.has_begun:
            self.failure = error
            self.stream.cancel()

    def to_blame(self, error: InlayError) -> str:
        """Return the id of the worker because of which the attempt ended with an error."""
        prompt = self._prompt
        if prompt is None or (self.failure is None and error.reason != KV_LOST):
            return self.worker.id
        return prompt.worker.id

    def end(self) -> None:
        """Release its load, and stop what is left of the prompt. May be called again."""
        self.load.end()
        if self._prompt is not None and self._reading is not None:
            self._reading.cancel()
            self._prompt.cancel()

    def cancel(self) -> None:
        """Stop the attempt; needs no answer."""
        self.stream.cancel()
        self.end()


class Handover:
    """A place at the worker that goes on with a request.

    Args:
        worker: that goes on.
        load: the request's part of its load, until it is sent there.
        prefetch: of the prompt's pages there, or None.

    Attributes:
        ticket: for the pages, once the prefill worker has given it; empty where it gives none.
    """

    def __init__(self, worker: Worker, load: Booking, prefetch: Stream | None = None) -> None:
        self.worker = worker
        self.ticket = b""
        self._load = load
        self._prefetch = prefetch

    def take(self, output: Output) -> Output:
        """Return the part of a prefill worker's output that is shown."""
        if not self.worker.card.kv_tickets:
            return output
        for payload in output.payloads:
            if payload.port == PORTS[Task.GENERATE]:
                self.ticket = bytes(payload.data.view)
        return replace(output, offset=0, token_ids=(), logprobs=(), payloads=())

    def end(self) -> None:
        """Free the place; the prefetch goes on. May be called again."""
        self._load.end()

    def cancel(self) -> None:
        """Free the place and stop the prefetch. May be called again."""
        self._load.end()
        if self._prefetch is not None:
            self._prefetch.cancel()


class Order(NamedTuple):
    """Requests of one prompt, which go to one worker together.

    Attributes:
        name: of the model, for errors.
        pool: of its workers.
        requests: at least one.
        failed_on: ids of workers that have failed at it; others go before them.
        session: that they belong to.
        keys: of the prompt's blocks, where the choice depends on caches.
        came: when, by the dispatcher's clock.
        only: ids of workers that may have it, full or not: it has had its turn. None for all.
        holder: card of a worker that has the pages of the attempt before, or None.
    """

    name: str
    pool: PoolKey
    requests: Sequence[Request]
    failed_on: set[str]
    session: str | None = None
    keys: Keys | None = None
    came: float | None = None
    only: Collection[str] | None = None
    holder: ModelCard | None = None


class Started(NamedTuple):
    """A request as it was sent, what it answers, and where it goes on after its prompt."""

    request: Request
    sent: Attempt
    handover: Handover | None = None

    def cancel(self) -> None:
        """Stop it; needs no answer."""
        self.sent.cancel()
        if self.handover is not None:
            self.handover.cancel()


class RouterStats:
    """Counters of one router, by the name of the model.

    Attributes:
        decisions: requests sent, by (model, True for a further attempt).
        looked_up: blocks of prompts that were looked up in the index of workers' caches.
        hits: blocks of these that the chosen worker had, as far as was known.
        handovers: prompts that a prefill worker computed for another.
    """

    def __init__(self) -> None:
        self.decisions: Counter[tuple[str, bool]] = Counter()
        self.looked_up: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()
        self.handovers: Counter[str] = Counter()


class GoneError(OverloadedError):
    """A worker was gone before it had the request."""

    def __init__(self, member: PoolMember, error: OverloadedError) -> None:
        super().__init__(error.message, retry_after=error.retry_after)
        self.member = member


class Sender:
    """Sends requests to the workers of a placement, all or none, and books their load there.

    Args:
        fleet: hears what was sent.
        released: called with the client of each request that has ended.
        clock: monotonic seconds.

    Attributes:
        stats: counters of what was sent.
    """

    def __init__(
        self,
        fleet: Fleet,
        released: Callable[[str | None], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats = RouterStats()
        self._fleet = fleet
        self._released = released
        self._clock = clock

    def start(self, pool: Pool, placement: Placement, ask: Ask, order: Order) -> list[Started]:
        """Send requests to the workers of a placement.

        Raises:
            GoneError: one of them is gone; none has any of the requests then.
            DeadlineExceededError: their time is over.
        """
        part, prompt = placement.part, placement.prompt
        requests = order.requests
        if requests[0].deadline is not None:
            requests = [self._with_waited(request, order) for request in requests]
        if prompt is None:
            started = self._send(pool, part, requests, ask)
        elif placement.together:
            started = self._send_together(pool, part, prompt, requests, ask)
        else:
            started = [self._send_then(pool, part, prompt, requests[0], ask)]
        pool.last = part.seat
        member = pool.seated[part.seat if prompt is None else prompt.seat]
        name = member.card.name
        self.stats.decisions[name, order.only is not None] += len(started)
        if prompt is not None:
            self.stats.handovers[name] += len(started)
        if order.keys is not None:
            self.stats.looked_up[name] += len(order.keys)
            self.stats.hits[name] += part.cached // BLOCK_SIZE
            self._fleet.sent(pool, member, order.keys)
        return started

    def _send_then(
        self, pool: Pool, part: Part, prompt: Part, request: Request, ask: Ask
    ) -> Started:
        """Send a request's first part to a prefill worker, and book the rest at another."""
        card, worker = pool.seated[prompt.seat].card, pool.seated[part.seat].worker
        (first,) = self._send(pool, prompt, [first_part(request, card)], ask)
        booking = Booking(
            pool, pool.seated[part.seat], prefill=0, length=ask.length, client=request.client,
            released=self._released, background=request.priority >= BACKGROUND,
        )  # fmt: skip
        # With a ticket nothing can be fetched before all is computed.
        address = None if card.kv_tickets else card.address
        try:
            prefetch = None if address is None else worker.send(prefetch_of(request, address))
        except OverloadedError:
            prefetch = None  # it is gone; another will go on
        return Started(request, first.sent, Handover(worker, booking, prefetch))

    def _send_together(
        self, pool: Pool, part: Part, prompt: Part, requests: Sequence[Request], ask: Ask
    ) -> list[Started]:
        """Send requests to a prefill worker and to a decode worker at the same time."""
        started: list[Started] = []
        try:
            for request in requests:
                asked = replace(request, kv_room=room_at(pool.seated[prompt.seat].card))
                (first,) = self._send(pool, prompt, [prompt_part(asked)], ask)
                try:
                    (rest,) = self._send(pool, part, [asked], ask)
                except BaseException:
                    first.cancel()
                    raise
                rest.sent.add_prompt(first.sent)
                started.append(Started(replace(rest.request, kv_room=None), rest.sent))
        except BaseException:
            cancel(started)
            raise
        return started

    def _send(self, pool: Pool, part: Part, requests: Sequence[Request], ask: Ask) -> list[Started]:
        """Send requests to one worker, and book them there."""
        member, work = pool.seated[part.seat], part.work
        if requests[0].ticket:
            work = round(work * min(1.0, pool.price.value))
        measured = None
        if len(pool.seated) > 1 or requests[0].ticket:
            measured = self._measured(pool, part, requests[0], ask)
        started: list[Started] = []
        try:
            for request in requests:
                if request.sources or part.sources:
                    request = replace(request, sources=part.sources)
                try:
                    stream = member.worker.send(request)
                except OverloadedError as error:
                    raise GoneError(member, error) from error
                # The prompt is computed once for all of them, and so are its images.
                booking = Booking(
                    pool, member, prefill=0 if started else work, length=ask.length,
                    client=request.client, released=self._released,
                    encoding=() if started else part.encoding,
                    first_token=None if part.encoding else measured,
                    background=request.priority >= BACKGROUND, clock=self._clock,
                )  # fmt: skip
                started.append(Started(request, Attempt(member.worker, stream, booking)))
        except BaseException:
            cancel(started)
            raise
        return started

    def _measured(
        self, pool: Pool, part: Part, request: Request, ask: Ask
    ) -> Callable[[], object] | None:
        """Function that is called at the first token, and measures what the prompt has cost."""
        fetches = ask.holder is not None or bool(request.ticket)
        from_others = bool(part.holders or request.ticket)
        # What is read from a tier takes another time than either, and a worker looks there first.
        # In a room both wait for one another.
        member, positions, price = pool.seated[part.seat], ask.length - part.cached, pool.price
        reads = member.tiers if from_others else part.work < positions
        if member.load.prefill or (reads and not (from_others and fetches)) or member.card.kv_rooms:
            return None
        began = self._clock()
        if not from_others:
            return lambda: price.computed(positions, self._clock() - began)
        # A worker computes what it finds slow to fetch: then that is the price.
        fetched = positions if fetches else part.fetchable
        return lambda: price.fetched(fetched, self._clock() - began, positions - fetched)

    def _with_waited(self, request: Request, order: Order) -> Request:
        """A request without the seconds that it has waited.

        Raises `DeadlineExceededError` when its time is over.
        """
        waited = 0.0 if order.came is None else self._clock() - order.came
        if request.deadline is None:
            return request
        if request.deadline <= waited:
            raise DeadlineExceededError(
                f"all workers were full for the {request.deadline:g} s that were left"
            )
        return replace(request, deadline=request.deadline - waited)


def cancel(started: Sequence[Started]) -> None:
    """Stop requests; needs no answer."""
    for one in started:
        one.cancel()
