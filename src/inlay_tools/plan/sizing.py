"""The smallest fleet that keeps targets."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from inlay_tools.plan.fleet import Demand, FleetTimes, PaperFleet, StepTimes, requests_of

MOST_WORKERS = 1024
_NO_GAIN = 0.98
"""Twice the workers that bring the times to no less than this share of them are of no use."""


class FleetLayout(NamedTuple):
    """Workers by role: of both where `prefill` is 0."""

    decode: int
    prefill: int = 0

    @property
    def workers(self) -> int:
        """All of them."""
        return self.decode + self.prefill


class Tried(NamedTuple):
    """A fleet that was simulated.

    Attributes:
        excess: the largest ratio of a time to its target; up to 1 all are kept.
    """

    excess: float
    layout: FleetLayout
    outcome: FleetTimes


@dataclass(frozen=True)
class Sizing:
    """Looks for the smallest fleet by simulating some.

    Attributes:
        times: of a worker.
        targets: bounds of the 95th percentiles of `ttft` and `itl`, in seconds.
        fetch_share: time of a position that is handed over, as a share of computing it.
        requests: to simulate.
        seed: of these requests.
    """

    times: StepTimes
    targets: Mapping[str, float]
    fetch_share: float
    requests: int
    seed: int

    def least(self, demand: Demand, *, divided: bool) -> tuple[Tried, Tried | None]:
        """The smallest fleet that keeps the targets, and what one worker fewer would do.

        Where none keeps them, the first is the one from which on more workers gain nothing.

        Args:
            demand: the requests that come.
            divided: prompts are computed by workers of their own.
        """
        tried: dict[int, Tried] = {}

        def excess(workers: int) -> float:
            if workers not in tried:
                layouts = self._layouts(demand, workers, divided)
                tried[workers] = min(self._try(demand, layout) for layout in layouts)
            return tried[workers].excess

        fewest = 2 if divided else 1
        low = high = min(max(math.ceil(sum(self._work(demand))), fewest), MOST_WORKERS)
        while excess(high) > 1 and high < MOST_WORKERS:
            low, high = high + 1, min(2 * high, MOST_WORKERS)
            if excess(high) > max(_NO_GAIN * excess(low - 1), 1):
                return tried[high], None
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if excess(middle) <= 1 else (middle + 1, high)
        if high > fewest:
            excess(high - 1)
        return tried[high], tried.get(high - 1)

    def _work(self, demand: Demand) -> tuple[float, float]:
        """Workers that prompts and tokens keep busy, were all steps full."""
        times = self.times
        prompts = demand.rate * demand.input_len * (1 - demand.cached_share)
        per_token = times.per_sequence + times.step / times.max_num_seqs
        return prompts * times.per_position, demand.rate * demand.output_len * per_token

    def _layouts(self, demand: Demand, workers: int, divided: bool) -> list[FleetLayout]:
        if not divided:
            return [FleetLayout(workers)]
        prompts, tokens = self._work(demand)
        about = round(workers * prompts / (prompts + tokens))
        prefill = {min(max(about + more, 1), workers - 1) for more in (-1, 0, 1)}
        return [FleetLayout(workers - some, some) for some in sorted(prefill)]

    def _try(self, demand: Demand, layout: FleetLayout) -> Tried:
        fleet = PaperFleet(self.times, *layout, self.fetch_share)
        outcome = fleet.run(requests_of(demand, self.requests, self.seed))
        seen = {"ttft": outcome.first, "itl": outcome.gap}
        return Tried(max(seen[key] / bound for key, bound in self.targets.items()), layout, outcome)
