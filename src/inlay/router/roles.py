"""Roles of a pool's workers as weights: who computes a prompt for whom, and who does all of it."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from inlay.card import ModelCard
from inlay.router.policies import Positions
from inlay.router.settings import RouterSettings

_OUT_OF_ROLE = 4.0
"""Requests that a request counts as, which prompts delay, where a prefill worker decodes it.

With the weight of interference it is the strength of roles: all of a prompt where that weight is
0.25. Where fetching a prompt costs more they are no constraint: so it is by default.
"""


class Scene(NamedTuple):
    """Loads and a prompt that roles are weighed against; arrays have an element for each seat.

    Attributes:
        requests: of each worker.
        prefill: positions of prompts each still has to compute.
        decode: positions of the sequences each is decoding.
        spared: positions of the prompt that each need not compute.
        length: positions of the prompt.
        price: of a position that is fetched, in positions that are computed.
    """

    requests: Positions
    prefill: Positions
    decode: Positions
    spared: Positions
    length: int
    price: float


class Roles:
    """The roles of workers that take whole requests, too.

    Args:
        cards: of the pool's members, by seat.
        settings: of the router.

    Attributes:
        prefills: of prefill workers, by seat.
    """

    def __init__(self, cards: Sequence[ModelCard], settings: RouterSettings) -> None:
        phases = ["" if card.kv_rooms else card.phase for card in cards]
        self.prefills = np.array([phase == "prefill" for phase in phases], bool)
        self._decodes = np.array([phase == "decode" for phase in phases], bool)
        self._delay = settings.router_interference_weight
        self._weight = settings.router_prefill_weight
        self._decode_weight = settings.router_decode_weight

    def taking_whole(self, seats: Positions, scene: Scene) -> Positions:
        """Return those of some seats, prefill workers or others, that are to take a whole request.

        All of them where a prompt costs more to fetch than the requests that it would delay: kept
        apart, fewer workers would share the requests, and nobody would gain by that.
        """
        prefills = self.prefills[seats]
        interference = _OUT_OF_ROLE * self._delay
        if interference <= scene.price or not prefills.any() or prefills.all():
            return seats
        costs = self._weight * (scene.prefill - scene.spared)[seats]
        costs += self._decode_weight * scene.decode[seats]
        out_of_role = self._weight * interference * scene.length
        overflows = costs[prefills].min() + out_of_role < costs[~prefills].min()
        found: Positions = seats[prefills if overflows else ~prefills]
        return found

    def prefiller(self, seat: int, able: Positions, scene: Scene) -> int | None:
        """Return the seat that is to compute a prompt for the worker at `seat`, if any is.

        Computed there, the prompt waits for the prompts before it, and, at a decode worker, delays
        each sequence that runs. Computed elsewhere, its pages have a price, and sequences count as
        in any choice, as far as there are more; where it would run beside as many requests as here,
        nobody gains by that.

        Args:
            seat: chosen for the request.
            able: seats of workers that may compute the prompt.
            scene: as it is.
        """
        requests = scene.requests
        able = able[self.prefills[able] & (requests[able] < requests[seat])]
        if self.prefills[seat] or not len(able):
            return None
        work = scene.length - int(scene.spared[seat])
        here = work * (1 + self._delay * int(requests[seat]) * bool(self._decodes[seat]))
        there = (1 + self._delay * (scene.decode[able] > 0)) * (scene.length - scene.spared[able])
        decoded = np.maximum(scene.decode[able] - scene.decode[seat], 0)
        queued = scene.prefill[able] - scene.prefill[seat]
        more = queued + there + scene.price * work - here
        costs = self._weight * more + self._decode_weight * decoded
        best = int(np.argmin(costs))
        return int(able[best]) if costs[best] < 0 else None
