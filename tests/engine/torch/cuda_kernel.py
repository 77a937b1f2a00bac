"""The kernels for CUDA in plain torch, for machines without; attention one query at a time."""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from inlay.engine.torch.attention.cuda import CudaKernels, Sequences
from inlay.engine.torch.attention.paged import Projection, Scoring
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


def prepare(
    query: Tensor, projection: Projection, slots: Tensor, keys: Tensor, values: Tensor
) -> None:
    """As `triton_layers.prepare`, rounded as the operations of transformers are."""
    half, size = projection.rotated // 2, query.shape[2]
    heads = projection.heads.view(len(query), -1, size)
    cosine, sine = (angles[:, None, :half] for angles in (projection.cosine, projection.sine))

    def turned(states: Tensor, norm: int) -> Tensor:
        if projection.norms is not None:
            weight = projection.norms[norm].float()
            states = F.rms_norm(states.float(), (size,), weight, projection.eps).to(states.dtype)
        low, high, rest = states.tensor_split([half, 2 * half], -1)
        return torch.cat((low * cosine - high * sine, high * cosine + low * sine, rest), -1)

    count = len(slots)
    query.copy_(turned(heads[:, : query.shape[1]], 0))
    new = turned(heads[:, query.shape[1] : -len(keys)], 1), heads[:, -len(keys) :]
    for pages, states in zip((keys, values), new, strict=True):
        pages.flatten(1, 2).index_copy_(1, slots, states[:count].transpose(0, 1))


def multiply(gate_up: Tensor, *, gelu: bool) -> Tensor:
    """As `triton_layers.multiply`, rounded as the operations of transformers are."""
    gate, up = gate_up.chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up


KERNELS = CudaKernels(attend, prepare, multiply)
