"""Attention over pages on a CPU by the native kernel (`native/attention.cpp`).

Scores and sums are float32, whatever the dtype.
"""

import sys

import torch
from torch import Tensor

from inlay.engine.torch.attention.paged import Projection, Scoring
from inlay.engine.torch.attention.pages import Pages
from inlay.engine.torch.batch import Batch, Workspace
from inlay.engine.torch.native import AttentionShape, Kernels
from inlay.engine.torch.windows import Chunk, Window


class NativeAttention:
    """A `PagedAttention` that can also start from a `Projection`, in one pass.

    Attributes:
        pages: keys and values.
        slots: where the batch's keys and values go, of each layer [stored] int64.
    """

    def __init__(
        self,
        batch: Batch,
        pages: Pages,
        workspace: Workspace,
        kernels: Kernels,
        *,
        invariant: bool = False,
    ) -> None:
        """Prepare attention for `batch`; `invariant` as in `AttentionShape`."""
        self._invariant = invariant
        self._batch = batch
        self.pages = pages
        self._workspace = workspace
        self._kernels = kernels
        # As kernels read them: those of several groups may lie by turns.
        self.slots = [*map(batch.slots.contiguous().unbind().__getitem__, pages.groups)]
        self._shapes: dict[tuple[int, Window], AttentionShape] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Attend as `PagedAttention.attend` does."""
        slots = self.slots[layer]
        self.pages.write(layer, slots, key[:, : len(slots)], value[:, : len(slots)])
        return self._attend(layer, query.transpose(0, 1), scoring)

    def attend_projected(self, layer: int, projection: Projection, scoring: Scoring) -> Tensor:
        """Attend with the queries, keys and values of `projection`; returns [T, Q, D]."""
        projected, keys = projection.heads, self.pages.keys[layer]
        query = projected.new_empty(len(projected), projection.query_heads, keys.shape[3])
        call = self._kernels.prepare_call(
            projected,
            projection.cosine,
            projection.sine,
            projection.norms,
            projection.eps,
            self.slots[layer],
            keys,
            self.pages.values[layer],
            query,
        )
        self._kernels.prepare(projected.dtype, call)
        return self._attend(layer, query, scoring)

    def _attend(self, layer: int, query: Tensor, scoring: Scoring) -> Tensor:
        """Attend with queries [T, Q, D]."""
        keys, values = self.pages.keys[layer], self.pages.values[layer]
        out = query.new_empty(query.shape[0], query.shape[1], values.shape[3])
        out[len(self.slots[layer]) :] = 0
        sinks = None if scoring.sinks is None else scoring.sinks.float()
        call = self._kernels.attention_call(
            out,
            query,
            keys,
            values,
            self.shape(layer, scoring.window),
            scoring.scaling,
            scoring.softcap or 0.0,
            sinks,
        )
        self._kernels.attend(query.dtype, call, self.scratch)
        return out

    def shape(self, layer: int, window: Window) -> AttentionShape:
        """Return what the kernel is told of the batch, for a layer with that window."""
        kind = (self.pages.groups[layer], window)
        if kind not in self._shapes:
            self._shapes[kind] = self._shape(*kind)
        return self._shapes[kind]

    def scratch(self, size: int) -> Tensor:
        """Return memory of so many bytes, until it is asked for again."""
        return self._workspace.take("attention", (size,), torch.empty(0, dtype=torch.uint8))

    def _shape(self, group: int, window: Window) -> AttentionShape:
        batch = self._batch
        counts_known = [
            count if place in batch.decoding else sys.maxsize
            for place, count in enumerate(batch.counts)
        ]
        order = sorted(range(len(batch.counts)), key=counts_known.__getitem__)
        counts = torch.tensor(batch.counts, dtype=torch.int32)
        contexts = torch.tensor(batch.contexts, dtype=torch.int32)
        rows = counts.cumsum(0, dtype=torch.int32) - counts
        ends = (contexts - counts - rows).repeat_interleave(counts) + 1
        ends += torch.arange(len(ends), dtype=torch.int32)
        for chunk, first, end in batch.wholes_of(window):
            at = int(rows[chunk] - (contexts[chunk] - counts[chunk]))
            ends[at + first : at + end] = end
        chunks = torch.tensor(order, dtype=torch.int32)
        return AttentionShape(
            batch.block_table[group].contiguous(),
            chunks,
            rows[chunks],
            counts[chunks],
            contexts[chunks],
            ends,
            len(batch.decoding),
            -window.size if isinstance(window, Chunk) else window or 0,
            self._invariant,
        )
