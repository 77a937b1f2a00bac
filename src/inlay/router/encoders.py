"""The encode workers that a language model's worker may ask for the rows of a prompt's media."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from inlay.address import Address
from inlay.card import ModelCard
from inlay.prompt import Media, Prompt
from inlay.request import Request, Source, Task
from inlay.router.member import PoolMember
from inlay.router.policies import rendezvous_hash
from inlay.router.pool import Pool

MAX_PEERS = 3
"""Encode workers that are named for one item."""


class _Member(NamedTuple):
    """An encode worker, its address, and the pool that has its load."""

    pool: Pool
    member: PoolMember
    address: Address


class Encoding(NamedTuple):
    """The items of a request, each with the worker that is to encode it first, and its rows."""

    items: tuple[tuple[_Member, int], ...] = ()
    client: str | None = None

    def begin(self) -> Callable[[], None]:
        """Add the items to the loads of their workers; what is returned takes them off again."""
        for one, rows in self.items:
            one.pool.change(one.member, requests=1, prefill=rows, client=self.client)

        def end() -> None:
            for one, rows in self.items:
                one.pool.change(one.member, requests=-1, prefill=-rows, client=self.client)

        return end


class Encoders:
    """Encode workers by their encoder.

    An item goes to the worker that has most likely encoded it before: the first in the item's own
    order of workers, the same at every frontend, that has not much more to do than others. So no
    state is kept for an item, and none is told to anybody.

    Args:
        pools: all there are.
        slack: of `rendezvous_hash`.
    """

    def __init__(self, pools: Iterable[Pool], slack: float) -> None:
        self._slack = slack
        self._by_encoder: dict[tuple[str, str], list[_Member]] = {}
        for pool in pools:
            for member in pool.members.values():
                card = member.card
                if (
                    card.role is Task.ENCODE
                    and card.media is not None
                    and card.address is not None
                    and not card.asleep
                ):
                    key = card.media.encoder_id, card.dtype
                    self._by_encoder.setdefault(key, []).append(_Member(pool, member, card.address))

    def assign(self, request: Request, card: ModelCard) -> tuple[Request, Encoding]:
        """Name in `request` the workers that encode its media for a worker with this card.

        Returns:
            The request, and what is to be encoded, whose load counts once it begins.
        """
        if request.sources:
            request = msgspec.structs.replace(request, sources=())
        if card.media is None or request.task is not Task.GENERATE:
            return request, Encoding()
        members = self._by_encoder.get((card.media.encoder_id, card.dtype))
        if not members:
            return request, Encoding()
        items = _items(request.prompt)
        if not items:
            return request, Encoding()
        ranked = [self._ranked(f"{request.salt}/{name.hex()}", members) for name in items]
        sources = tuple(
            Source(name, tuple(one.address for one in some))
            for name, some in zip(items, ranked, strict=True)
        )
        first = tuple((some[0], rows) for some, rows in zip(ranked, items.values(), strict=True))
        return msgspec.structs.replace(request, sources=sources), Encoding(first, request.client)

    def _ranked(self, name: str, members: list[_Member]) -> list[_Member]:
        """Return some workers for an item, the first to ask first."""
        rest = list(members)
        ranked: list[_Member] = []
        while rest and len(ranked) < MAX_PEERS:
            hashes = np.array([one.member.hash for one in rest], np.uint64)
            loads = np.array([one.member.load.requests for one in rest], np.int64)
            ranked.append(rest.pop(rendezvous_hash(name, hashes, loads, self._slack)))
        return ranked


def _items(prompt: Prompt) -> dict[bytes, int]:
    """Return the rows of each item of media in `prompt` by its digest."""
    return {
        segment.digest: segment.total for segment in prompt.segments if isinstance(segment, Media)
    }
