"""Choice of one of several workers: by policy, or by session.

All policies look at the same `View` and at nothing else. Requests of one session go to one worker,
which all frontends compute alike without a message (rendezvous hashing).
"""

from collections.abc import Callable
from random import Random
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from inlay.router.settings import RouterSettings

Positions: TypeAlias = npt.NDArray[np.int64]
Costs: TypeAlias = npt.NDArray[np.float64]
Hashes: TypeAlias = npt.NDArray[np.uint64]

_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
"""Multipliers of the finisher of splitmix64."""


class Weights(NamedTuple):
    """Cost of a position: of a prompt to be computed, and of a sequence being decoded."""

    prefill: float
    decode: float


class View(NamedTuple):
    """The workers that may get a request, at least one; arrays have an element for each.

    Attributes:
        seats: their indices in the pool, ascending.
        prefill: positions of prompts each still has to compute.
        decode: positions of the sequences each is decoding.
        cached: positions each has of this prompt, from its beginning on; only where the policy asks
            for it.
        length: positions of this prompt.
    """

    seats: Positions
    prefill: Positions
    decode: Positions
    cached: Positions | None
    length: int

    def load(self, weights: Weights) -> Costs:
        """Cost of the load of each."""
        return weights.prefill * self.prefill + weights.decode * self.decode


class Policy(Protocol):
    """A way to choose."""

    @property
    def asks_for_cached(self) -> bool:
        """True if it considers which worker has what cached."""

    def choose(self, view: View) -> int:
        """Which of the view's workers: an index into its arrays."""


class RoundRobin:
    """One after the other."""

    asks_for_cached = False

    def __init__(self) -> None:
        self._last = -1

    def choose(self, view: View) -> int:
        """The one after the last."""
        index = int(np.searchsorted(view.seats, self._last, side="right")) % len(view.seats)
        self._last = int(view.seats[index])
        return index


class LeastLoaded:
    """The one with the least load; a random one of equals."""

    asks_for_cached = False

    def __init__(self, random: Random, weights: Weights) -> None:
        self._random = random
        self._weights = weights

    def choose(self, view: View) -> int:
        """The least loaded."""
        return lowest(view.load(self._weights), self._random)


class PowerOfTwo:
    """The less loaded of two at random.

    Nearly as even as the least loaded of all, and frontends that learn of each other's loads late
    do not all choose the same (Mitzenmacher, "The power of two choices in randomized load
    balancing", 2001).
    """

    asks_for_cached = False

    def __init__(self, random: Random, weights: Weights) -> None:
        self._random = random
        self._weights = weights

    def choose(self, view: View) -> int:
        """The less loaded of two."""
        if len(view.seats) == 1:
            return 0
        one, two = self._random.sample(range(len(view.seats)), 2)
        load = view.load(self._weights)
        return one if load[one] <= load[two] else two


class Kv:
    """The one where the request is expected to cost least.

    Cost is the load of each, and of this prompt the positions that the worker has not
    cached, at the price of positions to be computed. The form is Dynamo's router's (overlap weight
    times prefill blocks, plus decode blocks), which weighs both alike; here a position that is
    decoded is cheap beside one that is computed (docs/scaling.md). Embeddings are positions like
    any.
    """

    asks_for_cached = True

    def __init__(self, random: Random, weights: Weights) -> None:
        self._random = random
        self._weights = weights

    def choose(self, view: View) -> int:
        """The cheapest."""
        cost = view.load(self._weights)
        if view.cached is not None:
            cost -= self._weights.prefill * view.cached
        return lowest(cost, self._random)


def lowest(values: Costs, random: Random) -> int:
    """The index of the lowest value, any of several.

    Many frontends would else all choose the first.
    """
    best = np.flatnonzero(values == values.min())
    return int(best[0]) if len(best) == 1 else int(best[random.randrange(len(best))])


def policy_of(settings: RouterSettings, random: Random) -> Callable[[], Policy]:
    """Factory of the configured policy, one for each pool of workers."""
    weights = Weights(settings.router_prefill_weight, settings.router_decode_weight)
    match settings.router_policy:
        case "round-robin":
            return RoundRobin
        case "least-loaded":
            return lambda: LeastLoaded(random, weights)
        case "power-of-two":
            return lambda: PowerOfTwo(random, weights)
        case "kv":
            return lambda: Kv(random, weights)


def hash_of(name: str) -> np.uint64:
    """64 bits of a name, the same everywhere."""
    return np.uint64(int.from_bytes(blake3(name.encode()).digest(8), "little"))


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
