"""`torch.nn.attention.varlen.varlen_attn` as documented, for CPUs, where torch has no kernel."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.library import _scoped_library
from torch.nn.attention.varlen import AuxRequest


def varlen_reference(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: None,
    max_q: int,
    max_k: int,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
    return_aux: AuxRequest | None = None,
) -> Any:
    """One query at a time, aligned to the last key.

    The logsumexp is [Q, T], as flash attention gives it.
    """
    starts, lengths = cu_seq_q.tolist(), seqused_k.tolist()
    group = query.shape[1] // key.shape[2]
    assert enable_gqa == (group > 1)
    out = torch.empty_like(query)
    lse = torch.empty(query.shape[1], query.shape[0])
    for index, length in enumerate(lengths):
        count = starts[index + 1] - starts[index]
        assert count <= max_q
        assert length <= max_k
        own = block_table[index, : -(-length // key.shape[1])].long()
        keys, values = (pages[own].flatten(0, 1)[:length] for pages in (key, value))
        for offset in range(count):
            last = length - count + offset + window_size[1]
            low = 0 if window_size[0] < 0 else max(0, last - window_size[0])
            seen = slice(low, last + 1)
            scores = torch.einsum(
                "hd,thd->ht", query[starts[index] + offset], keys[seen].repeat_interleave(group, 1)
            )
            out[starts[index] + offset] = torch.einsum(
                "ht,thd->hd", (scores * scale).softmax(-1), values[seen].repeat_interleave(group, 1)
            )
            lse[:, starts[index] + offset] = (scores * scale).logsumexp(-1)
    return out if return_aux is None else (out, lse)


def _kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    assert cu_seq_k is None
    assert scale is not None
    assert window_size is not None
    assert seqused_k is not None
    assert block_table is not None
    assert is_causal == (window_size == [-1, 0])
    out, lse = varlen_reference(
        query=query,
        key=key,
        value=value,
        cu_seq_q=cu_seq_q,
        cu_seq_k=None,
        max_q=max_q,
        max_k=max_k,
        scale=scale,
        window_size=(window_size[0], window_size[1]),
        enable_gqa=enable_gqa,
        seqused_k=seqused_k,
        block_table=block_table,
        return_aux=AuxRequest(lse=True),
    )
    return out, lse, torch.zeros(2, dtype=torch.uint64)


@contextmanager
def kernel_on_cpu() -> Iterator[None]:
    """The kernel behind torch's own `varlen_attn` on a CPU."""
    with _scoped_library("torch_attn", "IMPL") as library:
        library.impl("_varlen_attn", _kernel, "CPU")
        yield
