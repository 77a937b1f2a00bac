"""Placing of requests: a worker is chosen, and they are sent to it."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import chain, islice
from typing import NamedTuple

import msgspec

from inlay.card import Address, ModelCard
from inlay.digest import BLOCK_SIZE
from inlay.errors import DeadlineExceededError, OverloadedError
from inlay.request import PAGES, Diffusion, Request, Source
from inlay.router.fleet import Fleet
from inlay.router.halves import prompt_part, room_at
from inlay.router.handover import Handover, first_part, is_divisible, prefetch_of
from inlay.router.key_table import Keys
from inlay.router.load_reservation import LoadReservation
from inlay.router.pool import MAX_HOLDERS, Chosen, Pool
from inlay.router.resume import Sent


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


class _GoneError(OverloadedError):
    """A worker was gone before it had the request."""

    def __init__(self, worker_id: str, error: OverloadedError) -> None:
        super().__init__(error.message, retry_after=error.retry_after)
        self.worker_id = worker_id


class Placed(NamedTuple):
    """A request, what it answers, and where it goes on once its prompt is computed."""

    request: Request
    sent: Sent
    handover: Handover | None = None

    def cancel(self) -> None:
        """Stop it; needs no answer."""
        self.sent.cancel()
        if self.handover is not None:
            self.handover.cancel()


class Placing:
    """Sends requests to the workers that pools choose.

    Args:
        fleet: the pools.
        stats: counts what is sent.
        ended: called with the client of a request that has ended.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        fleet: Fleet,
        stats: RouterStats,
        ended: Callable[[str | None], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._stats = stats
        self._tell_ended = ended
        self._booking = False
        self._clock = clock

    def place(
        self,
        pool: Pool,
        requests: Sequence[Request],
        keys: Keys | None,
        session: str | None,
        waited: float,
        *,
        only: Collection[str] | None = None,
        avoid: Collection[str] = (),
        holder: ModelCard | None = None,
    ) -> list[Placed] | None:
        """Send the requests now; None where no worker has room.

        Workers that turn out to be gone are skipped, and those of `avoid`. With `only`, they go to
        one of these, even if it is full. `holder` is of the worker that has the pages of the
        attempt before.
        """
        self._booking = True
        try:
            return self._place(pool, requests, keys, session, waited, only, avoid, holder)
        finally:
            self._booking = False

    def _ended(self, client: str | None) -> None:
        # What a placing has booked and drops again leaves no more room than there was.
        if not self._booking:
            self._tell_ended(client)

    def _place(
        self,
        pool: Pool,
        requests: Sequence[Request],
        keys: Keys | None,
        session: str | None,
        waited: float,
        only: Collection[str] | None,
        avoid: Collection[str],
        holder: ModelCard | None,
    ) -> list[Placed] | None:
        first, card = requests[0], pool.card
        splits = (
            pool.has_prefill_workers
            and only is None
            and len(requests) == 1
            and card is not None
            and is_divisible(first, card)
        )
        length = _length(first)
        gone = set(avoid)
        while True:
            chosen = pool.choose(
                length,
                keys,
                adapter=first.adapter,
                rows=pool.needs_rows(first),
                session=session,
                only=only,
                avoid=gone,
                full_too=only is not None,
                splits=splits,
                client=first.client,
            )
            if chosen is None:
                return None
            member = chosen.member
            if chosen.prefiller is not None:
                member = chosen.prefiller.member
            try:
                if chosen.prefiller is None:
                    placed = self._send_to(pool, chosen, requests, length, waited, holder)
                elif member.card.kv_rooms:
                    placed = self._join(pool, chosen, chosen.prefiller, requests, length, waited)
                else:
                    placed = [self._divide(pool, chosen, chosen.prefiller, first, length, waited)]
            except _GoneError as error:
                gone.add(error.worker_id)
                self._fleet.look_again()
                continue
            model = member.card.name
            self._stats.decisions[model, only is not None] += len(placed)
            if keys is not None:
                self._stats.looked_up[model] += len(keys)
                self._stats.hits[model] += chosen.cached // BLOCK_SIZE
                self._fleet.sent(pool, member, keys)
            return placed

    def _divide(
        self,
        pool: Pool,
        chosen: Chosen,
        prefiller: Chosen,
        request: Request,
        length: int,
        waited: float,
    ) -> Placed:
        """Send a request's first part to a prefill worker, and take a place for the rest.

        Raises `_GoneError` when the prefill worker is gone.
        """
        part = first_part(request, prefiller.member.card)
        (placed,) = self._send_to(pool, prefiller, [part], length, waited)
        place = LoadReservation(
            pool,
            chosen.member,
            prefill=0,
            length=length,
            ended=self._ended,
            client=request.client,
        )
        self._stats.handovers[chosen.member.card.name] += 1
        request = _with_waited_deadline(request, waited)
        worker, card = chosen.member.worker, prefiller.member.card
        # With a ticket nothing can be fetched before all is computed.
        address = None if card.kv_tickets else card.address
        try:
            prefetch = None if address is None else worker.send(prefetch_of(request, address))
        except OverloadedError:
            prefetch = None  # it is gone; another will go on
        return Placed(request, placed.sent, Handover(worker, place, prefetch))

    def _join(
        self,
        pool: Pool,
        chosen: Chosen,
        prefiller: Chosen,
        requests: Sequence[Request],
        length: int,
        waited: float,
    ) -> list[Placed]:
        """Send requests to a prefill worker and to a decode worker at the same time.

        Raises `_GoneError` when either is gone; the other has none of them then.
        """
        placed: list[Placed] = []
        try:
            for request in requests:
                asked = msgspec.structs.replace(request, kv_room=room_at(prefiller.member.card))
                (prompt,) = self._send_to(pool, prefiller, [prompt_part(asked)], length, waited)
                try:
                    (rest,) = self._send_to(pool, chosen, [asked], length, waited)
                except BaseException:
                    prompt.cancel()
                    raise
                rest.sent.add_prompt(prompt.sent)
                placed.append(
                    Placed(msgspec.structs.replace(rest.request, kv_room=None), rest.sent)
                )
        except BaseException:
            cancel(placed)
            raise
        self._stats.handovers[chosen.member.card.name] += len(placed)
        return placed

    def _send_to(
        self,
        pool: Pool,
        chosen: Chosen,
        requests: Sequence[Request],
        length: int,
        waited: float,
        holder: ModelCard | None = None,
    ) -> list[Placed]:
        """Send the requests to a worker.

        Raises `_GoneError` when it is gone; it has none of them then.
        """
        placed: list[Placed] = []
        member = chosen.member
        holders = _holders(chosen, holder)
        pages = (Source(PAGES, holders),) if holders else ()
        with_ticket = bool(requests[0].ticket)
        fetches = holder is not None or with_ticket
        from_others = bool(pages) or with_ticket
        measured = self._measured(pool, chosen, length, fetches=fetches, from_others=from_others)
        work = chosen.work
        if with_ticket:
            work = round(work * min(1.0, pool.price.value))
        try:
            for request in requests:
                request = _with_waited_deadline(request, waited)
                request, encoding = self._fleet.encoders.assign(request, member.card)
                if pages:
                    sources = (*request.sources, *pages)
                    request = msgspec.structs.replace(request, sources=sources)
                try:
                    stream = member.worker.send(request)
                except OverloadedError as error:
                    raise _GoneError(member.id, error) from error
                # The prompt is computed once for all of them.
                charge = LoadReservation(
                    pool,
                    member,
                    prefill=0 if placed else work,
                    length=length,
                    ended=self._ended,
                    client=request.client,
                    # So are its images.
                    computed=_nothing if placed else encoding.begin(),
                    first_token=_nothing if encoding.items else measured,
                )
                placed.append(Placed(request, Sent(member.worker, stream, charge)))
        except BaseException:
            cancel(placed)
            raise
        return placed

    def _measured(
        self,
        pool: Pool,
        chosen: Chosen,
        length: int,
        *,
        fetches: bool,
        from_others: bool,
    ) -> Callable[[], object]:
        """Function that is called at the first token, and measures what the prompt has cost."""
        # What is read from a tier takes another time than either, and a worker looks there first.
        # In a room both wait for one another.
        member, positions, price = chosen.member, length - chosen.cached, pool.price
        reads = member.tiers if from_others else chosen.work < positions
        if member.load.prefill or (reads and not (from_others and fetches)) or member.card.kv_rooms:
            return _nothing
        began = self._clock()
        if not from_others:
            return lambda: price.computed(positions, self._clock() - began)
        # A worker computes what it finds slow to fetch: then that is the price.
        fetched = positions if fetches else chosen.fetchable
        return lambda: price.fetched(fetched, self._clock() - began, positions - fetched)


def _with_waited_deadline(request: Request, waited: float) -> Request:
    """A request that has waited so many seconds.

    Raises `DeadlineExceededError` when its time is over.
    """
    if request.deadline is None or not waited:
        return request
    if request.deadline <= waited:
        raise DeadlineExceededError(
            f"all workers were full for the {request.deadline:g} s that were left"
        )
    return msgspec.structs.replace(request, deadline=request.deadline - waited)


def _length(request: Request) -> int:
    """Return the positions of a request, or the steps of its images, as its part of a load."""
    if isinstance(request.params, Diffusion):
        return request.params.steps * request.params.count
    return request.num_positions + len(request.prior_output)


def _holders(chosen: Chosen, holder: ModelCard | None) -> tuple[Address, ...]:
    """Return the workers to ask for pages; the one with this card is the first of them."""
    card = chosen.member.card
    if (
        holder is None
        or holder.address in (None, card.address)
        or not card.kv_layout
        or card.kv_tickets
        or holder.kv_layout != card.kv_layout
    ):
        return chosen.holders
    others = (address for address in chosen.holders if address != holder.address)
    return tuple(islice(chain([holder.address], others), MAX_HOLDERS))


def _nothing() -> None:
    """Do nothing."""


def cancel(placed: Sequence[Placed]) -> None:
    """Stop requests; needs no answer."""
    for one in placed:
        one.cancel()
