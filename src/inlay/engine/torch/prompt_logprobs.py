"""Logprobs of a prompt's tokens, emitted chunk by chunk as the prompt is computed.

Position p of a prompt is scored by the hidden state of p - 1. Shapes: N positions, C hidden size, V
vocabulary, K alternatives.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.plan import ScheduledChunk
from inlay.engine.torch.sampling.draws import ranked
from inlay.engine.torch.transfers import Download, upload
from inlay.messages.request import PromptLogprobs

MAX_LOGITS = 2**24
"""Maximum number of logits computed at a time: 64 MiB of float32.

A long chunk of a prompt is scored in pieces of that size.
"""


class Scored:
    """Logprobs of prompt positions on their way to the host."""

    __slots__ = ("_first", "_told")

    def __init__(self, first: int, pieces: Sequence[tuple[Tensor, ...]]) -> None:
        """Start with `pieces` as returned by `_piece`, for the positions from `first` on."""
        self._first = first
        self._told = Download(*(torch.cat(column) for column in zip(*pieces, strict=True)))

    def read(self) -> PromptLogprobs | None:
        """Return the logprobs; None if logits are not finite. Waits for the device."""
        good, *columns = self._told.wait()
        if not bool(good.all()):
            return None
        return PromptLogprobs(self._first, *(column.numpy().tobytes() for column in columns))


def score(
    model: CausalModel, hidden: Tensor, chunks: Sequence[ScheduledChunk]
) -> dict[ScheduledChunk, Scored]:
    """Compute the logprobs of prompts in a step, by chunk, for requests that want them.

    `hidden` [T, C] are the states of the positions of `chunks`, in order.
    """
    found: dict[ScheduledChunk, Scored] = {}
    for chunk, offset in zip(
        chunks, accumulate((chunk.count for chunk in chunks), initial=0), strict=False
    ):
        sequence = chunk.sequence
        first = max(sequence.scored, chunk.start + 1)
        ids = sequence.prompt_token_ids[first : chunk.start + chunk.count + 1]
        if ids:
            row = offset + first - 1 - chunk.start
            states = hidden[row : row + len(ids)]
            found[chunk] = _scored(
                model, states, ids, first, sequence.sampling.prompt_logprobs or 0
            )
    return found


def _scored(model: CausalModel, hidden: Tensor, ids: Sequence[int], first: int, top: int) -> Scored:
    rows = max(1, MAX_LOGITS // model.vocab_size)
    targets = upload(torch.tensor(ids), hidden.device)
    pieces = [
        _piece(
            model.logits(hidden[start : start + rows]).float(), targets[start : start + rows], top
        )
        for start in range(0, len(ids), rows)
    ]
    return Scored(first, pieces)


def _piece(logits_NV: Tensor, targets_N: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return finite [N] bool, ids [N, 1 + K] int32, logprobs likewise float32, ranks [N] int32."""
    # Row by row, as of outputs; a sum over one row alone would be divided among threads.
    logprobs_NV = logits_NV.log_softmax(dim=-1)
    good_N = logprobs_NV.amax(dim=-1).isfinite()
    ids_NK = targets_N[:, None]
    ranks_N = 1 + (logits_NV > logits_NV.gather(1, ids_NK)).sum(dim=-1)
    if top:
        orderly_NV = logits_NV.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        ids_NK = torch.cat((ids_NK, ranked(orderly_NV, min(top, logits_NV.shape[1]))), dim=1)
    return (
        good_N,
        ids_NK.to(torch.int32),
        logprobs_NV.gather(1, ids_NK),
        ranks_N.to(torch.int32),
    )
