"""The choice of the workers for a request: a function of what is known, and of nothing else."""

from collections.abc import Collection, Mapping, Sequence
from itertools import chain, islice
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from inlay.messages.card import Address, ModelCard
from inlay.messages.request import PAGES, Source
from inlay.router import terms
from inlay.router.index import Keys
from inlay.router.snapshot import EncodeWorker, Positions, Snapshot
from inlay.router.terms import PromptBySeat, rendezvous_hash

MAX_HOLDERS = 2
"""Workers that are named for the pages of one prompt."""
MAX_ENCODERS = 3
"""Encode workers that are named for one item."""
LEAST_HANDOVER = 256
"""Positions to compute from which on a prompt may be computed at another worker."""


class Ask(NamedTuple):
    """A request, as it is asked of a pool's workers.

    Attributes:
        length: positions of the prompt, and of the output that is known.
        keys: of its blocks, where the choice depends on caches.
        adapter: that it needs.
        rows: those workers alone count that take rows.
        session: that it belongs to.
        client: that sent it.
        only: ids of workers that may have it; None for all.
        avoid: ids of workers that others go before.
        full_too: full workers count, for every client.
        divisible: the prompt may be computed at another worker.
        media: rows of each item of the prompt that may be encoded elsewhere, by its digest.
        salt: of the request.
        holder: card of a worker that has the pages of the attempt before, or None.
        yields: background: it has no share of a full worker.
    """

    length: int
    keys: Keys | None = None
    adapter: str | None = None
    rows: bool = False
    session: str | None = None
    client: str | None = None
    only: Collection[str] | None = None
    avoid: Collection[str] = ()
    full_too: bool = False
    divisible: bool = False
    media: Mapping[bytes, int] = MappingProxyType({})
    salt: str | None = None
    holder: ModelCard | None = None
    yields: bool = False


class Part(NamedTuple):
    """One worker's part in a request.

    Attributes:
        seat: of the worker.
        cached: positions of the prompt that it has cached, as far as is known.
        work: positions to compute, and those to fetch at their price.
        fetchable: positions that the first of `holders` has beyond those that are cached.
        holders: workers that it may fetch more from, the one with the most first.
        sources: workers that encode the prompt's media for it, and `holders`, by name.
        encoding: by item, the worker that is to encode it first, and its rows.
    """

    seat: int
    cached: int
    work: int
    fetchable: int = 0
    holders: tuple[Address, ...] = ()
    sources: tuple[Source, ...] = ()
    encoding: tuple[tuple[EncodeWorker, int], ...] = ()


class Placement(NamedTuple):
    """The workers of a request.

    Attributes:
        part: of the worker that makes the output.
        prompt: of the worker that computes the prompt for it, or None.
        together: both have the request at the same time; else the output follows the prompt.
    """

    part: Part
    prompt: Part | None = None
    together: bool = False


class Wait(NamedTuple):
    """Workers could have the request, and have no room."""


class Refuse(NamedTuple):
    """No worker could have the request, had it room.

    Attributes:
        why: all are asleep, none has the adapter, or there is none.
    """

    why: Literal["asleep", "adapter", "none"]


Decision: TypeAlias = Placement | Wait | Refuse

_WAIT = Wait()


def decide(view: Snapshot, ask: Ask) -> Decision:
    """Choose the workers for a request.

    A worker with too many requests still takes those of a client below its share there: the engine
    decides which sequences run, and it can consider only those that it has. One with too many
    positions would refuse them.

    Args:
        view: the workers of a pool; it is only read.
        ask: the request.
    """
    able = eligible(view, ask)
    if not (_complete(view, able) if view.has_rooms else len(able)):
        return _refusal(view, ask)
    seats = able if ask.full_too else with_room(view, ask, able)
    if not len(seats):
        return _WAIT
    if len(view.members) == 1 and ask.keys is None:
        only = Part(0, 0, ask.length)
        return Placement(_with_sources(view, ask, only) if ask.media or ask.holder else only)
    prompt = terms.prompt_at(view, ask.length, ask.keys)
    paired = terms.pairs(view, seats, prompt.spared)
    if not len(paired.seats):
        return _WAIT
    whole = terms.taking_whole(view, paired.seats, prompt._replace(spared=paired.spared))
    if len(whole) == 1:
        seat = int(whole[0])
    elif ask.session is not None:
        seat = terms.of_session(view, whole, ask.session)
    else:
        seat = terms.of_policy(view, whole, paired)
    if seat in paired.partners:
        ask = ask._replace(holder=None)
        first = _part(view, ask, paired.partners[seat], prompt)
        rest = _with_sources(view, ask, Part(seat, first.cached, 0))
        return Placement(rest, first, together=True)
    part = _part(view, ask, seat, prompt)
    if ask.divisible and part.work >= LEAST_HANDOVER and view.exchanges[seat]:
        other = terms.prefiller(view, seat, seats[view.exchanges[seats]], prompt)
        if other is not None:
            return Placement(part, _part(view, ask, other, prompt._replace(cached=None)))
    return Placement(part)


def eligible(view: Snapshot, ask: Ask) -> Positions:
    """Seats of workers that could have a request, had they room."""
    seats: Positions = np.flatnonzero(view.able(ask.adapter, rows=ask.rows))
    if ask.only is not None:
        seats = seats[np.isin(seats, _seats_of(view, ask.only))]
    if ask.avoid:
        others = seats[~np.isin(seats, _seats_of(view, ask.avoid))]
        seats = others if _complete(view, others) else seats
    return seats


def _seats_of(view: Snapshot, ids: Collection[str]) -> Positions:
    return np.array([view.seats[id_] for id_ in ids if id_ in view.seats], np.int64)


def _complete(view: Snapshot, seats: Positions) -> bool:
    """True if a whole request may go to some of these seats."""
    if not view.has_rooms:
        return len(seats) > 0
    kinds = view.room_kind[seats]
    decodes = view.decodes_in_room[seats]
    both = np.intersect1d(kinds[(kinds > 0) & decodes], kinds[(kinds > 0) & ~decodes])
    return bool((kinds == 0).any()) or len(both) > 0


def _refusal(view: Snapshot, ask: Ask) -> Refuse:
    if len(view.members) and view.asleep.all():
        return Refuse("asleep")
    if ask.adapter is not None and len(view.members) and ask.adapter not in view.adapters:
        return Refuse("adapter")
    return Refuse("none")


def with_room(view: Snapshot, ask: Ask, seats: Positions) -> Positions:
    """Those of some seats that have room; if not enough do, also where the client's share is."""
    if view.bounds_positions:
        # Any number of them may queue where nothing is computed.
        prefill = view.prefill[seats]
        seats = seats[(prefill == 0) | (prefill + ask.length <= view.queueable[seats])]
    free = seats[view.requests[seats] < view.capacity[seats]]
    if len(free) == len(seats) or ask.yields or _complete(view, free):
        return free
    found: Positions = np.union1d(free, _within_share(view, ask, seats))
    return found


def _within_share(view: Snapshot, ask: Ask, seats: Positions) -> Positions:
    """Seats where a client has less than its share of the worker's requests.

    Each client with requests there has an equal share, and so has this one. Of the other frontends'
    clients no more is known than that there are any: they count as one.
    """
    own = np.zeros(len(view.members), np.int64)
    for member, requests in view.requests_of.get(ask.client, {}).items():
        if member.seat is not None:
            own[member.seat] = requests
    clients = view.clients + (own == 0)
    within: Positions = seats[((own + 1) * clients <= view.capacity)[seats]]
    return within


def _part(view: Snapshot, ask: Ask, seat: int, prompt: PromptBySeat) -> Part:
    work = prompt.length - int(prompt.spared[seat])
    if prompt.cached is None:
        return _with_sources(view, ask, Part(seat, 0, work))
    here = int(prompt.cached[seat])
    holders, most = _holders_of(view, prompt.cached, seat)
    return _with_sources(view, ask, Part(seat, here, work, most - here, holders))


def _with_sources(view: Snapshot, ask: Ask, part: Part) -> Part:
    """Name the workers that the one of this part may ask for pages and rows of media."""
    if not (ask.media or ask.holder or part.holders):
        return part
    card = view.members[part.seat].card
    holders = _holders_with(ask.holder, card, part.holders)
    encoders = () if card.media is None else view.encoders.get((card.media.encoder_id, card.dtype))
    sources: list[Source] = []
    encoding: list[tuple[EncodeWorker, int]] = []
    for name, rows in ask.media.items() if encoders else ():
        ranked = _ranked(view, f"{ask.salt}/{name.hex()}", encoders or ())
        sources.append(Source(name, tuple(one.address for one in ranked)))
        encoding.append((ranked[0], rows))
    if holders:
        sources.append(Source(PAGES, holders))
    return part._replace(holders=holders, sources=tuple(sources), encoding=tuple(encoding))


def _ranked(view: Snapshot, name: str, encoders: Sequence[EncodeWorker]) -> list[EncodeWorker]:
    """Return some encode workers for an item, the first to ask first.

    That is the one that has most likely encoded it before: the first in the item's own order of
    workers, the same at every frontend, that has not much more to do than others. So no state is
    kept for an item, and none is told to anybody.
    """
    rest, ranked = list(encoders), list[EncodeWorker]()
    while rest and len(ranked) < MAX_ENCODERS:
        hashes = np.array([one.member.hash for one in rest], np.uint64)
        loads = np.array([one.member.load.requests for one in rest], np.int64)
        first = rendezvous_hash(name, hashes, loads, view.settings.router_session_slack)
        ranked.append(rest.pop(first))
    return ranked


def _holders_with(
    holder: ModelCard | None, card: ModelCard, holders: tuple[Address, ...]
) -> tuple[Address, ...]:
    """Return the workers to ask for pages; the one with the first card is the first of them."""
    if (
        holder is None
        or holder.address in (None, card.address)
        or not card.kv_layout
        or card.kv_tickets
        or holder.kv_layout != card.kv_layout
    ):
        return holders
    others = (address for address in holders if address != holder.address)
    return tuple(islice(chain([holder.address], others), MAX_HOLDERS))


def _holders_of(view: Snapshot, cached: Positions, seat: int) -> tuple[tuple[Address, ...], int]:
    """Workers with a page more than the one at `seat`, and the positions of the first.

    That is the one with the most; those of `seat` where there is none.
    """
    here = int(cached[seat])
    if not view.gives[seat]:
        return (), here
    least = here + view.members[seat].card.block_size
    seats = np.flatnonzero((cached >= least) & view.gives & view.available)
    seats = seats[np.argsort(-cached[seats], kind="stable")][:MAX_HOLDERS]
    addresses = (view.members[one].card.address for one in seats.tolist())
    found = tuple(address for address in addresses if address is not None)
    return found, int(cached[seats[0]]) if found else here
