"""Workers that can serve each other's requests: their loads, their caches, the next one."""

import heapq
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

from inlay.card import Address, ModelCard
from inlay.digest import BLOCK_SIZE
from inlay.request import Request, Task
from inlay.router.fetch_price import FetchPrice
from inlay.router.halves import Halves
from inlay.router.key_table import Keys
from inlay.router.kv_index import KvIndex
from inlay.router.member import UNBOUNDED, PoolMember
from inlay.router.policies import Hashes, Policy, Positions, View, rendezvous_hash
from inlay.router.roles import Roles, Scene
from inlay.router.settings import RouterSettings
from inlay.router.tiers import Tiers
from inlay.routing import WorkerLoad
from inlay.transport.api import Worker

MAX_HOLDERS = 2
"""Workers that are named for the pages of one prompt."""
LEAST_HANDOVER = 256
"""Positions to compute from which on a prompt may be computed at another worker."""


class PoolKey(NamedTuple):
    """Common properties of a pool's workers; routing and resuming never leave it."""

    name: str
    weights_id: str
    dtype: str
    role: Task = Task.GENERATE
    encoder_id: str = ""

    @classmethod
    def of(cls, card: ModelCard) -> "PoolKey":
        """Of the pool that a card's worker belongs to."""
        role, encoder_id = card.role, ""
        if role is Task.ENCODE and card.media is not None:
            encoder_id = card.media.encoder_id
        return cls(card.name, card.weights_id, card.dtype, role, encoder_id)


def content_of(card: ModelCard, adapter: str) -> str | None:
    """Content id of the adapter of this name at the worker with this card, or None."""
    return next((known.content_id for known in card.adapters if known.name == adapter), None)


class Chosen(NamedTuple):
    """The worker for a prompt.

    Attributes:
        member: the worker.
        cached: positions of the prompt that it has cached, as far as is known.
        holders: workers that it may fetch more from, the one with the most first.
        fetchable: positions that the first of them has beyond those.
        work: positions to compute, and those to fetch at their price.
        prefiller: the worker that computes the prompt for it, where that is better, or where both
            do nothing else.
    """

    member: PoolMember
    cached: int
    holders: tuple[Address, ...] = ()
    work: int = 0
    fetchable: int = 0
    prefiller: "Chosen | None" = None


class Pool:
    """Loads and caches of workers in arrays: a choice among thousands is a few operations.

    Args:
        policy: chooses a worker.
        settings: of the router.
        clock: monotonic seconds.

    Attributes:
        index: of the blocks that its workers have cached.
        price: of positions that one of them fetches from another.
    """

    def __init__(
        self, policy: Policy, settings: RouterSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.index = KvIndex()
        self.price = FetchPrice(settings.router_fetch_weight, clock)
        self._policy = policy
        self._settings = settings
        self._clock = clock
        self._members: dict[str, PoolMember] = {}
        self._seated: list[PoolMember] = []
        self._turning: list[tuple[float, int, PoolMember]] = []
        self._numbers = count()
        self._able: dict[tuple[str | None, bool], Positions] = {}
        self._requests_of: dict[str | None, Counter[PoolMember]] = {}
        self._seat()

    def __len__(self) -> int:
        return len(self._members)

    @property
    def members(self) -> Mapping[str, PoolMember]:
        """By id of the worker."""
        return self._members

    def take(
        self, workers: Sequence[Worker], others: Callable[[str], WorkerLoad]
    ) -> list[PoolMember]:
        """Set the current workers, with their current cards; return the new ones.

        Args:
            workers: of this pool.
            others: load of the other frontends at a worker.
        """
        before, self._members = self._members, {}
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
            self._members[worker.id] = member
        for member in before.values():
            member.leave()
        self._seat()
        return new

    def _seat(self) -> None:
        """Give every member its place in the arrays."""
        members = self._seated = list(self._members.values())
        for seat, member in enumerate(members):
            member.seat = seat
        backlog = self._settings.router_worker_backlog
        self._capacity: Positions = np.array(
            [member.capacity(backlog) for member in members], np.int64
        )
        self._queueable: Positions = np.array([member.queueable for member in members], np.int64)
        self._bounds_positions = bool((self._queueable < UNBOUNDED).any())
        self._hashes: Hashes = np.array([member.hash for member in members], np.uint64)
        loads = [member.load for member in members]
        self._num_requests: Positions = np.array([load.requests for load in loads], np.int64)
        self._clients: Positions = np.array([member.clients for member in members], np.int64)
        self._prefill: Positions = np.array([load.prefill for load in loads], np.int64)
        self._decode: Positions = np.array([load.decode for load in loads], np.int64)
        holders = [(member.told, member.young, member.old) for member in members]
        self._holders: Positions = np.array(holders, np.int64).reshape(-1, 3).T.copy()
        cards = [member.card for member in members]
        self._halves = Halves(cards)
        layouts = [card.kv_layout if card.address or card.kv_tickets else "" for card in cards]
        # Pages of one layout go from each to each; workers with several do not exchange any.
        shared = {layout for layout in layouts if layout}
        self.tiers_changed()
        self._exchanges = np.array([len(shared) == 1 and bool(layout) for layout in layouts], bool)
        self._gives = self._exchanges & ~np.array([card.kv_tickets for card in cards], bool)
        self._awake = np.array([not member.card.asleep for member in members], bool)
        self._roles = Roles(cards, self._settings)
        self._able = {}
        self._differ = len({member.takes_rows for member in members}) > 1

    def tiers_changed(self) -> None:
        """A member has another tier, or another price of one."""
        self._tiers = Tiers(self._seated, self._settings.router_fetch_weight)

    def _seats_able(self, adapter: str | None, rows: bool) -> Positions:
        """Seats of workers that are awake, have the adapter, and accept rows if need be."""
        able = self._able.get((adapter, rows))
        if able is None:
            able = self._able[adapter, rows] = np.array(
                [
                    seat
                    for seat, member in enumerate(self._seated)
                    if not member.card.asleep
                    and member.has_adapter(adapter)
                    and (member.takes_rows or not rows)
                ],
                np.int64,
            )
        return able

    def needs_rows(self, request: Request) -> bool:
        """True if some workers refuse this request: it has rows, and they accept none.

        Where none takes them, each may say so itself.
        """
        return self._differ and request.has_embeds

    def has_adapter(self, adapter: str) -> bool:
        """True if any of its workers has it, awake or not."""
        return any(member.has_adapter(adapter) for member in self._seated)

    def content_id(self, adapter: str) -> str | None:
        """The identity of an adapter's content, or None where no worker has it."""
        contents = (content_of(member.card, adapter) for member in self._seated)
        return next((content for content in contents if content is not None), None)

    @property
    def card(self) -> ModelCard | None:
        """A card of the pool, for what its workers have in common; None where it has none."""
        return self._seated[0].card if self._seated else None

    @property
    def has_prefill_workers(self) -> bool:
        """True if some of its workers are meant for prompts, and take whole requests too."""
        return bool(self._roles.prefills.any())

    @property
    def asleep(self) -> bool:
        """True if it has workers, and all of them are asleep."""
        return bool(self._seated) and all(member.card.asleep for member in self._seated)

    @property
    def num_places(self) -> int:
        """Requests that its workers may have of this frontend at a time."""
        others = [member.others.requests for member in self._seated]
        return int(np.maximum(self._capacity - others, 0).sum()) if others else 0

    def can_serve(self, adapter: str | None, *, rows: bool = False) -> bool:
        """True if any of its workers could be sent a request now, had it room."""
        return self._halves.suffice(self._seats_able(adapter, rows))

    def asks_for_chain(self, adapter: str | None, *, rows: bool = False) -> bool:
        """True if a choice depends on the workers' caches."""
        return self._policy.asks_for_cached and len(self._seats_able(adapter, rows)) > 1

    def choose(
        self,
        length: int,
        keys: Keys | None,
        *,
        adapter: str | None = None,
        rows: bool = False,
        session: str | None = None,
        only: Collection[str] | None = None,
        avoid: Collection[str] = (),
        full_too: bool = False,
        splits: bool = False,
        client: str | None = None,
    ) -> Chosen | None:
        """The worker for a prompt, or None where none can take it now.

        A worker with too many requests still takes those of a client below its share there: the
        engine decides which sequences run, and it can consider only those that it has. One with too
        many positions would refuse them.

        Args:
            length: positions of the prompt.
            keys: of its blocks, where `asks_for_chain`.
            adapter: that it needs.
            rows: those workers alone count that take rows.
            session: that it belongs to.
            only: ids of workers that may have it; None for all.
            avoid: ids of workers that must not.
            full_too: full workers count, for every client.
            splits: the prompt may be computed at another worker.
            client: that sent the prompt.
        """
        seats = self._seats_able(adapter, rows)
        if not full_too:
            able = self._with_room_for(length, seats) if self._bounds_positions else seats
            seats = able[self._num_requests[able] < self._capacity[able]]
            if not self._halves.suffice(seats):
                seats = np.union1d(seats, self._within_share(able, client))
        if only is not None:
            seats = seats[np.isin(seats, self._seats_of(only))]
        if avoid:
            seats = seats[~np.isin(seats, self._seats_of(avoid))]
        if not len(seats):
            return None
        cached = None if keys is None else self._cached(keys)
        spared = self._spared(keys, cached)
        paired = self._halves.pair(seats, self._prefill, spared)
        if not len(paired.seats):
            return None
        scene = Scene(
            self._num_requests, self._prefill, self._decode, spared, length, self.price.value
        )
        of_role = self._roles.taking_whole(paired.seats, scene._replace(spared=paired.spared))
        known = None if cached is None else paired.spared
        seat = self._choose(of_role, paired.prefill, known, length, session)
        if seat in paired.partners:
            prompt = self._chosen(paired.partners[seat], cached, spared, length)
            return Chosen(self._seated[seat], prompt.cached, prefiller=prompt)
        prefiller = None
        if splits and length - spared[seat] >= LEAST_HANDOVER and self._exchanges[seat]:
            other = self._roles.prefiller(seat, seats[self._exchanges[seats]], scene)
            prefiller = None if other is None else self._chosen(other, None, spared, length)
        return self._chosen(seat, cached, spared, length, prefiller)

    def _choose(
        self,
        seats: Positions,
        prefill: Positions,
        spared: Positions | None,
        length: int,
        session: str | None,
    ) -> int:
        if len(seats) == 1:
            return int(seats[0])
        if session is not None:
            slack = self._settings.router_session_slack
            requests = self._num_requests[seats]
            return int(seats[rendezvous_hash(session, self._hashes[seats], requests, slack)])
        known = None if spared is None else spared[seats]
        view = View(seats, prefill[seats], self._decode[seats], known, length)
        return int(seats[self._policy.choose(view)])

    def _chosen(
        self,
        seat: int,
        cached: Positions | None,
        spared: Positions,
        length: int,
        prefiller: Chosen | None = None,
    ) -> Chosen:
        member, work = self._seated[seat], length - int(spared[seat])
        if cached is None:
            return Chosen(member, 0, work=work, prefiller=prefiller)
        here = int(cached[seat])
        holders, most = self._holders_of(cached, seat)
        return Chosen(member, here, holders, work, most - here, prefiller)

    def _spared(self, keys: Keys | None, cached: Positions | None) -> Positions:
        """Positions of a prompt that each worker need not compute, by seat.

        Those that it can fetch, or read from a tier of its own, count as far as that is cheaper.
        """
        if cached is None or keys is None:
            return np.zeros(len(self._seated), np.int64)
        found, gain = cached, 1 - self.price.value
        holds = self._gives & self._awake
        if gain > 0 and holds.any():
            fetched = np.maximum(cached[holds].max() - cached, 0) * self._gives
            found = cached + (gain * fetched).astype(np.int64)
        return self._tiers.spared(found, cached, keys, self.index)

    def _holders_of(self, cached: Positions, seat: int) -> tuple[tuple[Address, ...], int]:
        """Workers with a page more than the one at `seat`, and the positions of the first.

        That is the one with the most; those of `seat` where there is none.
        """
        here = int(cached[seat])
        if not self._gives[seat]:
            return (), here
        least = here + self._seated[seat].card.block_size
        seats = np.flatnonzero((cached >= least) & self._gives & self._awake)
        seats = seats[np.argsort(-cached[seats], kind="stable")][:MAX_HOLDERS]
        addresses = (self._seated[one].card.address for one in seats.tolist())
        found = tuple(address for address in addresses if address is not None)
        return found, int(cached[seats[0]]) if found else here

    def _with_room_for(self, length: int, seats: Positions) -> Positions:
        """Seats that may queue `length` more positions; any number where nothing is computed."""
        prefill = self._prefill[seats]
        found: Positions = seats[(prefill == 0) | (prefill + length <= self._queueable[seats])]
        return found

    def _within_share(self, seats: Positions, client: str | None) -> Positions:
        """Seats where a client has less than its share of the worker's requests.

        Each client with requests there has an equal share, and so has this one. Of the other
        frontends' clients no more is known than that there are any: they count as one.
        """
        own = np.zeros(len(self._seated), np.int64)
        for member, requests in self._requests_of.get(client, {}).items():
            if member.seat is not None:
                own[member.seat] = requests
        clients = self._clients + (own == 0)
        within: Positions = seats[((own + 1) * clients <= self._capacity)[seats]]
        return within

    def _seats_of(self, ids: Collection[str]) -> Positions:
        members = map(self._members.get, ids)
        return np.array([member.seat for member in members if member is not None], np.int64)

    def _cached(self, keys: Keys) -> Positions:
        """Positions of a prompt that each worker has, by seat."""
        self._turn_due()
        blocks: Positions = self.index.overlap(keys)[self._holders].max(axis=0).astype(np.int64)
        return blocks * BLOCK_SIZE

    # What becomes known.

    def sent(self, member: PoolMember, keys: Keys) -> None:
        """A worker was sent a prompt of these blocks."""
        if member.sent(keys, self._clock(), self._settings.router_cache_ttl):
            self._look_again(member)
        self.renumbered(member)

    def _look_again(self, member: PoolMember) -> None:
        if member.turns_at is not None:
            heapq.heappush(self._turning, (member.turns_at, next(self._numbers), member))

    def _turn_due(self) -> None:
        now = self._clock()
        while self._turning and self._turning[0][0] <= now:
            due, _, member = heapq.heappop(self._turning)
            if member.turn_due(due, self._settings.router_cache_ttl):
                self._look_again(member)
            self.renumbered(member)

    def renumbered(self, member: PoolMember) -> None:
        """A member's holdings may have other numbers."""
        if member.seat is not None:
            self._holders[:, member.seat] = (member.told, member.young, member.old)

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
        if requests:
            self._change_client(member, client, requests)
        own = member.own
        member.own = WorkerLoad(own.requests + requests, own.prefill + prefill, own.decode + decode)
        self._add(member, requests, prefill, decode)

    def _change_client(self, member: PoolMember, client: str | None, requests: int) -> None:
        of_client = self._requests_of.setdefault(client, Counter())
        before = of_client[member]
        of_client[member] += requests
        if not of_client[member]:
            del of_client[member]
        if not of_client:
            del self._requests_of[client]
        member.num_clients += (before + requests > 0) - (before > 0)
        self._count_clients(member)

    def _count_clients(self, member: PoolMember) -> None:
        if member.seat is not None:
            self._clients[member.seat] = member.clients

    def set_others(self, member: PoolMember, load: WorkerLoad) -> None:
        """Set the load of the other frontends at a worker."""
        before, member.others = member.others, load
        self._count_clients(member)
        self._add(
            member,
            load.requests - before.requests,
            load.prefill - before.prefill,
            load.decode - before.decode,
        )

    def _add(self, member: PoolMember, requests: int, prefill: int, decode: int) -> None:
        seat = member.seat
        if seat is not None:
            self._num_requests[seat] += requests
            self._prefill[seat] += prefill
            self._decode[seat] += decode
