"""Candidates for the nearest points, found in bfloat16. Needs torch.

A product of bfloat16 takes a third of the time of one of float32 where the CPU has instructions for
it. Its error has a bound (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1), so
whatever may be among the best is kept, and nothing is lost.
"""

import numpy as np
import torch
from torch import Tensor

from inlay_audit.attackers.lookup import Values
from inlay_audit.prompts import Ids

_BLOCK = 8192
_UNIT = 2.0**-9
"""Of a number, by which it changes at most where it is rounded to bfloat16."""
_SUMMED = 2.0**-23
"""Likewise of each sum in float32, doubled."""
_MOST = 1024
"""Candidates of a row, on average, above which they do not pay."""
_GROUPS = 256
"""Groups of a block: the `count` largest of their maxima are no more than the `count` largest."""


def pays() -> bool:
    """True if this CPU multiplies bfloat16 faster than float32."""
    able = torch.cpu.get_capabilities()
    return any(able.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


@torch.inference_mode()
def find(
    rows: Values, points: Values, bias: Values, reach: float, count: int
) -> tuple[Ids, Ids] | None:
    """`lookup.FindCandidates`."""
    width = rows.shape[1]
    finite = np.isfinite(bias)
    # A constant for all points changes no order, and what is near 0 is rounded less.
    centred = np.where(finite, bias.astype(np.float64) - bias[finite].mean(dtype=np.float64), 0)
    beside = torch.from_numpy(centred)
    high = beside.bfloat16()
    left = torch.ones(len(rows), width + 2, dtype=torch.bfloat16)
    left[:, :width] = torch.from_numpy(rows)
    bound = torch.from_numpy(_bound(rows, reach, float(beside.abs().max())))
    best = torch.full((len(rows), count), -torch.inf)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    total = 0
    for start in range(0, len(points), _BLOCK):
        block = points[start : start + _BLOCK]
        right = torch.empty(len(block), width + 2, dtype=torch.bfloat16)
        right[:, :width] = torch.from_numpy(block)
        right[:, width] = high[start : start + len(block)]
        right[:, width + 1] = (beside - high.double())[start : start + len(block)]
        scored = left @ right.T
        gone = np.flatnonzero(~finite[start : start + len(block)])
        if len(gone):
            scored[:, torch.from_numpy(gone)] = -torch.inf
        best = torch.cat([best, _some_large(scored, count)], dim=1).topk(count).values
        least = _least(best[:, -1], bound)
        of, places = (scored >= least[:, None]).nonzero(as_tuple=True)
        found.append((of, start + places, scored[of, places]))
        total += len(of)
        if total > (_MOST + 16 * count) * len(rows):
            return None
    of, ids, values = (torch.cat(each) for each in zip(*found, strict=True))
    kept = values >= least[of]
    of, ids = of[kept], ids[kept]
    order = of.argsort(stable=True)
    return of[order].numpy(), ids[order].numpy()


def _bound(rows: Values, reach: float, beside: float) -> Values:
    """(n,) by how much a score may be wrong before it is itself rounded."""
    product = np.linalg.norm(rows.astype(np.float64), axis=1) * reach
    summed = (rows.shape[1] + 2) * _SUMMED
    # By Cauchy and Schwarz; both factors are rounded, the second one of `beside` alone.
    found: Values = (
        (2.02 * _UNIT + 1.01 * summed) * product + (_UNIT**2 + 2 * summed) * beside
    ).astype(np.float32)
    return found


def _some_large(scored: Tensor, count: int) -> Tensor:
    """(n, k) of scores (n, v), of which the `count` largest are no more than those of all."""
    if count == 1:
        return scored.amax(dim=1, keepdim=True).float()
    if scored.shape[1] % _GROUPS or count > _GROUPS // 2:
        return scored.topk(min(count, scored.shape[1])).values.float()
    return scored.view(len(scored), -1, _GROUPS).amax(dim=1).topk(count).values.float()


def _least(best: Tensor, bound: Tensor) -> Tensor:
    """(n,) the score in bfloat16 from which on a point may be better than that with `best`."""
    # Both that score and the other one are rounded; and so is what is returned.
    low = best - 2 * _UNIT * best.abs() - 2 * bound
    return (low - 4 * _UNIT * low.abs()).bfloat16()
