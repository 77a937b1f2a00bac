"""Attention over pages on a CPU by native kernels, without a copy of keys and values.

The kernel handles sequences with one query in the batch. Several queries with many keys are large
products, for which oneDNN over gathered pages is faster.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from inlay.engine.torch.attention.gathered import GatheredAttention, Workspace
from inlay.engine.torch.attention.paged import Scoring
from inlay.engine.torch.attention.pages import Pages
from inlay.engine.torch.batch import Batch
from inlay.engine.torch.native import DecodeShape, Kernels


class Projection(NamedTuple):
    """Output of the fused query-key-value product, and the steps to apply before attention.

    Attributes:
        heads: [T, (Q + 2 H) * D], query, key and value heads of each position, contiguous.
        cosine: [T, R] of the rotary embedding, R <= D; halves, as in transformers' Llama.
        sine: [T, R].
        norms: weights [D] float32 of the norms of query heads and key heads, or None.
        eps: epsilon of the norms.
        query_heads: Q.
    """

    heads: Tensor
    cosine: Tensor
    sine: Tensor
    norms: tuple[Tensor, Tensor] | None
    eps: float
    query_heads: int


class NativeAttention:
    """A `PagedAttention` that can also start from a `Projection`, in one pass."""

    def __init__(
        self,
        batch: Batch,
        pages: Pages,
        workspace: Workspace,
        kernels: Kernels,
        *,
        float32_scores: bool = False,
    ) -> None:
        self._batch = batch
        self._pages = pages
        self._kernels = kernels
        self._gathered = GatheredAttention(
            batch, pages, workspace, float32_scores=float32_scores, single_queries=False
        )
        self._several = any(count > 1 for count in batch.counts)
        self._slots = batch.slots.unbind()
        self._shapes: dict[tuple[int, int | None], DecodeShape | None] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Attend as `PagedAttention.attend` does."""
        slots = self._slots[self._pages.groups[layer]]
        self._pages.write(layer, slots, key[:, : len(slots)], value[:, : len(slots)])
        return self._attend(layer, query.transpose(0, 1), scoring)

    def attend_projected(self, layer: int, projection: Projection, scoring: Scoring) -> Tensor:
        """Attend with the queries, keys and values of `projection`; returns [T, Q, D]."""
        query = self._kernels.prepare(
            projection.heads,
            projection.cosine,
            projection.sine,
            projection.norms,
            projection.eps,
            self._slots[self._pages.groups[layer]],
            self._pages.keys[layer],
            self._pages.values[layer],
            projection.query_heads,
        )
        return self._attend(layer, query, scoring)

    def _attend(self, layer: int, query: Tensor, scoring: Scoring) -> Tensor:
        """Attend with queries [T, Q, D]."""
        keys, values = self._pages.keys[layer], self._pages.values[layer]
        out = query.new_empty(query.shape[0], query.shape[1], values.shape[3])
        out[len(self._slots[0]) :] = 0
        if self._several:
            self._gathered.fill(out, layer, query.transpose(0, 1), scoring)
        kind = (self._pages.groups[layer], scoring.window)
        if kind not in self._shapes:
            self._shapes[kind] = self._shape(*kind)
        shape = self._shapes[kind]
        if shape is not None:
            sinks = None if scoring.sinks is None else scoring.sinks.float()
            self._kernels.paged_decode(
                out, query, keys, values, shape, scoring.scaling, scoring.softcap or 0.0, sinks
            )
        return out

    def _shape(self, group: int, window: int | None) -> DecodeShape | None:
        """Return the sequences with one query in the batch; None if there are none."""
        counts = torch.tensor(self._batch.counts, dtype=torch.int32)
        spans = (counts == 1).nonzero().squeeze(1).int()
        if not len(spans):
            return None
        rows = (counts.cumsum(0, dtype=torch.int32) - 1)[spans]
        contexts = torch.tensor(self._batch.contexts, dtype=torch.int32)[spans]
        return DecodeShape(
            self._batch.block_table[group].contiguous(), spans, rows, contexts, window or 0
        )
