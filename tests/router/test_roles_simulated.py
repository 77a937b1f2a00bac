"""Workers of roles beside workers of both roles in the simulation: no worse by default."""

from random import Random

import pytest
from benchmarks.roles_simulation import Compared, Fleet, Outcome
from benchmarks.router_simulation import PREFILL, SimulatedRequest, trace

from inlay.messages.card import Phase
from inlay.router.settings import RouterSettings

WEIGHT = RouterSettings().router_interference_weight
MEAN_PROMPT = 3200
MOST = 1.02


def traces(load: float, workers: int) -> list[list[SimulatedRequest]]:
    rate = load * workers * PREFILL / MEAN_PROMPT
    return [trace(120, rate, 40, Random(seed)) for seed in range(1, 4)]


@pytest.mark.parametrize("load", [0.2, 0.8])
@pytest.mark.parametrize("price", [0.05, 2.0])
def test_workers_of_roles_are_no_worse_than_those_of_both(load: float, price: float) -> None:
    requests = traces(load, 9)

    def outcomes(prefill: int) -> list[Outcome]:
        phases: list[Phase] = ["prefill"] * prefill
        phases += ["decode" if prefill else "both"] * (9 - prefill)
        return [
            Fleet(phases, price, 256, WEIGHT, seed).run(some) for seed, some in enumerate(requests)
        ]

    both = outcomes(0)
    for prefill in (1, 4):
        found = outcomes(prefill)
        for apart, whole in zip(found, both, strict=True):
            # Who hands nothing over does all as the others.
            assert apart.handed or apart == whole
        for number in range(4):
            pairs = [(one[number], other[number]) for one, other in zip(found, both, strict=True)]
            assert Compared.of(pairs).mean <= MOST, (prefill, Outcome._fields[number])
