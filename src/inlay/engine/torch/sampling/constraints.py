"""What may be chosen at all: logit biases, end tokens before their time, words that are not to be said, allowed ids, grammars.

Order and meaning are vLLM's, but for two things. Where a grammar leaves nothing but its end, the end is allowed although
`min_tokens` is not reached. Where nothing at all is left the work fails, and says so.

Suffixes of tensors: S sequences in the batch, K those of them with a list of what is allowed, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inlay.engine.torch.grammar.state import GrammarState, Mask
from inlay.engine.torch.transfers import upload
from inlay.protocol.work import Sampling


class Constrained(Protocol):
    """What a sequence shows of itself."""

    @property
    def sampling(self) -> Sampling:
        """How its tokens are chosen."""
        ...

    @property
    def output(self) -> Sequence[int]:
        """Ids so far, resumed ones included; it only grows."""
        ...

    @property
    def grammar(self) -> GrammarState | None:
        """Where the output stands in its grammar; its mask is ready."""
        ...


class Constraints:
    """Applies them to the logits of a step. Keeps nothing."""

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        """For logits of width `vocab_size` on `device`; `eos_token_ids` are the model's own end tokens."""
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = device

    def apply(self, logits_SV: Tensor, sequences: Sequence[Constrained]) -> Tensor:
        """The logits with all constraints; -inf is what must not be chosen. A copy if anything changed.

        Raises:
            InvalidRequestError: computing a grammar's mask had failed.
        """
        constrained_SV = self._added(logits_SV, sequences)
        allowed = {row: mask for row, of in enumerate(sequences) if (mask := self._allowed(of)) is not None}
        if not allowed:
            return constrained_SV
        banned_KV = upload(torch.from_numpy(~np.stack(list(allowed.values()))), self._device)
        if constrained_SV is logits_SV:
            constrained_SV = logits_SV.clone()
        # Row by row in place: a gathered copy of the rows costs several times as much as the masks.
        for banned_V, row in zip(banned_KV, allowed, strict=True):
            constrained_SV[row].masked_fill_(banned_V, -torch.inf)
        return constrained_SV

    def binds(self, sampling: Sampling) -> bool:
        """Whether nothing may be left to choose from."""
        return bool(
            sampling.grammar is not None or sampling.bad_words or sampling.allowed_token_ids is not None
        )

    def _added(self, logits_SV: Tensor, sequences: Sequence[Constrained]) -> Tensor:
        cells = list(self._cells(sequences))
        if not cells:
            return logits_SV
        rows, ids, values = zip(*cells, strict=True)
        place = (
            upload(torch.as_tensor(rows, dtype=torch.int64), self._device),
            upload(torch.as_tensor(ids, dtype=torch.int64), self._device),
        )
        added = upload(torch.as_tensor(values, dtype=torch.float32), self._device)
        # Adding -inf bans a token whatever its bias; the sum is the same in any order of the cells but for rounding.
        return logits_SV.index_put(place, added, accumulate=True)

    def _cells(self, sequences: Sequence[Constrained]) -> Iterator[tuple[int, int, float]]:
        """(row, id, value to add)."""
        for row, sequence in enumerate(sequences):
            sampling = sequence.sampling
            for id_, bias in sampling.logit_bias.items():
                if 0 <= id_ < self._vocab_size:
                    yield row, id_, bias
            for id_ in _unspeakable(sampling.bad_words, sequence.output):
                yield row, id_, -torch.inf
            ended = sequence.grammar is not None and sequence.grammar.complete
            if len(sequence.output) < sampling.min_tokens and not ended:
                for id_ in {*self._eos_token_ids, *sampling.stop_token_ids}:
                    if 0 <= id_ < self._vocab_size:
                        yield row, id_, -torch.inf

    def _allowed(self, sequence: Constrained) -> NDArray[np.bool_] | None:
        """Bool (V,): which ids may be chosen; None when all may."""
        mask = None if sequence.grammar is None else sequence.grammar.prepared()
        allowed = None if mask is None else self._unpacked(mask)
        ids = sequence.sampling.allowed_token_ids
        if ids is not None:
            named = np.zeros(self._vocab_size, dtype=np.bool_)
            named[list(ids)] = True
            allowed = named if allowed is None else allowed & named
        return allowed

    def _unpacked(self, mask: Mask) -> NDArray[np.bool_]:
        """The model may have more ids than its tokenizer, which stand for nothing, or fewer."""
        bits = np.unpackbits(
            mask.view(np.uint8), bitorder="little", count=min(32 * len(mask), self._vocab_size)
        )
        allowed = np.zeros(self._vocab_size, dtype=np.bool_)
        allowed[: len(bits)] = bits
        return allowed


def _unspeakable(words: tuple[tuple[int, ...], ...], output: Sequence[int]) -> Iterator[int]:
    """The last id of every word whose others are what the output ends with."""
    for word in words:
        before = len(word) - 1
        if before <= len(output) and tuple(output[len(output) - before :]) == word[:-1]:
            yield word[-1]


__all__ = ["Constrained", "Constraints"]
