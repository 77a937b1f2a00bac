"""Whose drawings are computed in a step."""

from dataclasses import dataclass

import pytest

from inlay.base.fair_queue import FairQueue
from inlay_stages.engines.diffusers.turns import put_back, take

COST = 100
"""Positions of a step of one drawing."""


@dataclass(eq=False)
class Drawing:
    client: str
    steps: int = 5
    priority: int = 0
    begun: bool = False

    @property
    def cost(self) -> int:
        return COST if self.begun else 0


def queue_of(*, begun: bool = False, **counts: int) -> FairQueue[Drawing]:
    queue: FairQueue[Drawing] = FairQueue()
    for client, count in counts.items():
        for _ in range(count):
            queue.push(Drawing(client, begun=begun), client, 0)
    return queue


def step(queue: FairQueue[Drawing], *, equal: bool) -> list[Drawing]:
    """Do one turn, as the engine does."""
    jobs = take(queue, 2048, 64, equal=equal)
    if jobs and not jobs[0].begun:
        jobs[0].begun = True
    else:
        for job in jobs:
            job.steps -= 1
    put_back(queue, [job for job in jobs if job.steps])
    return jobs


@pytest.mark.parametrize(("equal", "positions"), [(True, 10 * COST), (False, 45 * COST)])
def test_one_drawing_of_a_client_waits_for_as_much_of_another_as_it_costs(
    equal: bool, positions: int
) -> None:
    """Where a step takes as long as all of it, that is on a CPU."""
    queue = queue_of(many=8, one=1)
    computed = 0
    while any(job.client == "one" for job in queue):
        jobs = step(queue, equal=equal)
        computed += sum(job.cost for job in jobs if job.steps < 5)
    assert computed == positions


def test_clients_with_many_drawings_each_have_as_much_of_a_step() -> None:
    queue = queue_of(begun=True, a=6, b=3, c=3)
    clients = [job.client for job in take(queue, 2048, 64, equal=True)]
    assert sorted(clients) == ["a"] * 3 + ["b"] * 3 + ["c"] * 3


def test_one_who_is_alone_has_all_of_a_step() -> None:
    assert len(take(queue_of(begun=True, a=6), 2048, 64, equal=True)) == 6
