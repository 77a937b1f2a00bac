"""The workers of a pool in arrays: all that a choice of one looks at."""

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from random import Random
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from inlay.base.address import Address
from inlay.messages.card import ModelCard
from inlay.messages.digest import BLOCK_SIZE
from inlay.messages.request import Task
from inlay.messages.routing import WorkerLoad
from inlay.router.background import BackgroundWindow
from inlay.router.index import Keys, KvIndex
from inlay.router.member import UNBOUNDED, PoolMember
from inlay.router.prices import RouterPrice
from inlay.router.settings import RouterSettings
from inlay.transport.api import Worker

Positions: TypeAlias = npt.NDArray[np.int64]
Costs: TypeAlias = npt.NDArray[np.float64]
Hashes: TypeAlias = npt.NDArray[np.uint64]
Flags: TypeAlias = npt.NDArray[np.bool_]


class PoolKey(NamedTuple):
    """Common properties of a pool's workers; routing and resuming never leave it."""

    name: str
    weights_id: str
    dtype: str
    role: Task = Task.GENERATE
    encoder_id: str = ""
    outputs: tuple[str, ...] = ()

    @classmethod
    def of(cls, card: ModelCard) -> "PoolKey":
        """Of the pool that a card's worker belongs to."""
        role, encoder_id = card.role, ""
        if role is Task.ENCODE and card.media is not None:
            encoder_id = card.media.encoder_id
        return cls(card.name, card.weights_id, card.dtype, role, encoder_id, card.outputs)


def content_of(card: ModelCard, adapter: str) -> str | None:
    """Content id of the adapter of this name at the worker with this card, or None."""
    return next((known.content_id for known in card.adapters if known.name == adapter), None)


class TierView(NamedTuple):
    """Tiers behind the workers' caches whose pages have so many blocks.

    Attributes:
        blocks: of a page.
        seats: of the workers.
        holders: of the pool's index; of pages that only the tier has, their last blocks alone.
        prices: of a position, in positions that are computed.
    """

    blocks: int
    seats: Positions
    holders: Positions
    prices: Costs


class EncodeWorker(NamedTuple):
    """A worker that encodes media, its address, and the pool that has its load."""

    pool: "Pool"
    member: PoolMember
    address: Address


Encoders: TypeAlias = Mapping[tuple[str, str], Sequence[EncodeWorker]]
"""Encode workers by (id of their encoder, dtype)."""


class Snapshot(NamedTuple):
    """The workers of a pool at one moment; arrays have an element for each seat.

    The pool writes loads and caches into the arrays, between choices.

    Attributes:
        settings: of the router.
        members: by seat.
        seats: by id of the worker.
        asleep: asleep.
        available: neither asleep nor gone.
        takes_rows: accepts prompts with rows.
        adapters: by the name of an adapter, who has it.
        capacity: requests that each may have.
        queueable: positions of prompts that each may have to compute.
        bounds_positions: some have a bound of these.
        requests: of all frontends there.
        prefill: positions of prompts that each still has to compute.
        decode: positions of the sequences that each is decoding.
        clients: known clients with requests there; those of all other frontends count as one.
        requests_of: this frontend's requests by client.
        hashes: of ids, for sessions.
        room_kind: of workers that do one phase alone and meet in a room, the number of their form,
            from 1 on; else 0.
        has_rooms: there are such workers.
        decodes_in_room: of these, who decodes.
        prefills: of the others, who is meant for prompts.
        decodes: of the others, who is meant for decoding.
        exchanges: pages go between these: all have one layout.
        gives: of these, pages are fetched by address.
        kv_index: of the blocks that the workers have cached.
        holders: numbers of each in the index, three rows of them.
        tiers: behind their caches, by the size of their pages.
        encoders: workers that encode media for these.
        price: of a position that is fetched, in positions that are computed.
        last: seat of the last choice.
        draw: from 0 to below 1; breaks ties.
    """

    settings: RouterSettings
    members: Sequence[PoolMember]
    seats: Mapping[str, int]
    asleep: Flags
    available: Flags
    takes_rows: Flags
    adapters: Mapping[str, Flags]
    capacity: Positions
    queueable: Positions
    bounds_positions: bool
    requests: Positions
    prefill: Positions
    decode: Positions
    clients: Positions
    requests_of: Mapping[str | None, Counter[PoolMember]]
    hashes: Hashes
    room_kind: Positions
    has_rooms: bool
    decodes_in_room: Flags
    prefills: Flags
    decodes: Flags
    exchanges: Flags
    gives: Flags
    kv_index: KvIndex
    holders: Positions
    tiers: Sequence[TierView]
    encoders: Encoders
    price: float
    last: int
    draw: float

    def able(self, adapter: str | None, *, rows: bool) -> Flags:
        """Workers that are available, have the adapter, and accept rows if need be."""
        found = self.available
        if adapter is not None:
            found = found & self.adapters.get(adapter, np.False_)
        return found & self.takes_rows if rows else found


class Pool:
    """Workers that can serve each other's requests: who they are, their loads, their caches.

    Args:
        settings: of the router.
        random: breaks ties.
        clock: monotonic seconds.

    Attributes:
        members: by id of the worker.
        seated: by seat.
        card: of one of them, for what all have in common; None where there is none.
        index: of the blocks that its workers have cached.
        price: of positions that one of them fetches from another.
        last: seat of the last choice.
        encoders: workers that encode media for these.
        background: bounds the background requests that run beside others.
        differ_in_rows: some accept prompts with rows, and some do not. Where none does, the worker
            itself refuses.
        has_prefill_workers: some are meant for prompts, and take whole requests too.
    """

    def __init__(
        self,
        settings: RouterSettings,
        random: Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.index = KvIndex()
        self.price = RouterPrice(settings.router_fetch_weight, clock)
        self.members: dict[str, PoolMember] = {}
        self.last = -1
        self.encoders: Encoders = {}
        self.background = BackgroundWindow(clock)
        self.differ_in_rows = self.has_prefill_workers = False
        self._settings = settings
        self._random = random or Random()
        self._clock = clock
        self._rotating: list[tuple[float, int, PoolMember]] = []
        self._numbers = count()
        self._requests_of: dict[str | None, Counter[PoolMember]] = {}
        self._seat()

    def view(self) -> Snapshot:
        """The workers as they are now, for one choice."""
        if self._rotating:
            self._rotate_due()
        return self._seats._replace(
            encoders=self.encoders,
            # Nobody fetches anything where there is one worker.
            price=self.price.value if len(self.members) > 1 else 1.0,
            last=self.last,
            draw=self._random.random(),
        )

    def take(
        self, workers: Sequence[Worker], others: Callable[[str], WorkerLoad]
    ) -> list[PoolMember]:
        """Set the current workers, with their current cards; return the new ones.

        Args:
            workers: of this pool.
            others: load of the other frontends at a worker.
        """
        before, self.members = self.members, {}
        new: list[PoolMember] = []
        for worker in workers:
            member = before.pop(worker.id, None)
            if member is None:
                member = PoolMember(worker, self.index)
                member.others = others(worker.id)
                new.append(member)
            elif member.card.asleep < worker.card.asleep:
                member.forget()  # a sleeping worker has freed its cache
            member.card = worker.card
            member.gone = False
            self.members[worker.id] = member
        for member in before.values():
            member.leave()
        self._seat()
        return new

    def set_gone(self, member: PoolMember) -> None:
        """A worker is gone, which the plane has not said yet: nobody chooses it from here on."""
        member.gone = True
        if member.seat is not None:
            self._seats.available[member.seat] = False

    def _seat(self) -> None:
        """Give every member its place in the arrays."""
        members = self.seated = list(self.members.values())
        for seat, member in enumerate(members):
            member.seat = seat
        cards = [member.card for member in members]
        self.card = cards[0] if cards else None
        loads = [member.load for member in members]
        asleep = _flags(card.asleep > 0 for card in cards)
        rows = _flags(card.prompt_embeds is None for card in cards)
        self.differ_in_rows = bool(rows.any() and not rows.all())
        names = {adapter.name for card in cards for adapter in card.adapters}
        kinds = sorted({card.kv_rooms for card in cards} - {""})
        in_room = _flags(card.kv_rooms for card in cards)
        prefills = _flags(card.phase == "prefill" for card in cards) & ~in_room
        self.has_prefill_workers = bool(prefills.any())
        decodes = _flags(card.phase == "decode" for card in cards)
        layouts = [card.kv_layout if card.address or card.kv_tickets else "" for card in cards]
        # Pages of one layout go from each to each; workers with several do not exchange any.
        shared = {layout for layout in layouts if layout}
        exchanges = _flags(len(shared) == 1 and layout for layout in layouts)
        most = [card.limits.max_num_queued_tokens for card in cards]
        backlog = self._settings.router_worker_backlog
        self._seats = Snapshot(
            settings=self._settings,
            members=members,
            seats={member.id: seat for seat, member in enumerate(members)},
            asleep=asleep,
            available=~asleep & ~_flags(member.gone for member in members),
            takes_rows=rows,
            adapters={
                name: _flags(content_of(card, name) is not None for card in cards) for name in names
            },
            capacity=_numbers(member.capacity(backlog) for member in members),
            bounds_positions=any(one is not None for one in most),
            queueable=_numbers(UNBOUNDED if one is None else one for one in most),
            requests=_numbers(load.requests for load in loads),
            prefill=_numbers(load.prefill for load in loads),
            decode=_numbers(load.decode for load in loads),
            clients=_numbers(one.num_clients + (one.others.requests > 0) for one in members),
            requests_of=self._requests_of,
            hashes=np.array([member.hash for member in members], np.uint64),
            room_kind=_numbers(
                kinds.index(one.kv_rooms) + 1 if one.kv_rooms else 0 for one in cards
            ),
            has_rooms=bool(kinds),
            decodes_in_room=in_room & decodes,
            prefills=prefills,
            decodes=decodes & ~in_room,
            exchanges=exchanges,
            gives=exchanges & ~_flags(card.kv_tickets for card in cards),
            kv_index=self.index,
            holders=np.array(
                [(one.reported, one.recent, one.previous) for one in members], np.int64
            )
            .reshape(-1, 3)
            .T.copy(),
            tiers=(),
            encoders={},
            price=0.0,
            last=-1,
            draw=0.0,
        )
        self.tiers_changed()

    def tiers_changed(self) -> None:
        """A member has another tier, or another price of one."""
        found: dict[int, list[tuple[int, int, float]]] = {}
        unmeasured = self._settings.router_fetch_weight
        for seat, member in enumerate(self.seated):
            blocks = max(1, member.card.block_size // BLOCK_SIZE)
            for tier in member.tiers.values():
                price = unmeasured if tier.price is None else tier.price
                found.setdefault(blocks, []).append((seat, tier.holder, price))
        tiers = [
            TierView(
                blocks,
                _numbers(seat for seat, _, _ in some),
                _numbers(holder for _, holder, _ in some),
                np.array([price for _, _, price in some], np.float64),
            )
            for blocks, some in sorted(found.items())
        ]
        self._seats = self._seats._replace(tiers=tiers)

    def content_id(self, adapter: str) -> str | None:
        """The identity of an adapter's content, or None where no worker has it."""
        contents = (content_of(member.card, adapter) for member in self.seated)
        return next((content for content in contents if content is not None), None)

    def asks_for_chain(self, adapter: str | None, *, rows: bool = False) -> bool:
        """True if a choice depends on the workers' caches."""
        if len(self.members) == 1 or self._settings.router_policy != "kv":
            return False
        return bool(np.count_nonzero(self._seats.able(adapter, rows=rows)) > 1)

    @property
    def num_own(self) -> int:
        """Requests of this frontend that its workers have."""
        return sum(member.own.requests for member in self.seated)

    @property
    def num_slots(self) -> int:
        """Requests that its workers run at a time."""
        return sum(member.card.limits.max_num_seqs for member in self.seated)

    @property
    def num_places(self) -> int:
        """Requests that its workers may have of this frontend at a time."""
        others = _numbers(member.others.requests for member in self.seated)
        return int(np.maximum(self._seats.capacity - others, 0).sum())

    # What becomes known.

    def sent(self, member: PoolMember, keys: Keys) -> None:
        """A worker was sent a prompt of these blocks."""
        if member.sent(keys, self._clock(), self._settings.router_cache_ttl):
            self._rotate_later(member)
        self.renumbered(member)

    def _rotate_later(self, member: PoolMember) -> None:
        if member.rotates_at is not None:
            heapq.heappush(self._rotating, (member.rotates_at, next(self._numbers), member))

    def _rotate_due(self) -> None:
        now = self._clock()
        while self._rotating and self._rotating[0][0] <= now:
            due, _, member = heapq.heappop(self._rotating)
            if member.rotation_due(due, self._settings.router_cache_ttl):
                self._rotate_later(member)
            self.renumbered(member)

    def renumbered(self, member: PoolMember) -> None:
        """A member's holdings may have other numbers."""
        if member.seat is not None:
            self._seats.holders[:, member.seat] = (member.reported, member.recent, member.previous)

    def change(
        self,
        member: PoolMember,
        requests: int = 0,
        prefill: int = 0,
        decode: int = 0,
        *,
        client: str | None = None,
    ) -> None:
        """Add to the load that this frontend has at a worker; the requests are one client's."""
        own, seat, seats = member.own, member.seat, self._seats
        if requests:
            of_client = self._requests_of.setdefault(client, Counter())
            before = of_client[member]
            of_client[member] += requests
            if not of_client[member]:
                del of_client[member]
            if not of_client:
                del self._requests_of[client]
            member.num_clients += (before + requests > 0) - (before > 0)
        member.own = WorkerLoad(own.requests + requests, own.prefill + prefill, own.decode + decode)
        if seat is not None:
            seats.requests[seat] += requests
            seats.prefill[seat] += prefill
            seats.decode[seat] += decode
            seats.clients[seat] = member.num_clients + (member.others.requests > 0)

    def set_others(self, member: PoolMember, load: WorkerLoad) -> None:
        """Set the load of the other frontends at a worker."""
        before, member.others = member.others, load
        seat, seats = member.seat, self._seats
        if seat is not None:
            seats.requests[seat] += load.requests - before.requests
            seats.prefill[seat] += load.prefill - before.prefill
            seats.decode[seat] += load.decode - before.decode
            seats.clients[seat] = member.num_clients + (load.requests > 0)


def _flags(values: Iterable[object]) -> Flags:
    return np.fromiter(map(bool, values), bool)


def _numbers(values: Iterable[int]) -> Positions:
    return np.fromiter(values, np.int64)
