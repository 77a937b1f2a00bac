"""The kernel of `CudaAttention` in plain torch, one query at a time, for machines without CUDA."""

from itertools import pairwise

import torch
from torch import Tensor

from inlay.engine.torch.attention.cuda import Sequences
from inlay.engine.torch.attention.paged import Scoring
from inlay.engine.torch.windows import first_seen


def attend(
    out: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    sequences: Sequences,
    last: Tensor | None,
    scoring: Scoring,
) -> None:
    """As `triton_kernels.attend`."""
    starts, group = sequences.starts.tolist(), len(query) // len(keys)
    counts = [stop - start for start, stop in pairwise(starts)]
    assert sequences.num_queries == starts[-1]
    assert sequences.single == (1 in counts)
    assert sequences.several == (max(counts) > 1)
    for span, context in enumerate(sequences.contexts.tolist()):
        pages = table[span, : -(-context // keys.shape[2])].long()
        own_keys, own_values = (
            tensor[:, pages].flatten(1, 2)[:, :context].float().repeat_interleave(group, 0)
            for tensor in (keys, values)
        )
        for row in range(starts[span], starts[span + 1]):
            position = context - starts[span + 1] + row
            end = position if last is None else int(last[row])
            low = first_seen(scoring.window, position)
            seen = slice(low, end + 1)
            scores = torch.einsum("qd,qtd->qt", query[:, row].float(), own_keys[:, seen])
            scores *= scoring.scaling
            if scoring.softcap is not None:
                scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
            if scoring.sinks is not None:
                scores = torch.cat((scores, scoring.sinks.float()[:, None]), 1)
            weights = scores.softmax(1)[:, : end + 1 - low]
            found = torch.einsum("qt,qte->qe", weights, own_values[:, seen])
            out[row] = found.to(out.dtype)
