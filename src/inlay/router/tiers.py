"""Tiers behind workers' caches, as a router knows them: what is in each, and at what price."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from inlay.digest import BLOCK_SIZE
from inlay.router.key_table import Keys
from inlay.router.kv_index import KvIndex
from inlay.router.member import PoolMember
from inlay.router.policies import Costs, Positions


class _OfSize(NamedTuple):
    """Tiers whose pages have so many blocks: seat, holder and price of each."""

    blocks: int
    seats: Positions
    holders: Positions
    prices: Costs


class Tiers:
    """The tiers of all workers of a pool.

    Args:
        members: by seat.
        unmeasured: price of a position while a worker has measured none.
    """

    def __init__(self, members: Sequence[PoolMember], unmeasured: float) -> None:
        found = [
            (seat, max(1, member.card.block_size // BLOCK_SIZE), tier)
            for seat, member in enumerate(members)
            for tier in member.tiers.values()
        ]
        self._of_sizes = [
            _OfSize(
                size,
                np.array([seat for seat, blocks, _ in found if blocks == size], np.int64),
                np.array([tier.holder for _, blocks, tier in found if blocks == size], np.int64),
                np.array(
                    [
                        unmeasured if tier.price is None else tier.price
                        for _, blocks, tier in found
                        if blocks == size
                    ],
                    np.float64,
                ),
            )
            for size in sorted({blocks for _, blocks, _ in found})
        ]

    def spared(self, spared: Positions, cached: Positions, keys: Keys, index: KvIndex) -> Positions:
        """Return the positions that each worker need not compute, by seat.

        Args:
            spared: without tiers.
            cached: that each has in its cache.
            keys: of the prompt's blocks.
            index: of the pool.
        """
        found = spared.copy() if self._of_sizes else spared
        for blocks, seats, holders, prices in self._of_sizes:
            # Of pages that only a tier has, the last blocks alone are known.
            pages = index.overlap(keys[blocks - 1 :: blocks])[holders].astype(np.int64)
            more = np.maximum(pages * blocks * BLOCK_SIZE - cached[seats], 0)
            gained = np.maximum(1 - prices, 0) * more
            np.maximum.at(found, seats, cached[seats] + gained.astype(np.int64))
        return found
