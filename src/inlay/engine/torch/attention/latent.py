"""Attention over pages of latents, as in DeepSeek's family: `weights/latent.py` has the algebra.

Sequences with few queries in the batch attend absorbed, by whatever attends on the device; those
with many over keys and values that are expanded for them, head by head.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor

from inlay.base.errors import EngineError
from inlay.engine.torch.attention.paged import PagedAttention, Scoring
from inlay.engine.torch.batch import Batch
from inlay.engine.torch.lora import BASE
from inlay.engine.torch.weights.latent import LatentWeights


class _AlikeSequences(NamedTuple):
    """Sequences of a batch that attend in one way.

    Attributes:
        rows: their queries in the batch; None for all of it.
        adapters: slots, and which of those queries have their adapters.
        paged: attention for them.
        expanded: it expands; else it takes absorbed queries.
    """

    rows: Tensor | None
    adapters: list[tuple[int, Tensor]]
    paged: PagedAttention
    expanded: bool


class LatentAttention:
    """A `PagedAttention` for layers whose `Scoring` has the weights of latents.

    Shapes: as in `weights/latent.py`.
    """

    def __init__(
        self,
        batch: Batch,
        absorbed: Callable[[Batch], PagedAttention],
        expanded: Callable[[Batch], PagedAttention] | None,
    ) -> None:
        """Prepare attention for `batch`.

        Args:
            batch: batch to compute.
            absorbed: makes attention for a part of it, over pages with one head.
            expanded: likewise, over pages that it expands by `Scoring.latent`; None: all of it is
                absorbed.
        """
        self._batch = batch
        self._absorbed = absorbed
        self._expanded = expanded
        self._parts: list[_AlikeSequences] = []

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Attend as `PagedAttention.attend` does.

        Query [Q, T, K + R], key [1, T, C + R], value [1, T, C], the first part of `key`, to
        [T, Q, E].

        Raises:
            EngineError: `scoring` has no weights.
        """
        latent = scoring.latent
        if latent is None:
            raise EngineError(f"layer {layer} has no weights of latents")
        if not self._parts:
            self._parts = list(self._plan(latent))
        out: Tensor | None = None
        for part in self._parts:
            own = [query, key, value]
            if part.rows is not None:
                own = [tensor.index_select(1, part.rows) for tensor in own]
            if part.expanded:
                found = part.paged.attend(layer, own[0], own[1], own[2], scoring)
            else:
                absorbed = latent.absorb(own[0], part.adapters)
                plain = scoring._replace(latent=None)
                found = part.paged.attend(layer, absorbed, own[1], own[2], plain)
                found = latent.outputs(found, part.adapters)
            if part.rows is None:
                return found
            if out is None:
                out = query.new_zeros(query.shape[1], query.shape[0], latent.value_size)
            out.index_copy_(0, part.rows, found)
        return cast("Tensor", out)

    def _plan(self, latent: LatentWeights) -> Iterator[_AlikeSequences]:
        """Divide the batch; the same for all layers, whose sizes are the same."""
        batch = self._batch
        lengths = zip(batch.counts, batch.contexts, strict=True)
        expanded = self._expanded
        ways = [
            expanded is not None and count > 1 and latent.worth_expanding(count, context)
            for count, context in lengths
        ]
        for way in sorted(set(ways)):
            make = self._absorbed if expanded is None or not way else expanded
            if way == all(ways) == any(ways):
                yield _AlikeSequences(None, _adapted(batch), make(batch), way)
                continue
            chunks = [chunk for chunk, own in enumerate(ways) if own is way]
            rows, part = batch.only(chunks)
            yield _AlikeSequences(rows, _adapted(part), make(part), way)


def _adapted(batch: Batch) -> list[tuple[int, Tensor]]:
    """Return each slot of adapters and the queries of `batch` that have it."""
    if not batch.adapters:
        return []
    slots = torch.tensor(batch.adapters).repeat_interleave(torch.tensor(batch.counts))
    return [
        (slot, (slots == slot).nonzero().squeeze(1).to(batch.slots.device))
        for slot in sorted({*batch.adapters} - {BASE})
    ]
