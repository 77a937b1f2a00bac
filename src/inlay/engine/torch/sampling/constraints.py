"""Constraints of the next token: forbidden and allowed ids.

Logit biases, `min_tokens`, bad words, allowed ids, grammars.

Order and meaning are vLLM's, with two exceptions. If a grammar allows nothing but its end, the end
is allowed before `min_tokens` is reached. If no token is allowed, the request fails with an error.

Suffixes of tensors: S sequences in the batch, V vocabulary, B bytes of V bits.
"""

from collections.abc import Mapping, Set
from collections.abc import Sequence as Run

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inlay.engine.torch.sequence import Sequence
from inlay.engine.torch.transfers import upload
from inlay.messages.request import Sampling

Bits = NDArray[np.uint8]
"""(B,): one bit for each id of the vocabulary, lowest first; set where it is allowed."""


class _ConstraintArrays:
    """The constraints of one sequence as arrays, built once.

    A step does not iterate over them in Python.

    Attributes:
        sequence: the sequence; held so that its `id()` is not reused while this exists.
        allowed: the allowed ids; None if all are.
    """

    __slots__ = ("_biased", "_biases", "_ends", "_lengths", "_words", "allowed", "sequence")

    def __init__(self, sequence: Sequence, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        sampling = sequence.sampling
        self.sequence = sequence
        biases = {id_: bias for id_, bias in sampling.logit_bias.items() if 0 <= id_ < vocab_size}
        self._biased = np.fromiter(biases.keys(), np.int64, len(biases))
        self._biases = np.fromiter(biases.values(), np.float32, len(biases))
        ends = {*eos_token_ids, *sampling.stop_token_ids} if sampling.min_tokens else set()
        self._ends = np.asarray([id_ for id_ in ends if 0 <= id_ < vocab_size], np.int64)
        words: dict[tuple[int, ...], list[int]] = {}
        for word in sampling.bad_words:
            words.setdefault(word[:-1], []).append(word[-1])
        self._words = {before: np.asarray(last, np.int64) for before, last in words.items()}
        self._lengths = sorted({len(before) for before in words})
        self.allowed: Bits | None = None
        if sampling.allowed_token_ids is not None:
            named = np.zeros(vocab_size, dtype=np.bool_)
            named[list(sampling.allowed_token_ids)] = True
            self.allowed = np.packbits(named, bitorder="little")

    def added(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return ids and what is added to their logits in this step: -inf forbids an id."""
        sequence, output = self.sequence, self.sequence.output
        banned = []
        for length in self._lengths:
            # Forbid the last id of every bad word whose other ids end the output.
            if length <= len(output):
                last = self._words.get(tuple(output[len(output) - length :]))
                if last is not None:
                    banned.append(last)
        ended = sequence.grammar is not None and sequence.grammar.complete
        if len(output) < sequence.sampling.min_tokens and not ended:
            banned.append(self._ends)
        if not banned:
            return self._biased, self._biases
        ids = np.concatenate((self._biased, *banned))
        values = np.full(len(ids), -np.inf, np.float32)
        values[: len(self._biases)] = self._biases
        return ids, values


def _constrains(sampling: Sampling) -> bool:
    return bool(
        sampling.logit_bias
        or sampling.bad_words
        or sampling.min_tokens
        or sampling.allowed_token_ids is not None
    )


def forbid_by_row(logits_SV: Tensor, allowed: Mapping[int, Bits]) -> None:
    """Set forbidden logits to -inf, in place, on a CPU.

    Row by row: gathering the rows costs several times as much as the masks.
    """
    vocab_size = logits_SV.shape[1]
    for row, bits in allowed.items():
        banned = np.unpackbits(~bits, bitorder="little", count=vocab_size)
        logits_SV[row].masked_fill_(torch.from_numpy(banned.view(np.bool_)), -torch.inf)


def forbid_packed(logits_SV: Tensor, allowed: Mapping[int, Bits]) -> None:
    """Set forbidden logits to -inf, in place, on any device.

    Bits are copied to it once and unpacked there, for all rows together.
    """
    count, vocab_size = logits_SV.shape
    bits_SB = np.full((count, -(-vocab_size // 8)), 255, np.uint8)
    bits_SB[list(allowed)] = list(allowed.values())
    device = logits_SV.device
    places = torch.arange(8, dtype=torch.uint8, device=device)
    found = upload(torch.from_numpy(bits_SB), device)[:, :, None] >> places & 1
    logits_SV.masked_fill_(found.flatten(1)[:, :vocab_size] == 0, -torch.inf)


class Constraints:
    """Applies constraints to the logits of a step.

    Keeps the arrays of a sequence until `forget`.
    """

    def __init__(
        self, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device
    ) -> None:
        """Create for logits of width `vocab_size` on `device`.

        `eos_token_ids` are the model's own end tokens.
        """
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._compiled: dict[int, _ConstraintArrays] = {}

    def kept(self) -> Set[int]:
        """The `id()` of each sequence with stored arrays."""
        return self._compiled.keys()

    def forget(self, sequence: Sequence) -> None:
        """Drop the arrays of `sequence`."""
        self._compiled.pop(id(sequence), None)

    def _of(self, sequence: Sequence) -> _ConstraintArrays | None:
        """Return the constraints of `sequence`; None if it has none, or only a grammar."""
        compiled = self._compiled.get(id(sequence))
        if compiled is None and _constrains(sequence.sampling):
            compiled = _ConstraintArrays(sequence, self._vocab_size, self._eos_token_ids)
            self._compiled[id(sequence)] = compiled
        return compiled

    def apply(self, logits_SV: Tensor, sequences: Run[Sequence]) -> Tensor:
        """Return the logits with all constraints; -inf for forbidden tokens.

        A copy if anything changed.

        Raises:
            InvalidRequestError: computing a grammar's mask failed.
        """
        constrained_SV = self._added(logits_SV, sequences)
        allowed = {
            row: bits for row, of in enumerate(sequences) if (bits := self._allowed(of)) is not None
        }
        if not allowed:
            return constrained_SV
        if constrained_SV is logits_SV:
            constrained_SV = logits_SV.clone()
        forbid = forbid_by_row if self._device.type == "cpu" else forbid_packed
        forbid(constrained_SV, allowed)
        return constrained_SV

    def binds(self, sampling: Sampling) -> bool:
        """Return True if `sampling` could leave no allowed token."""
        return bool(
            sampling.grammar is not None
            or sampling.bad_words
            or sampling.allowed_token_ids is not None
        )

    def _added(self, logits_SV: Tensor, sequences: Run[Sequence]) -> Tensor:
        cells = [
            (row, *compiled.added())
            for row, sequence in enumerate(sequences)
            if (compiled := self._of(sequence)) is not None
        ]
        sizes = [len(ids) for _, ids, _ in cells]
        if not sum(sizes):
            return logits_SV
        rows, ids, values = zip(*cells, strict=True)
        place = (
            upload(torch.from_numpy(np.repeat(np.asarray(rows, np.int64), sizes)), self._device),
            upload(torch.from_numpy(np.concatenate(ids)), self._device),
        )
        added = upload(torch.from_numpy(np.concatenate(values)), self._device)
        # Adding -inf forbids a token whatever its bias; the order of the additions only affects
        # rounding.
        return logits_SV.index_put(place, added, accumulate=True)

    def _allowed(self, sequence: Sequence) -> Bits | None:
        """Return the allowed ids; None if all are."""
        mask = None if sequence.grammar is None else sequence.grammar.prepared()
        allowed = None if mask is None else self._sized(mask.view(np.uint8))
        compiled = self._of(sequence)
        if compiled is not None and compiled.allowed is not None:
            allowed = compiled.allowed if allowed is None else allowed & compiled.allowed
        return allowed

    def _sized(self, bits: Bits) -> Bits:
        """Return bits of the model's vocabulary, which may differ from the tokenizer's in size."""
        found = np.zeros(-(-self._vocab_size // 8), np.uint8)
        size = min(len(found), len(bits))
        found[:size] = bits[:size]
        return found
