"""Sampling of token ids and logprobs from logits.

Order and meaning of the settings are vLLM's: constraints (`constraints.py`); repetition, frequency
and presence penalties; the end of thinking when its budget is spent, which overrides all of these;
greedy choice, or temperature, min_p, top_k, top_p and a draw. Logprobs are of the model's own
distribution, before any of this.

Three rules make a choice a pure function of (logits, settings, output so far, seed, output index),
whatever else is in the batch and whichever worker resumes the sequence:

- all tokens are ranked by (logit, higher first; id, lower first), so ties do not depend on a sort;
- the one uniform number of a choice is a hash of (seed, output index);
- it is looked up in the cumulative probabilities in the order of ids, so that rounding noise in two
  logits, which may swap their ranks, moves the outcome no further than the noise itself.

Suffixes of tensors: S sequences in the batch, R a subset of them, C candidates, V vocabulary.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Run
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from inlay.base.errors import InlayError, InvalidRequestError
from inlay.engine.torch.native import kernels
from inlay.engine.torch.sampling.constraints import Constraints
from inlay.engine.torch.sampling.draws import TruncationParams, inverse_cdf, ranked, uniform
from inlay.engine.torch.sampling.thinking import ThinkingBudgets, only
from inlay.engine.torch.sequence import Sequence, is_greedy, penalises
from inlay.engine.torch.transfers import Download, upload
from inlay.messages.request import Sampling, TokenLogprobs


class SampledToken(NamedTuple):
    """The next token of a sequence."""

    token_id: int
    logprobs: TokenLogprobs | None


class SampledTokens(NamedTuple):
    """The tokens chosen for the sequences of a step.

    The device has them at once, the host after `read`.

    Attributes:
        ids: int64 (S,), on the device.
        bound: rows whose constraints may leave no token, and the place of each in `told`.
        wanted: row to the number of alternatives requested.
        told: ids; logits of rows in `bound`; the results of `Sampler._logprobs`.
    """

    ids: Tensor
    bound: Mapping[int, int]
    wanted: Mapping[int, int]
    output_logprobs: Download

    def read(self) -> list[SampledToken | InlayError]:
        """Return the next token of each sequence, or an error if none is allowed. Waits."""
        ids_S, best_R, *alternatives = self.output_logprobs.wait()
        logprobs: dict[int, TokenLogprobs] = {}
        if self.wanted:
            own, ids, values = (tensor.tolist() for tensor in alternatives)
            for index, (row, count) in enumerate(self.wanted.items()):
                top = tuple(zip(ids[index][:count], values[index][:count], strict=True))
                logprobs[row] = TokenLogprobs(own[index], top)
        found: list[SampledToken | InlayError] = [
            SampledToken(id_, logprobs.get(row)) for row, id_ in enumerate(ids_S.tolist())
        ]
        for row, place in self.bound.items():
            if best_R[place] == -torch.inf:
                found[row] = InvalidRequestError(
                    "no token is left to choose: what bad_words, allowed_token_ids and the grammar "
                    "allow has nothing in common"
                )
        return found


def _float32(values: Any) -> np.ndarray:
    """Return settings as float32, clamped to its range.

    Infinity would turn forbidden logits into NaN.
    """
    largest = np.finfo(np.float32).max
    return np.clip(np.asarray(values, dtype=np.float64), -largest, largest).astype(np.float32)


def _argmax(values_SV: Tensor) -> Tensor:
    """Return the most likely token of each row.

    On a CPU, torch's own search takes a third of a decode step.
    """
    native = kernels() if values_SV.device.type == "cpu" and values_SV.is_contiguous() else None
    if native is None or not native.serve(values_SV.dtype):
        return values_SV.argmax(dim=-1)
    return native.argmax(values_SV)


class TokenCounts:
    """Distinct ids of a sequence, and the count of each in its output.

    Arrays that grow with the sequence.

    Attributes:
        sequence: the sequence; held so that its `id()` is not reused while this exists.
    """

    __slots__ = ("_counts", "_ids", "_places", "_seen", "_size", "sequence")

    def __init__(self, sequence: Sequence, vocab_size: int) -> None:
        self.sequence = sequence
        prompt = np.unique(np.asarray(sequence.prompt_token_ids, dtype=np.int64))
        prompt = prompt[(prompt >= 0) & (prompt < vocab_size)]
        self._size = len(prompt)
        self._ids = np.zeros(max(64, 2 * self._size), dtype=np.int64)
        self._ids[: self._size] = prompt
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._places = dict(zip(prompt.tolist(), range(self._size), strict=True))
        self._seen = 0

    def catch_up(self, vocab_size: int) -> None:
        """Count the output ids added since the last call."""
        output = self.sequence.output
        for index in range(self._seen, len(output)):
            id_ = output[index]
            if not 0 <= id_ < vocab_size:
                continue
            place = self._places.get(id_)
            if place is None:
                place = self._places[id_] = self._size
                self._size += 1
                if place == len(self._ids):
                    self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                    self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
                self._ids[place] = id_
            self._counts[place] += 1
        self._seen = len(output)

    def __len__(self) -> int:
        return self._size

    @property
    def ids(self) -> np.ndarray:
        """int64: distinct ids of prompt and output."""
        return self._ids[: self._size]

    @property
    def counts(self) -> np.ndarray:
        """float32: count of each id in the output; 0 for ids of the prompt only."""
        return self._counts[: self._size]


class Sampler:
    """Chooses the next token of every sequence in a step.

    Keeps token counts, constraints and thinking budgets of a sequence until `forget`.
    """

    def __init__(
        self, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device
    ) -> None:
        """Create an empty sampler."""
        self._vocab_size = vocab_size
        self._device = device
        self._constraints = Constraints(vocab_size, eos_token_ids, device)
        self._token_counts: dict[int, TokenCounts] = {}
        self._thinking = ThinkingBudgets()

    def draw(self, logits_SV: Tensor, sequences: Run[Sequence]) -> SampledTokens:
        """Choose the next token of each sequence. `logits_SV` is not changed.

        If a row's largest logit is not finite (all -inf, or a NaN), its token is `argmax`. Does not
        wait for the device.

        Args:
            logits_SV: (S, V), float32 or the model's dtype; converted to float32 unless greedy
                choice is enough.
            sequences: S, in the order of the rows.
        """
        others = [
            row
            for row, sequence in enumerate(sequences)
            if not (sequence.is_plain and sequence.sampling.min_tokens <= len(sequence.output))
        ]
        if not others:
            ids_S = _argmax(logits_SV)
            return SampledTokens(ids_S, {}, {}, Download(ids_S, ids_S))
        chosen = [sequences[row] for row in others]
        logits_RV, rows_R = self._rows(logits_SV, others)
        logits_RV = logits_RV.float()
        processed_RV = self._penalised(self._constraints.apply(logits_RV, chosen), chosen)
        ends = self._thinking.forced(chosen)
        if ends:
            processed_RV = only(processed_RV, ends)
        ids_R = self._choose(processed_RV, chosen)
        ids_S = ids_R
        if len(others) < len(sequences):
            ids_S = _argmax(logits_SV)
            ids_S[rows_R] = ids_R
        bound = {
            row: place
            for place, row in enumerate(others)
            if self._constraints.binds(chosen[place].sampling)
        }
        # Where constraints leave no token, the chosen one has a logit of -inf.
        best_R = processed_RV.gather(1, ids_R[:, None])[:, 0] if bound else ids_R
        wanted: dict[int, int] = {}
        named: dict[int, tuple[int, ...]] = {}
        for place, sequence in enumerate(chosen):
            sampling = sequence.sampling
            if sampling.logprobs is not None:
                wanted[place] = min(sampling.logprobs, self._vocab_size)
                if sampling.logprob_token_ids:
                    named[place] = sampling.logprob_token_ids
                    wanted[place] = len(named[place])
        told = Download(ids_S, best_R, *self._logprobs(logits_RV, ids_R, wanted, named))
        return SampledTokens(
            ids_S, bound, {others[place]: count for place, count in wanted.items()}, told
        )

    def _choose(self, processed_SV: Tensor, sequences: Run[Sequence]) -> Tensor:
        """Return ids (S,): greedy or drawn."""
        samplings = [sequence.sampling for sequence in sequences]
        drawn = [row for row, sampling in enumerate(samplings) if not is_greedy(sampling)]
        if len(drawn) < len(samplings):
            ids_S = _argmax(processed_SV)
        else:
            ids_S = torch.zeros(len(samplings), dtype=torch.int64, device=self._device)
        if drawn:
            uniforms = [uniform(samplings[row].seed, len(sequences[row].output)) for row in drawn]
            values_RV, rows_R = self._rows(processed_SV, drawn)
            ids_S[rows_R] = self._draw(values_RV, [samplings[row] for row in drawn], uniforms)
        return ids_S

    def sample(
        self, logits_SV: Tensor, sequences: Run[Sequence]
    ) -> list[SampledToken | InlayError]:
        """Draw and read at once."""
        return self.draw(logits_SV, sequences).read()

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of `sequence`, if any."""
        self._token_counts.pop(id(sequence), None)
        self._constraints.forget(sequence)
        self._thinking.forget(sequence)

    def __len__(self) -> int:
        """Number of sequences with stored state."""
        return len(self._token_counts.keys() | self._constraints.kept() | self._thinking.kept())

    def _tensor(self, values: Run[float] | np.ndarray, dtype: torch.dtype) -> Tensor:
        return upload(torch.as_tensor(values, dtype=dtype), self._device)

    def _penalised(self, logits_SV: Tensor, sequences: Run[Sequence]) -> Tensor:
        """Apply repetition, frequency and presence penalties; a copy if anything changed."""
        rows = [row for row, sequence in enumerate(sequences) if penalises(sequence.sampling)]
        tallies = [self._tally(sequences[row]) for row in rows]
        sizes = [len(tally) for tally in tallies]
        if not sum(sizes):
            return logits_SV
        samplings = [sequences[row].sampling for row in rows]
        settings = _float32(
            [
                (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
                for sampling in samplings
            ]
        )
        # Keep forbidden tokens at -inf: -inf times 0 would be NaN.
        settings[:, 0] = np.maximum(settings[:, 0], np.finfo(np.float32).tiny)
        repetition, frequency, presence = (
            self._tensor(np.repeat(column, sizes), torch.float32) for column in settings.T
        )
        counts = self._tensor(np.concatenate([tally.counts for tally in tallies]), torch.float32)
        place = (
            self._tensor(np.repeat(rows, sizes), torch.int64),
            self._tensor(np.concatenate([tally.ids for tally in tallies]), torch.int64),
        )
        values = logits_SV[place]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values = values - frequency * counts - presence * (counts > 0)
        return logits_SV.index_put(place, values)

    def _tally(self, sequence: Sequence) -> TokenCounts:
        tally = self._token_counts.get(id(sequence))
        if tally is None:
            tally = self._token_counts[id(sequence)] = TokenCounts(sequence, self._vocab_size)
        tally.catch_up(self._vocab_size)
        return tally

    def _rows(self, values_SV: Tensor, rows: Run[int]) -> tuple[Tensor, Tensor]:
        """Return the given rows (without a copy if all), and their indices on the device."""
        rows_R = self._tensor(rows, torch.int64)
        return (values_SV if len(rows) == len(values_SV) else values_SV[rows_R]), rows_R

    def _draw(self, values_RV: Tensor, samplings: Run[Sampling], uniforms: Run[float]) -> Tensor:
        """Draw ids (R,) after temperature, min_p, top_k and top_p."""
        temperatures = _float32([sampling.temperature for sampling in samplings])
        scaled_RV = values_RV / self._tensor(temperatures, torch.float32)[:, None]
        uniform_R = self._tensor(uniforms, torch.float64)
        best_R = _argmax(scaled_RV)
        finite_R = scaled_RV.gather(1, best_R[:, None])[:, 0].isfinite()
        if self._device.type != "cpu" or not bool(finite_R.all()):
            # Keeps look-ups in range; the result of such rows is not used.
            scaled_RV.masked_fill_(~finite_R[:, None], 0.0)
        ids_R = torch.zeros_like(best_R)

        # Rows without truncation need no ranking: every token is a candidate.
        free = [row for row, sampling in enumerate(samplings) if not self._truncates(sampling)]
        if free:
            open_RV, open_R = self._rows(scaled_RV, free)
            ids_R[open_R] = inverse_cdf(open_RV.softmax(dim=-1), uniform_R[open_R])

        cut = [row for row, sampling in enumerate(samplings) if self._truncates(sampling)]
        if cut:
            open_RV, open_R = self._rows(scaled_RV, cut)
            params = TruncationParams.of(
                [samplings[row] for row in cut], self._vocab_size, self._device
            )
            ids_R[open_R] = params.draw(open_RV, uniform_R[open_R])
        return torch.where(finite_R, ids_R, best_R)

    def _truncates(self, sampling: Sampling) -> bool:
        return 0 < sampling.top_k < self._vocab_size or sampling.top_p < 1 or sampling.min_p > 0

    def _logprobs(
        self,
        logits_SV: Tensor,
        ids_S: Tensor,
        wanted: Mapping[int, int],
        named: Mapping[int, tuple[int, ...]],
    ) -> tuple[Tensor, ...]:
        """Return logprobs of `logits_SV`: of the chosen tokens (R,), ids and logprobs (R, C).

        Empty if no rows want any.

        Args:
            logits_SV: the model's logits.
            ids_S: the chosen tokens.
            wanted: row to number of alternatives.
            named: row to the alternatives, if they are given and not the best.
        """
        if not wanted:
            return ()
        logits_RV, rows_R = self._rows(logits_SV, list(wanted))
        logprobs_RV = logits_RV.log_softmax(dim=-1)
        own_R = logprobs_RV.gather(1, ids_S[rows_R][:, None])[:, 0]
        best = max((count for row, count in wanted.items() if row not in named), default=0)
        width = max(1, *wanted.values())
        ids_RC = torch.zeros(len(wanted), width, dtype=torch.int64, device=self._device)
        if best:
            finite_RV = logits_RV.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
            ids_RC[:, :best] = ranked(finite_RV, best)
        for place, row in enumerate(wanted):
            if row in named:
                ids_RC[place, : wanted[row]] = self._tensor(named[row], torch.int64)
        return own_R, ids_RC, logprobs_RV.gather(1, ids_RC)
