"""Workers that do one phase of a request alone, and take a whole one two at a time.

Their card says `kv_rooms`. A decode worker stands for a pair: it is chosen where some prefill
worker of its form may have the prompt.
"""

from collections.abc import Sequence
from secrets import randbelow
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from inlay.address import KvRoom
from inlay.card import ModelCard
from inlay.errors import EngineError
from inlay.request import Request, Sampling
from inlay.router.policies import Positions
from inlay.transport.api import Worker

_MOST_ROOMS = 2**63 - 1


class Paired(NamedTuple):
    """The workers that a whole request may go to, and what each pair has of it.

    Attributes:
        seats: of workers that do both phases, and of decode workers with a prefill worker.
        partners: by seat of a decode worker, that of its prefill worker.
        prefill: as it was given, but for decode workers, which have that of their prefill workers.
        spared: likewise.
    """

    seats: Positions
    partners: dict[int, int]
    prefill: Positions
    spared: Positions


class Halves:
    """The seats of a pool whose workers do one phase alone.

    Args:
        cards: of the pool's members, by seat.
    """

    def __init__(self, cards: Sequence[ModelCard]) -> None:
        kinds = sorted({card.kv_rooms for card in cards} - {""})
        kind = [kinds.index(card.kv_rooms) + 1 if card.kv_rooms else 0 for card in cards]
        self._kind: Positions = np.array(kind, np.int64)
        self._decodes = np.array([card.phase == "decode" for card in cards], bool)
        self._there_are = bool(kinds)

    def pair(self, seats: Positions, prefill: Positions, spared: Positions) -> Paired:
        """Give each decode worker the prefill worker that has to compute least.

        Args:
            seats: of workers that may be chosen.
            prefill: positions that each of the pool's members has to compute.
            spared: positions of the prompt that each need not compute.
        """
        if not self._there_are:
            return Paired(seats, {}, prefill, spared)
        partners = self._partners(seats, prefill - spared)
        decodes, prefills = list(partners), list(partners.values())
        prefill, spared = prefill.copy(), spared.copy()
        prefill[decodes], spared[decodes] = prefill[prefills], spared[prefills]
        whole = (self._kind[seats] == 0) | np.isin(seats, decodes)
        return Paired(seats[whole], partners, prefill, spared)

    def suffice(self, seats: Positions) -> bool:
        """True if a whole request may go to some of these seats."""
        if not self._there_are:
            return len(seats) > 0
        nothing = np.zeros_like(self._kind)
        return len(self.pair(seats, nothing, nothing).seats) > 0

    def _partners(self, seats: Positions, costs: Positions) -> dict[int, int]:
        found: dict[int, int] = {}
        kinds = self._kind[seats]
        for kind in np.unique(kinds[kinds > 0]).tolist():
            alike, decodes = seats[kinds == kind], self._decodes[seats[kinds == kind]]
            prefills = alike[~decodes]
            if len(prefills):
                best = int(prefills[np.argmin(costs[prefills])])
                found |= dict.fromkeys(alike[decodes].tolist(), best)
        return found


def with_partners(workers: Sequence[Worker]) -> list[Worker]:
    """Return those of some workers that can take a whole request, alone or with one of them."""
    there = {(one.card.kv_rooms, one.card.phase) for one in workers}
    return [
        one
        for one in workers
        if not one.card.kv_rooms
        or {(one.card.kv_rooms, phase) for phase in ("prefill", "decode")} <= there
    ]


def room_at(card: ModelCard) -> KvRoom:
    """Return a new room at the prefill worker with this card.

    Raises:
        EngineError: its card does not say where it is found.
    """
    if card.bootstrap is None:
        raise EngineError("a prefill worker's card does not say where decode workers find it")
    return KvRoom(*card.bootstrap, 1 + randbelow(_MOST_ROOMS))


def prompt_part(request: Request) -> Request:
    """Return the part of a request in a room that its prefill worker has: prompt and first token.

    The decode worker takes that token as its own, so it is drawn with the request's parameters. It
    has an id of its own: the prompt of the attempt before may not have ended there yet.
    """
    sampling: Sampling = request.sampling
    most = min(sampling.max_tokens, len(request.prior_output) + 1)
    id_ = f"{request.id}/prompt-{request.attempt}"
    return replace(request, id=id_, params=replace(sampling, max_tokens=most))
