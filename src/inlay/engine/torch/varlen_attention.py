"""Attention over pages on CUDA: `torch.nn.attention.varlen.varlen_attn` reads them through a block table."""

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from inlay.engine.torch.batch import Batch
from inlay.engine.torch.gathered_attention import unsunk
from inlay.engine.torch.paged_attention import Scoring
from inlay.engine.torch.pages import Pages
from inlay.errors import EngineError

_LARGEST_HEAD = 256
"""Elements of a head that flash attention takes at most."""


def does(key: Tensor, value: Tensor, scoring: Scoring) -> bool:
    """Whether flash attention can attend to `key` [H, T, D] and `value` [H, T, E] this way.

    It takes 16-bit heads of one size for keys and values, a multiple of 8, and has no soft cap.
    """
    size = key.shape[2]
    return (
        scoring.softcap is None
        and key.dtype in (torch.bfloat16, torch.float16)
        and size == value.shape[2]
        and size <= _LARGEST_HEAD
        and size % 8 == 0
    )


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
        self._pages.write(layer, self._batch.slots[self._pages.groups[layer]], key, value)
        arguments = self.arguments(layer, query, scoring)
        if scoring.sinks is None:
            return cast("Tensor", varlen_attn(**arguments))
        found, lse = varlen_attn(**arguments, return_aux=AuxRequest(lse=True))
        # torch's documentation says [T, Q]; its kernel and its shape inference say [Q, T].
        if lse.shape != query.shape[:2]:
            raise EngineError(
                f"varlen_attn gave a logsumexp of {tuple(lse.shape)} for queries {tuple(query.shape)}"
            )
        share = unsunk(lse, scoring.sinks[:, None])
        return cast("Tensor", found * share.t()[..., None].to(found.dtype))

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
            "block_table": self._batch.block_table[self._pages.groups[layer]],
        }
