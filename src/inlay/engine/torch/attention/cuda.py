"""Attention over pages on CUDA: one kernel for every kind of layer, over whole batches."""

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from inlay.engine.torch.attention.paged import Scoring
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


class CudaAttention:
    """A `PagedAttention` whose launches depend on the shapes of a batch alone.

    So a CUDA graph can hold them, unless positions of the batch see later ones (`Batch.wholes`).
    """

    def __init__(
        self,
        batch: Batch,
        pages: Pages,
        kernel: AttentionKernel,
        sequences: Sequences | None = None,
    ) -> None:
        """Prepare attention for `batch`; `sequences` replaces lengths computed from it."""
        self._batch = batch
        self._pages = pages
        self._kernel = kernel
        self._sequences = Sequences.of(batch) if sequences is None else sequences
        self._slots = batch.slots.unbind()
        self._tables = batch.block_table.unbind()
        self._last: dict[Window, Tensor | None] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Attend as `PagedAttention.attend` does."""
        pages, group = self._pages, self._pages.groups[layer]
        slots = self._slots[group]
        count = len(slots)
        pages.write(layer, slots, key[:, :count], value[:, :count])
        if query.stride(2) != 1:
            query = query.contiguous()
        keys, values = pages.keys[layer], pages.values[layer]
        out = query.new_empty(query.shape[1], query.shape[0], values.shape[3])
        out[count:] = 0
        if scoring.window not in self._last:
            self._last[scoring.window] = self._last_seen(scoring.window)
        last = self._last[scoring.window]
        self._kernel(out, query, keys, values, self._tables[group], self._sequences, last, scoring)
        return out

    def _last_seen(self, window: Window) -> Tensor | None:
        """Return the last position that each query sees, [T] int32; None where it is its own."""
        batch = self._batch
        wholes = batch.wholes_of(window)
        if not wholes:
            return None
        spans = zip(batch.counts, batch.contexts, strict=True)
        seen = [np.arange(context - count, context, dtype=np.int32) for count, context in spans]
        for span, first, end in wholes:
            base = batch.contexts[span] - batch.counts[span]
            seen[span][first - base : end - base] = end - 1
        return upload(torch.from_numpy(np.concatenate(seen)), batch.slots.device)
