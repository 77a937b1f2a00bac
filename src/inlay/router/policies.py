"""How one of several workers is chosen. All policies look at the same view, and none of them at anything else."""

from collections.abc import Callable
from random import Random
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from inlay.router.settings import RouterSettings

Positions: TypeAlias = npt.NDArray[np.int64]


class View(NamedTuple):
    """The workers that may get a work, at least one; arrays have an element for each.

    Attributes:
        seats: what tells them apart, ascending.
        prefill: positions of prompts each still has to compute.
        decode: positions of the sequences each is decoding.
        cached: positions each has of this prompt, from its beginning on; only where the policy asks for it.
        length: positions of this prompt.
    """

    seats: Positions
    prefill: Positions
    decode: Positions
    cached: Positions | None
    length: int

    @property
    def load(self) -> Positions:
        """Positions each has under way."""
        return self.prefill + self.decode


class Policy(Protocol):
    """A way to choose."""

    @property
    def asks_for_cached(self) -> bool:
        """Whether it looks at what is cached where."""
        ...

    def choose(self, view: View) -> int:
        """Which of the view's workers: an index into its arrays."""
        ...


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
    """The one with the fewest positions under way; any of several."""

    asks_for_cached = False

    def __init__(self, random: Random) -> None:
        self._random = random

    def choose(self, view: View) -> int:
        """The least loaded."""
        return lowest(view.load, self._random)


class PowerOfTwo:
    """The less loaded of two at random.

    Nearly as even as the least loaded of all, and frontends that learn of each other's loads late do not all choose the same
    (Mitzenmacher, "The power of two choices in randomized load balancing", 2001).
    """

    asks_for_cached = False

    def __init__(self, random: Random) -> None:
        self._random = random

    def choose(self, view: View) -> int:
        """The less loaded of two."""
        if len(view.seats) == 1:
            return 0
        one, two = self._random.sample(range(len(view.seats)), 2)
        load = view.load
        return one if load[one] <= load[two] else two


class Kv:
    """The one where the work is expected to cost least.

    Cost, in positions: `prefill_weight` times those the worker would have to compute before this prompt's first token (what waits
    there, and of this prompt what it has not cached), and `decode_weight` times those of the sequences it decodes, which every step
    reads again. The form is Dynamo's (overlap weight times prefill blocks, plus decode blocks); embeddings are positions like any.
    """

    asks_for_cached = True

    def __init__(self, random: Random, *, prefill_weight: float, decode_weight: float) -> None:
        self._random = random
        self._prefill_weight = prefill_weight
        self._decode_weight = decode_weight

    def choose(self, view: View) -> int:
        """The cheapest."""
        to_compute = view.prefill + view.length
        if view.cached is not None:
            to_compute -= view.cached
        return lowest(self._prefill_weight * to_compute + self._decode_weight * view.decode, self._random)


def lowest(values: npt.NDArray[np.float64] | Positions, random: Random) -> int:
    """The index of the lowest value, any of several: many frontends would else all choose the first."""
    best = np.flatnonzero(values == values.min())
    return int(best[0]) if len(best) == 1 else int(best[random.randrange(len(best))])


def policy_of(settings: RouterSettings, random: Random) -> Callable[[], Policy]:
    """What makes the policy that is set, one for each pool of workers."""
    match settings.router_policy:
        case "round-robin":
            return RoundRobin
        case "least-loaded":
            return lambda: LeastLoaded(random)
        case "power-of-two":
            return lambda: PowerOfTwo(random)
        case "kv":
            return lambda: Kv(
                random,
                prefill_weight=settings.router_prefill_weight,
                decode_weight=settings.router_decode_weight,
            )
