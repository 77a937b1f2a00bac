"""Attention over pages on CUDA: `torch.nn.attention.varlen.varlen_attn` with block tables."""

import logging
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import (
    activate_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
)
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from inlay.engine.torch.attention.gathered import GatheredAttention, Workspace, sink_scale
from inlay.engine.torch.attention.layers import LayerShape
from inlay.engine.torch.attention.paged import Scoring
from inlay.engine.torch.attention.pages import Pages
from inlay.engine.torch.batch import Batch, BatchItem
from inlay.engine.torch.cache.kv_layout import PageGroup
from inlay.engine.torch.cache.table import PageRun
from inlay.errors import EngineError
from inlay.prompt import Tokens

_logger = logging.getLogger(__name__)

_LARGEST_HEAD = 256
"""Maximum head size of flash attention."""

_TOLERANCE = 0.05
"""Largest difference between two 16-bit attentions over normally distributed values."""


def does(key: Tensor, value: Tensor, scoring: Scoring) -> bool:
    """Return True if flash attention supports `key` [H, T, D] and `value` [H, T, E] this way.

    It needs 16-bit heads of one size for keys and values, a multiple of 8, and no soft cap.
    """
    size = key.shape[2]
    return (
        scoring.softcap is None
        and key.dtype in (torch.bfloat16, torch.float16)
        and size == value.shape[2]
        and size <= _LARGEST_HEAD
        and size % 8 == 0
    )


class Lengths(NamedTuple):
    """Lengths of the sequences of a batch, for flash attention.

    Attributes:
        starts: [S + 1] int32, where each sequence's queries begin in the batch, and the end of the
            last.
        contexts: [S] int32, positions of each sequence.
        max_count: maximum number of queries of a sequence.
        max_context: maximum number of positions of a sequence.
    """

    starts: Tensor
    contexts: Tensor
    max_count: int
    max_context: int

    @classmethod
    def of(cls, batch: Batch) -> "Lengths":
        """Return the lengths of `batch`, on its device."""
        device = batch.slots.device
        starts = torch.tensor((0, *batch.counts), dtype=torch.int32).cumsum(0, dtype=torch.int32)
        contexts = torch.tensor(batch.contexts, dtype=torch.int32)
        return cls(starts.to(device), contexts.to(device), max(batch.counts), max(batch.contexts))


class VarlenAttention:
    """Flash attention over the pages by block table.

    Written from torch's documentation; not run on a GPU yet.
    """

    def __init__(self, batch: Batch, pages: Pages, lengths: Lengths | None = None) -> None:
        """Prepare attention for `batch`; `lengths` replaces lengths computed from it."""
        self._batch = batch
        self._pages = pages
        self._lengths = Lengths.of(batch) if lengths is None else lengths

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scoring: Scoring,
    ) -> Tensor:
        """Attend as `PagedAttention.attend` does."""
        slots = self._batch.slots[self._pages.groups[layer]]
        count, padding = len(slots), query.shape[1] - len(slots)
        self._pages.write(layer, slots, key[:, :count], value[:, :count])
        found = self._attend(layer, query[:, :count], scoring)
        return F.pad(found, (0, 0, 0, 0, 0, padding)) if padding else found

    def _attend(self, layer: int, query: Tensor, scoring: Scoring) -> Tensor:
        arguments = self.arguments(layer, query, scoring)
        if scoring.sinks is None:
            return cast("Tensor", varlen_attn(**arguments))
        found, lse = varlen_attn(**arguments, return_aux=AuxRequest(lse=True))
        # torch's documentation says [T, Q]; its kernel and its shape inference say [Q, T].
        if lse.shape != query.shape[:2]:
            raise EngineError(
                f"varlen_attn gave a logsumexp of {tuple(lse.shape)} for queries "
                f"{tuple(query.shape)}"
            )
        share = sink_scale(lse, scoring.sinks[:, None])
        return cast("Tensor", found * share.t()[..., None].to(found.dtype))

    def arguments(self, layer: int, query: Tensor, scoring: Scoring) -> dict[str, Any]:
        """Return the arguments of `varlen_attn`.

        Causal is the window (-1, 0), pages are [N, P, H, D].
        """
        return {
            "query": query.transpose(0, 1),
            "key": self._pages.keys[layer].permute(1, 2, 0, 3),
            "value": self._pages.values[layer].permute(1, 2, 0, 3),
            "cu_seq_q": self._lengths.starts,
            "cu_seq_k": None,
            "max_q": self._lengths.max_count,
            "max_k": self._lengths.max_context,
            "scale": scoring.scaling,
            "window_size": (-1 if scoring.window is None else scoring.window - 1, 0),
            "enable_gqa": query.shape[0] != self._pages.keys[layer].shape[0],
            "seqused_k": self._lengths.contexts,
            "block_table": self._batch.block_table[self._pages.groups[layer]],
        }


@cache
def reads_pages(
    device: torch.device,
    dtype: torch.dtype,
    size: int,
    page_size: int,
    *,
    windowed: bool,
    sunk: bool,
) -> bool:
    """Return True if flash attention on `device` reads pages by block table correctly.

    It is compared with `GatheredAttention` on random input.

    Block tables came to torch with FlashAttention-3 (pytorch/pytorch#175924), and not every kernel
    supports them, or small pages. So the active kernels are tried first, then those installed
    beside torch ("FA3", "FA4"); the first that agrees stays active.

    Args:
        device: device of the pages.
        dtype: dtype of keys and values.
        size: head size.
        page_size: positions in a page.
        windowed: test with a sliding window.
        sunk: test with sinks.
    """
    scoring = Scoring(
        size**-0.5,
        page_size + 3 if windowed else None,
        sinks=torch.tensor((0.5, -1.0), device=device) if sunk else None,
    )
    reasons = []
    for name in (None, *list_flash_attention_impls()):
        try:
            if name is not None:
                activate_flash_attention_impl(name)
            error = _largest_error(device, dtype, size, page_size, scoring)
        except (ImportError, RuntimeError, ValueError, EngineError) as failure:
            reasons.append(f"{name or 'as it is'}: {failure}")
        else:
            if error <= _TOLERANCE:
                return True
            reasons.append(f"{name or 'as it is'}: results differ by {error:.3g}")
        if name is not None:
            restore_flash_attention_impl()
    _logger.warning(
        "flash attention does not read pages here, they are gathered: %s", "; ".join(reasons)
    )
    return False


@torch.inference_mode()
def _largest_error(
    device: torch.device, dtype: torch.dtype, size: int, page_size: int, scoring: Scoring
) -> float:
    """Return the largest difference from `GatheredAttention`: two prompts, then one token each."""
    pages = Pages(
        [LayerShape(scoring.window, 1, size, size)],
        [PageGroup(scoring.window, (0,))],
        num_pages=6,
        page_size=page_size,
        dtype=dtype,
        device=device,
    )
    # Fill memory with NaN: unwritten positions must have no effect.
    for tensor in (*pages.keys, *pages.values):
        tensor[:, 1:] = torch.nan
    runs = (PageRun((3, 5, 1)), PageRun((6,)))
    generator = torch.Generator().manual_seed(1)
    error = 0.0
    for steps in (((0, 2 * page_size + 2), (0, 5)), ((2 * page_size + 2, 1), (5, 1))):
        stretches = [
            BatchItem(((start, Tokens([0] * count)),), start, count, (run,), True)
            for (start, count), run in zip(steps, runs, strict=True)
        ]
        batch = Batch.pack(stretches, page_size).to(device)
        query, key, value = (
            torch.randn(heads, len(batch.token_ids), size, generator=generator).to(device, dtype)
            for heads in (2, 1, 1)
        )
        expected = GatheredAttention(batch, pages, Workspace(), float32_scores=True).attend(
            0, query, key, value, scoring
        )
        found = VarlenAttention(batch, pages).attend(0, query, key, value, scoring)
        error = max(error, float((found.float() - expected.float()).abs().max()))
    return error
