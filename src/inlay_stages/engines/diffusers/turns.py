"""Jobs in progress, and whose turn it is. Pure Python.

Every job keeps its state between steps, which is small beside the models. So a step takes jobs of
all clients in turn, each client's in order of arrival, up to a budget of positions: a client that
comes late has its turn in the next step, and one that is alone has all of it.

On a GPU the others of a step cost a job little. On a CPU it waits for each of them: there no client
has more of a step than one that has nothing else, so that many jobs of one do not slow those of
others down by as many.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Protocol, TypeVar

from inlay.base.fair_queue import FairQueue


class Turn(Protocol):
    """A job, as turns are given."""

    @property
    def client(self) -> Hashable:
        """The client that it belongs to."""

    @property
    def priority(self) -> int:
        """Lower is sooner."""

    @property
    def cost(self) -> int:
        """Positions that its next step computes; 0: its next work is done alone."""


J = TypeVar("J", bound=Turn)


def take(queue: FairQueue[J], budget: int, most: int, *, equal: bool = False) -> list[J]:
    """Take the jobs whose turn it is: several with a cost within `budget`, or one without.

    The first is taken whatever its cost. A job without cost that would be among them is done first,
    alone: it is new, and can share steps afterwards, or it is at its end.

    Args:
        queue: of jobs; those not returned stay, before others of their clients.
        budget: positions of a step.
        most: jobs of a step.
        equal: no client has more positions than one of which all jobs are taken.
    """
    taken: list[J] = []
    alone: J | None = None
    had: Counter[Hashable] = Counter()
    while queue and len(taken) < most:
        job = queue.take()
        if equal and had[job.client] and had[job.client] >= _least(queue, had, job.client):
            queue.put_back(job, job.client, job.priority)
            break
        if not job.cost:
            alone = job
            break
        if taken and job.cost > budget:
            queue.put_back(job, job.client, job.priority)
            break
        taken.append(job)
        had[job.client] += job.cost
        budget -= job.cost
    if alone is None:
        return taken
    put_back(queue, taken)
    return [alone]


def _least(queue: FairQueue[J], had: Counter[Hashable], client: Hashable) -> float:
    """Positions of the one that has fewest, of the other clients with nothing left in `queue`."""
    others = (each for each in had if each != client and queue.first_of(each) is None)
    return min((had[each] for each in others), default=math.inf)


def put_back(queue: FairQueue[J], jobs: Sequence[J]) -> None:
    """Put jobs that were taken before others of their clients, in the same order."""
    for job in reversed(jobs):
        queue.put_back(job, job.client, job.priority)
