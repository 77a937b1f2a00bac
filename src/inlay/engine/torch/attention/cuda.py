"""Attention over pages on CUDA: one kernel for every kind of layer, over whole batches."""

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from inlay.engine.torch.attention.paged import Projection, Scoring
from inlay.engine.torch.attention.pages import Pages
from inlay.engine.torch.batch import Batch
from inlay.engine.torch.transfers import upload
from inlay.engine.torch.windows import Window


class Sequences(NamedTuple):
    """Lengths of the sequences of a batch, on its device.

    Attributes:
        starts: [S + 1] int32, where each sequence's queries begin in the batch, and the end of the
            last.
        contexts: [S] int32, positions of each sequence.
        num_queries: queries in the batch.
        single: there are sequences with one query.
        several: there are sequences with more.
    """

    starts: Tensor
    contexts: Tensor
    num_queries: int
    single: bool
    several: bool

    @classmethod
    def of(cls, batch: Batch) -> "Sequences":
        """Return the lengths of `batch`."""
        both = torch.tensor(
            (*accumulate(batch.counts, initial=0), *batch.contexts), dtype=torch.int32
        )
        starts, contexts = upload(both, batch.slots.device).tensor_split([len(batch.counts) + 1])
        return cls(
            starts, contexts, sum(batch.counts), min(batch.counts) == 1, max(batch.counts) > 1
        )


AttentionKernel: TypeAlias = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Sequences, Tensor | None, Scoring], None
]
"""Kernel of `CudaAttention`: `triton_kernels.attend` says what the arguments are."""


class Multiply(Protocol):
    """Kernel of gated units."""

    def __call__(self, gate_up: Tensor, *, gelu: bool) -> Tensor: ...


class CudaKernels(NamedTuple):
    """The kernels of layers on CUDA.

    Attributes:
        attend: attention over pages.
        prepare: what comes between a product and attention: `triton_layers.prepare`.
        multiply: gated units.
    """

    attend: AttentionKernel
    prepare: Callable[[Tensor, Projection, Tensor, Tensor, Tensor], None]
    multiply: Multiply


class CudaAttention:
    """A `PagedAttention` whose launches depend on the shapes of a batch alone.

    So a CUDA graph can hold them, unless positions of the batch see later ones
    (`Batch.atomic_spans`). It can also start from a `Projection`.
    """

    def __init__(
        self,
        batch: Batch,
        pages: Pages,
        kernels: CudaKernels,
        sequences: Sequences | None = None,
    ) -> None:
        """Prepare attention for `batch`; `sequences` replaces lengths computed from it."""
        self._batch = batch
        self._pages = pages
        self._kernels = kernels
        self._sequences = Sequences.of(batch) if sequences is None else sequences
        self._slots = batch.slots.unbind()
        self._tables = batch.block_table.unbind()
        self._last: dict[Window, Tensor | None] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Attend as `PagedAttention.attend` does."""
        slots = self._slots[self._pages.groups[layer]]
        count = len(slots)
        self._pages.write(layer, slots, key[:, :count], value[:, :count])
        if query.stride(2) != 1:
            query = query.contiguous()
        return self._attend(layer, query, scoring)

    def attend_projected(self, layer: int, projection: Projection, scoring: Scoring) -> Tensor:
        """Attend with the queries, keys and values of `projection`; returns [T, Q, D]."""
        keys, values = self._pages.keys[layer], self._pages.values[layer]
        shape = len(projection.heads), projection.query_heads, keys.shape[3]
        query = projection.heads.new_empty(shape)
        slots = self._slots[self._pages.groups[layer]]
        self._kernels.prepare(query, projection, slots, keys, values)
        return self._attend(layer, query.transpose(0, 1), scoring)

    def _attend(self, layer: int, query: Tensor, scoring: Scoring) -> Tensor:
        """Attend with queries [Q, T, D]."""
        keys, values = self._pages.keys[layer], self._pages.values[layer]
        table = self._tables[self._pages.groups[layer]]
        out = query.new_empty(query.shape[1], query.shape[0], values.shape[3])
        if len(out) > len(self._slots[0]):
            out[len(self._slots[0]) :] = 0
        if scoring.window not in self._last:
            self._last[scoring.window] = self._last_seen(scoring.window)
        last = self._last[scoring.window]
        self._kernels.attend(out, query, keys, values, table, self._sequences, last, scoring)
        return out

    def _last_seen(self, window: Window) -> Tensor | None:
        """Return the last position that each query sees, [T] int32; None where it is its own."""
        batch = self._batch
        wholes = batch.wholes_of(window)
        if not wholes:
            return None
        chunks = zip(batch.counts, batch.contexts, strict=True)
        seen = [np.arange(context - count, context, dtype=np.int32) for count, context in chunks]
        for chunk, first, end in wholes:
            base = batch.contexts[chunk] - batch.counts[chunk]
            seen[chunk][first - base : end - base] = end - 1
        return upload(torch.from_numpy(np.concatenate(seen)), batch.slots.device)
