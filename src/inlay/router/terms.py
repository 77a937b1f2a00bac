"""The terms of a choice of a worker, in positions to compute.

Each is a function of a `Snapshot`; nothing here writes, waits or draws.
"""

from typing import NamedTuple

import numpy as np

from inlay.messages.digest import BLOCK_SIZE
from inlay.router.index import Keys
from inlay.router.member import hash_of
from inlay.router.snapshot import Costs, Hashes, Positions, Snapshot

_OUT_OF_ROLE = 4.0
"""Requests that a request counts as, which prompts delay, where a prefill worker decodes it.

With the weight of interference it is the strength of roles: all of a prompt where that weight is
0.25. Where fetching a prompt costs more they are no constraint: so it is by default.
"""
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
"""Multipliers of the finisher of splitmix64."""


class PromptBySeat(NamedTuple):
    """A prompt at each worker of a view.

    Attributes:
        length: positions.
        cached: positions that each has, from the beginning on; None where that is not asked.
        spared: positions that each need not compute: cached ones, and those that it fetches or
            reads from a tier of its own, as far as that is cheaper.
    """

    length: int
    cached: Positions | None
    spared: Positions


def prompt_at(view: Snapshot, length: int, keys: Keys | None) -> PromptBySeat:
    """Look up a prompt in the workers' caches: the terms `prefix` and `fetch`."""
    if keys is None:
        return PromptBySeat(length, None, np.zeros(len(view.members), np.int64))
    blocks = view.kv_index.overlap(keys)[view.holders].max(axis=0)
    cached: Positions = blocks.astype(np.int64) * BLOCK_SIZE
    spared, gain = cached, 1 - view.price
    holds = view.gives & view.available
    if gain > 0 and holds.any():
        fetched = np.maximum(cached[holds].max() - cached, 0) * view.gives
        spared = cached + (gain * fetched).astype(np.int64)
    if view.tiers:
        spared = spared.copy()
    for tiers in view.tiers:
        # Of pages that only a tier has, the last blocks alone are known.
        pages = view.kv_index.overlap(keys[tiers.blocks - 1 :: tiers.blocks])[tiers.holders]
        here = cached[tiers.seats]
        more = np.maximum(pages.astype(np.int64) * tiers.blocks * BLOCK_SIZE - here, 0)
        gained = np.maximum(1 - tiers.prices, 0) * more
        np.maximum.at(spared, tiers.seats, here + gained.astype(np.int64))
    return PromptBySeat(length, cached, spared)


def load(view: Snapshot, seats: Positions, prefill: Positions) -> Costs:
    """Cost of what some workers have to do; `prefill` is theirs, or their partners'."""
    weights = view.settings
    return (
        weights.router_prefill_weight * prefill[seats]
        + weights.router_decode_weight * view.decode[seats]
    )


class RoomPairs(NamedTuple):
    """Decode workers that meet a prefill worker in a room, and what each pair has.

    Attributes:
        seats: of workers that may have a whole request: those that do both phases, and decode
            workers with a partner.
        partners: by seat of a decode worker, that of its prefill worker.
        prefill: of each worker; of decode workers, that of their partners.
        spared: likewise.
    """

    seats: Positions
    partners: dict[int, int]
    prefill: Positions
    spared: Positions


def pairs(view: Snapshot, seats: Positions, spared: Positions) -> RoomPairs:
    """Give each decode worker the prefill worker of its form that has to compute least."""
    if not view.has_rooms:
        return RoomPairs(seats, {}, view.prefill, spared)
    kinds, partners, costs = view.room_kind[seats], dict[int, int](), view.prefill - spared
    for kind in np.unique(kinds[kinds > 0]).tolist():
        compatible = seats[kinds == kind]
        decodes = view.decodes_in_room[compatible]
        prefills = compatible[~decodes]
        if len(prefills):
            best = int(prefills[np.argmin(costs[prefills])])
            partners |= dict.fromkeys(compatible[decodes].tolist(), best)
    decode, prefill = list(partners), list(partners.values())
    computing, saved = view.prefill.copy(), spared.copy()
    computing[decode], saved[decode] = computing[prefill], saved[prefill]
    return RoomPairs(seats[(kinds == 0) | np.isin(seats, decode)], partners, computing, saved)


def taking_whole(view: Snapshot, seats: Positions, prompt: PromptBySeat) -> Positions:
    """Return those of some seats, prefill workers or others, that are to take a whole request.

    All of them where a prompt costs more to fetch than the requests that it would delay: kept
    apart, fewer workers would share the requests, and nobody would gain by that.
    """
    weights = view.settings
    interference = _OUT_OF_ROLE * weights.router_interference_weight
    if interference <= view.price:
        return seats
    prefills = view.prefills[seats]
    if not prefills.any() or prefills.all():
        return seats
    costs = load(view, seats, view.prefill - prompt.spared)
    out_of_role = weights.router_prefill_weight * interference * prompt.length
    overflows = costs[prefills].min() + out_of_role < costs[~prefills].min()
    return seats[prefills if overflows else ~prefills]


def prefiller(view: Snapshot, seat: int, seats: Positions, prompt: PromptBySeat) -> int | None:
    """Return the seat that is to compute a prompt for the worker at `seat`, if any is.

    Computed there, the prompt waits for the prompts before it, and, at a decode worker, delays
    each sequence that runs. Computed elsewhere, its pages have a price, and sequences count as in
    any choice, as far as there are more; where it would run beside as many requests as here, nobody
    gains by that.

    Args:
        view: the workers.
        seat: chosen for the request.
        seats: of workers that may compute the prompt.
        prompt: at each.
    """
    requests, weights = view.requests, view.settings
    seats = seats[view.prefills[seats] & (requests[seats] < requests[seat])]
    if view.prefills[seat] or not len(seats):
        return None
    delay, work = weights.router_interference_weight, prompt.length - int(prompt.spared[seat])
    here = work * (1 + delay * int(requests[seat]) * bool(view.decodes[seat]))
    there = (1 + delay * (view.decode[seats] > 0)) * (prompt.length - prompt.spared[seats])
    decoded = np.maximum(view.decode[seats] - view.decode[seat], 0)
    queued = view.prefill[seats] - view.prefill[seat]
    more = queued + there + view.price * work - here
    costs = weights.router_prefill_weight * more + weights.router_decode_weight * decoded
    best = int(np.argmin(costs))
    return int(seats[best]) if costs[best] < 0 else None


def cheapest(costs: Costs, draw: float) -> int:
    """Index of the least cost, by `draw` any of several: else all frontends chose the first."""
    best = np.flatnonzero(costs == costs.min())
    return int(best[0]) if len(best) == 1 else int(best[int(draw * len(best))])


def of_policy(view: Snapshot, seats: Positions, paired: RoomPairs) -> int:
    """Return one of several seats by the router's policy.

    `kv` is the one where the request costs least: its load, and of this prompt what it has to
    compute. The form is Dynamo's router's (overlap weight times prefill blocks, plus decode
    blocks), which weighs both alike; here a position that is decoded is cheap beside one that is
    computed (docs/scaling.md). Embeddings are positions like any.

    `power-of-two` is the less loaded of two at random: nearly as even as the least loaded of all,
    and frontends that learn of each other's loads late do not all choose the same (Mitzenmacher,
    "The power of two choices in randomized load balancing", 2001).
    """
    policy = view.settings.router_policy
    if policy == "round-robin":
        return int(seats[np.searchsorted(seats, view.last, side="right") % len(seats)])
    costs = load(view, seats, paired.prefill)
    if policy == "power-of-two":
        one, two = divmod(int(view.draw * len(seats) * (len(seats) - 1)), len(seats) - 1)
        two += two >= one
        return int(seats[one if costs[one] <= costs[two] else two])
    if policy == "kv":
        costs -= view.settings.router_prefill_weight * paired.spared[seats]
    return int(seats[cheapest(costs, view.draw)])


def of_session(view: Snapshot, seats: Positions, session: str) -> int:
    """Return one of several seats: that of a session, the same at every frontend."""
    slack = view.settings.router_session_slack
    found = rendezvous_hash(session, view.hashes[seats], view.requests[seats], slack)
    return int(seats[found])


def rendezvous_hash(session: str, workers: Hashes, requests: Positions, slack: float) -> int:
    """Index of a session's worker: the first in the session's order that is not overloaded.

    The order is rendezvous hashing (Thaler, Ravishankar 1998): when a worker comes or goes only the
    sessions move that go to it or were with it. The bound is that of consistent hashing with
    bounded loads (Mirrokni, Thorup, Zadimoghaddam 2018): the average with this request, times 1 +
    `slack`.

    Args:
        session: whatever names it.
        workers: `hash_of` each worker's id; at least one.
        requests: running at each.
        slack: at least 0.
    """
    mixed = workers ^ hash_of(session)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[0]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[1]
    mixed ^= mixed >> np.uint64(31)
    most = np.ceil((1 + slack) * (requests.sum() + 1) / len(requests))
    return int(np.argmax(np.where(requests < most, mixed, 0)))
