"""Attention over pages on CUDA: `torch.nn.attention.varlen.varlen_attn` reads them through a block table."""

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from inlay.engine.torch.batch import Batch
from inlay.engine.torch.paged_attention import Scoring
from inlay.engine.torch.pages import Pages


class VarlenAttention:
    """Flash attention over the pages by block table. Written from torch's documentation; not yet run on a GPU."""

    def __init__(self, batch: Batch, pages: Pages) -> None:
        device = batch.slots.device
        counts = torch.tensor((0, *batch.counts), dtype=torch.int32)
        self._batch = batch
        self._pages = pages
        self._starts = counts.cumsum(0, dtype=torch.int32).to(device)
        self._lengths = torch.tensor(batch.contexts, dtype=torch.int32).to(device)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scoring: Scoring,
    ) -> Tensor:
        """As `PagedAttention.attend`."""
        self._pages.write(layer, self._batch.slots, key, value)
        return cast("Tensor", varlen_attn(**self.arguments(layer, query, scoring)))

    def arguments(self, layer: int, query: Tensor, scoring: Scoring) -> dict[str, Any]:
        """What `varlen_attn` is called with: causal is the window (-1, 0), pages are [N, P, H, D]."""
        return {
            "query": query.transpose(0, 1),
            "key": self._pages.keys[layer].permute(1, 2, 0, 3),
            "value": self._pages.values[layer].permute(1, 2, 0, 3),
            "cu_seq_q": self._starts,
            "cu_seq_k": None,
            "max_q": max(self._batch.counts),
            "max_k": max(self._batch.contexts),
            "scale": scoring.scaling,
            "window_size": (-1 if scoring.window is None else scoring.window - 1, 0),
            "enable_gqa": query.shape[0] != self._pages.keys[layer].shape[0],
            "seqused_k": self._lengths,
            "block_table": self._batch.block_table,
        }
