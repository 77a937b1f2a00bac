"""Logits of the ids that requests name, in float32.

A model in bfloat16 rounds its logits to steps of 0.125 where they are about 20: probabilities of
two answers that are near each other would be known to 0.03 only. The states are multiplied again
with the rows of these ids alone.
"""

from collections.abc import Sequence as Run
from itertools import accumulate

import torch
from torch import Tensor

from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.plan import ScheduledChunk
from inlay.engine.torch.transfers import upload


def with_named(
    model: CausalModel, hidden: Tensor, logits: Tensor, chunks: Run[ScheduledChunk]
) -> Tensor:
    """Return the logits of a step with those of named ids computed in float32.

    Args:
        model: the model.
        hidden: [T, C], the states of all positions of `chunks`, in order.
        logits: [sampled positions, V].
        chunks: of the step.

    Returns:
        `logits`, in float32 where any are named.
    """
    head = model.named_head
    if head is None or logits.dtype == hidden.dtype == torch.float32:
        return logits
    ends = accumulate(chunk.count for chunk in chunks)
    row = 0
    for chunk, end in zip(chunks, ends, strict=True):
        ids = chunk.sequence.sampling.logprob_token_ids
        if chunk.samples and ids:
            index = upload(torch.tensor(ids), logits.device)
            exact = head.logits(hidden[end - chunk.num_sampled : end], index)
            with torch.inference_mode():
                logits = logits.float()
                logits[row : row + chunk.num_sampled, index] = exact
        row += chunk.num_sampled
    return logits
