"""How likely a prompt's own tokens are: told chunk by chunk as the prompt is computed, never held for all of it.

The logits of a position say what the next one may be, so position p of a prompt is scored by the hidden state of p - 1.
Shapes: N positions, C hidden size, V vocabulary, K alternatives.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.sampler import ranked
from inlay.engine.torch.scheduler import Span
from inlay.protocol.work import PromptLogprobs

MAX_LOGITS = 2**24
"""Logits made at a time, 64 MiB of float32: a long chunk of a prompt is scored in pieces of so many."""


def score(model: CausalModel, hidden: Tensor, spans: Sequence[Span]) -> dict[Span, PromptLogprobs | None]:
    """What a step can say of the prompts it computes, for those that ask.

    Args:
        model: whose head makes the logits.
        hidden: [T, C], of the positions of `spans`, in order.
        spans: of the step.

    Returns:
        By span; None for one whose logits are not finite.
    """
    found: dict[Span, PromptLogprobs | None] = {}
    for span, offset in zip(spans, accumulate((span.count for span in spans), initial=0), strict=False):
        sequence = span.sequence
        first = max(sequence.scored, span.start + 1)
        ids = sequence.prompt_token_ids[first : span.start + span.count + 1]
        if ids:
            row = offset + first - 1 - span.start
            states = hidden[row : row + len(ids)]
            found[span] = _scored(model, states, ids, first, sequence.sampling.prompt_logprobs or 0)
    return found


def _scored(
    model: CausalModel, hidden: Tensor, ids: Sequence[int], first: int, top: int
) -> PromptLogprobs | None:
    rows = max(1, MAX_LOGITS // model.vocab_size)
    targets = torch.tensor(ids, device=hidden.device)
    pieces: list[tuple[Tensor, Tensor, Tensor]] = []
    for start in range(0, len(ids), rows):
        piece = _piece(model.logits(hidden[start : start + rows]), targets[start : start + rows], top)
        if piece is None:
            return None
        pieces.append(piece)
    columns = [torch.cat(column).cpu().numpy().tobytes() for column in zip(*pieces, strict=True)]
    return PromptLogprobs(first, *columns)


def _piece(logits_NV: Tensor, targets_N: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Ids [N, 1 + K] int32, logprobs [N, 1 + K] float32 and ranks [N] int32; None where logits are not finite."""
    total_N1 = logits_NV.logsumexp(dim=-1, keepdim=True)
    if not bool(total_N1.isfinite().all()):
        return None
    ids_NK = targets_N[:, None]
    ranks_N = 1 + (logits_NV > logits_NV.gather(1, ids_NK)).sum(dim=-1)
    if top:
        ids_NK = torch.cat((ids_NK, ranked(logits_NV, min(top, logits_NV.shape[1]))), dim=1)
    return ids_NK.to(torch.int32), logits_NV.gather(1, ids_NK) - total_N1, ranks_N.to(torch.int32)


__all__ = ["score"]
