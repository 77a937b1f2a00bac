"""Changes of what attention is given, and of the heads that products give it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from inlay.engine.torch.attention.paged import Scoring
from inlay.engine.torch.weights.fused import FusedAttention
from tests.numbers.seeding import AttentionChange, Seeding


def swapped(heads: Tensor) -> Tensor:
    return torch.cat([heads[-1:], heads[1:-1], heads[:1]]) if len(heads) > 1 else heads


def swap_queries(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Any:
    return swapped(q), k, v, scoring


def swap_keys(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Any:
    return q, swapped(k), v, scoring


def swap_channels(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Any:
    new = q.clone()
    new[0, :, :2] = q[0, :, :2].flip(-1)
    return new, k, v, scoring


def tile(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Any:
    if 1 < len(k) < len(q):
        # Keys and values of groups take turns instead of standing side by side.
        q = q.view(len(k), -1, *q.shape[1:]).transpose(0, 1).flatten(0, 1)
    return q, k, v, scoring


def no_values(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Any:
    new = v.clone()
    new[0] = 0
    return q, k, new, scoring


def scores(factor: float) -> AttentionChange:
    def change(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Any:
        return q, k, v, scoring._replace(scaling=factor * scoring.scaling)

    return change


def scored(**values: Any) -> AttentionChange:
    def change(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Any:
        return q, k, v, scoring._replace(**values)

    return change


def window(change: Callable[[int], int | None]) -> AttentionChange:
    def narrowed(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Any:
        if isinstance(scoring.window, int):
            scoring = scoring._replace(window=change(scoring.window))
        return q, k, v, scoring

    return narrowed


def of_next_head(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Any:
    assert scoring.sinks is not None
    return q, k, v, scoring._replace(sinks=scoring.sinks.roll(1))


def neighbours(into: Seeding) -> None:
    """Rotate channels 0 and 1, 2 and 3, and so on, in place of those of two halves.

    That is the same as another order of the channels of queries and keys. Only where whole heads
    are rotated.
    """
    for layer, shape in zip(into.layers, into.model.layers, strict=True):
        size = shape.key_size
        order = torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2)])
        for module in layer.modules():
            if isinstance(module, FusedAttention):
                count = size * (module.query_heads + shape.num_heads)
                into.after(module.project, _ordered(order, count))
                weights = module.norms or ()
            elif hasattr(module, "k_proj"):
                for part in (module.q_proj, module.k_proj):
                    into.after(part, _ordered(order))
                norms = (getattr(module, name, None) for name in ("q_norm", "k_norm"))
                weights = tuple(norm.weight for norm in norms if norm is not None)
            else:
                continue
            for weight in weights:
                into.fill(weight, weight[order])


def _ordered(order: Tensor, count: int | None = None) -> Any:
    def change(_: Tensor, found: Tensor) -> Tensor:
        heads, others = found[..., :count], found[..., count:] if count else found[..., :0]
        moved = heads.view(*heads.shape[:-1], -1, len(order))[..., order].flatten(-2)
        return torch.cat([moved, others], -1)

    return change
