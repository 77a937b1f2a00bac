"""Shares with intervals. The unit is the prompt: tokens of one prompt are not independent."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from inlay_audit.score import Counts

LEVEL = 0.95
_DRAWS = 4000
_FEW = 5
_AT_A_TIME = 1 << 22
"""Elements of the weights of prompts that are drawn together."""


@dataclass(frozen=True)
class Share:
    """A share of `of` things, between `low` and `high`; all are NaN where there are none."""

    value: float
    low: float
    high: float
    of: int

    def as_json(self) -> dict[str, float | int | None]:
        """For programs; None in place of NaN."""
        if not self.of:
            return {"value": None, "low": None, "high": None, "of": 0}
        return {"value": self.value, "low": self.low, "high": self.high, "of": self.of}


def shares(counts: Counts, *, comparisons: int = 1, seed: int = 0) -> list[Share]:
    """The share of each metric, with a bootstrap interval over prompts.

    Where few prompts differ from the others, as with "0 of n", prompts drawn again hardly do: below
    five hits or misses the interval is at least Wilson's, with prompts as the unit.

    Args:
        counts: of all prompts.
        comparisons: among how many the largest is looked at: the interval is that much wider, by
            Bonferroni.
        seed: of the draws.
    """
    tail = (1 - LEVEL) / 2 / comparisons
    rng = np.random.default_rng(seed)
    prompts = len(counts)
    drawn = []
    step = max(1, _AT_A_TIME // prompts)
    for start in range(0, _DRAWS, step):
        weights = rng.multinomial(
            prompts, np.full(prompts, 1 / prompts), size=min(step, _DRAWS - start)
        )
        drawn.append(np.tensordot(weights, counts, axes=(1, 0)))
    sums = np.concatenate(drawn)
    return [_share(counts[:, metric], sums[:, metric], tail) for metric in range(counts.shape[1])]


def _share(counts: npt.NDArray[np.float64], drawn: npt.NDArray[np.float64], tail: float) -> Share:
    read, of = counts.sum(axis=0)
    if not of:
        return Share(float("nan"), float("nan"), float("nan"), 0)
    some = drawn[drawn[:, 1] > 0]
    low, high = np.quantile(some[:, 0] / some[:, 1], [tail, 1 - tail])
    held = int((counts[:, 1] > 0).sum())
    hit, missed = int((counts[:, 0] > 0).sum()), int((counts[:, 0] < counts[:, 1]).sum())
    if min(hit, missed) < _FEW or min(read, of - read) < _FEW:
        around = wilson(hit if hit <= missed else held - missed, held, tail)
        low, high = min(low, around[0]), max(high, around[1])
    return Share(float(read / of), float(low), float(high), int(of))


def wilson(successes: int, trials: int, tail: float = (1 - LEVEL) / 2) -> tuple[float, float]:
    """Wilson's interval of a share of independent trials.

    Args:
        successes: of them.
        trials: at least one.
        tail: probability beyond each end.
    """
    from statistics import NormalDist

    z = NormalDist().inv_cdf(1 - tail)
    share = successes / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z * (share * (1 - share) / trials + z * z / (4 * trials**2)) ** 0.5
    half /= 1 + z * z / trials
    return max(0.0, centre - half), min(1.0, centre + half)
