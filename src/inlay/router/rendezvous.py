"""Requests of one session go to one worker, which all frontends agree on without a word."""

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from inlay.router.policies import Positions

Hashes = npt.NDArray[np.uint64]

_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def hash_of(name: str) -> np.uint64:
    """64 bits of a name, the same everywhere."""
    return np.uint64(int.from_bytes(blake3(name.encode()).digest(8), "little"))


def rendezvous_hash(session: str, workers: Hashes, requests: Positions, slack: float) -> int:
    """The index of a session's worker.

    The first in the session's own order that has no more than its share under way.

    The order is rendezvous hashing (Thaler, Ravishankar 1998): when a worker comes or goes only the
    sessions move that go to it or were with it. The bound is that of consistent hashing with
    bounded loads (Mirrokni, Thorup, Zadimoghaddam 2018): the average with this request, times 1 +
    `slack`.

    Args:
        session: whatever names it.
        workers: `hash_of` each worker's id; at least one.
        requests: each has under way.
        slack: at least 0.
    """
    # The finisher of splitmix64.
    mixed = workers ^ hash_of(session)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[0]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[1]
    mixed ^= mixed >> np.uint64(31)
    most = np.ceil((1 + slack) * (requests.sum() + 1) / len(requests))
    return int(np.argmax(np.where(requests < most, mixed, 0)))
