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

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from inlay.engine.torch.native import kernels
from inlay.engine.torch.sampling.constraints import ConstrainedSequence, Constraints
from inlay.engine.torch.sampling.thinking import Thoughtful, Thoughts, only
from inlay.engine.torch.sampling.token_counts import CountedSequence, TokenCounts
from inlay.engine.torch.transfers import Download, upload
from inlay.errors import InlayError, InvalidRequestError
from inlay.request import Sampling, TokenLogprobs

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM."""

WIDTHS = (256, 4096, 32768)
"""Numbers of candidates to rank before the whole vocabulary is ranked.

256 nearly always suffice for a top_p, at a fiftieth of the cost of sorting 150,000.
"""

CDF_BLOCK = 512
"""Weights summed at once when a uniform number is looked up."""

_counter = struct.Struct("<QQ")


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


class SampledSequence(ConstrainedSequence, CountedSequence, Thoughtful, Protocol):
    """A sequence as the sampler sees it."""


def uniform(seed: int, index: int) -> float:
    """Return the number in [0, 1) for output `index` under `seed`.

    53 bits of BLAKE3 of the two, modulo 2**64 each.
    """
    data = _counter.pack(seed & 0xFFFFFFFFFFFFFFFF, index & 0xFFFFFFFFFFFFFFFF)
    return (int.from_bytes(blake3(data).digest(8), "little") >> 11) * 2.0**-53


def ranked(values_RV: Tensor, count: int) -> Tensor:
    """Return the ids (R, count) of the highest values, best first; `count` >= 1, no NaN.

    `topk` alone may return any of several equal values, and a full sort is slow. The `count`-th
    largest of the maxima of blocks is a lower bound of the `count`-th largest value; only values
    that reach it are sorted.
    """
    num_rows, size = values_RV.shape
    if values_RV.device.type != "cpu":
        return ranked_by_key(values_RV, count)
    if count == size:
        return values_RV.sort(dim=-1, descending=True, stable=True).indices
    block = max(1, size // (4 * count))
    blocks = size // block
    tops = values_RV[:, : blocks * block].view(num_rows, blocks, block).amax(dim=-1)
    reach_R1 = tops.topk(count, dim=-1).values[:, -1:]
    rows, ids = (values_RV >= reach_R1).nonzero(as_tuple=True)
    counts_R = torch.bincount(rows, minlength=num_rows)
    places = torch.arange(len(ids), device=ids.device) - (counts_R.cumsum(0) - counts_R)[rows]
    shape = (num_rows, int(counts_R.max()))
    found_RN = ids.new_zeros(shape).index_put((rows, places), ids)
    values_RN = values_RV.new_full(shape, -torch.inf).index_put(
        (rows, places), values_RV[rows, ids]
    )
    order_RC = values_RN.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return found_RN.gather(1, order_RC)


def ranked_by_key(values_RV: Tensor, count: int) -> Tensor:
    """Rank as `ranked` does, with an amount of work independent of the data.

    The ranks become distinct integer keys.
    """
    # Adding 0.0 turns -0.0 into 0.0. Bits of negative floats order in reverse.
    bits_RV = (values_RV + 0.0).view(torch.int32)
    order_RV = torch.where(bits_RV < 0, bits_RV ^ 0x7FFFFFFF, bits_RV).to(torch.int64)
    ids_V = torch.arange(values_RV.shape[1], device=values_RV.device)
    return ((order_RV << 32) - ids_V).topk(count, dim=-1).indices


def _penalises(sampling: Sampling) -> bool:
    return (
        sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty != 0.0
        or sampling.presence_penalty != 0.0
    )


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


def _is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature < GREEDY_BELOW


def _is_plain(sequence: SampledSequence) -> bool:
    """Return True if plain greedy choice is enough."""
    sampling = sequence.sampling
    return (
        _is_greedy(sampling)
        and sampling.logprobs is None
        and not (_penalises(sampling) or sampling.logit_bias or sampling.bad_words)
        and sampling.allowed_token_ids is None
        and sampling.thinking is None
        and sequence.grammar is None
        and sampling.min_tokens <= len(sequence.output)
    )


class Sampler:
    """Chooses the next token of every sequence in a step.

    Keeps token counts, constraints and thinking budgets of a sequence until `forget`.
    """

    def __init__(
        self, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device
    ) -> None:
        """Create an empty sampler.

        Args:
            vocab_size: width of the logits.
            eos_token_ids: the model's own end tokens.
            device: device of the logits.
        """
        self._vocab_size = vocab_size
        self._device = device
        self._constraints = Constraints(vocab_size, eos_token_ids, device)
        self._token_counts: dict[int, TokenCounts] = {}
        self._thoughts = Thoughts()

    def draw(self, logits_SV: Tensor, sequences: Sequence[SampledSequence]) -> SampledTokens:
        """Choose the next token of each sequence. `logits_SV` is not changed.

        If a row's largest logit is not finite (all -inf, or a NaN), its token is `argmax`. Waits
        for the device only if the number of candidates has no known limit: top_p or min_p without
            top_k.

        Args:
            logits_SV: (S, V), float32 or the model's dtype; converted to float32 unless greedy
                choice is enough.
            sequences: S, in the order of the rows.
        """
        others = [row for row, sequence in enumerate(sequences) if not _is_plain(sequence)]
        if not others:
            ids_S = _argmax(logits_SV)
            return SampledTokens(ids_S, {}, {}, Download(ids_S, ids_S))
        chosen = [sequences[row] for row in others]
        logits_RV, rows_R = self._rows(logits_SV, others)
        logits_RV = logits_RV.float()
        processed_RV = self._penalised(self._constraints.apply(logits_RV, chosen), chosen)
        ends = self._thoughts.forced(chosen)
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

    def _choose(self, processed_SV: Tensor, sequences: Sequence[SampledSequence]) -> Tensor:
        """Return ids (S,): greedy or drawn."""
        samplings = [sequence.sampling for sequence in sequences]
        drawn = [row for row, sampling in enumerate(samplings) if not _is_greedy(sampling)]
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
        self, logits_SV: Tensor, sequences: Sequence[SampledSequence]
    ) -> list[SampledToken | InlayError]:
        """Draw and read at once."""
        return self.draw(logits_SV, sequences).read()

    def forget(self, sequence: SampledSequence) -> None:
        """Drop the state of `sequence`, if any."""
        self._token_counts.pop(id(sequence), None)
        self._constraints.forget(sequence)
        self._thoughts.forget(sequence)

    def __len__(self) -> int:
        """Number of sequences with stored state."""
        return len(self._token_counts.keys() | self._constraints.kept() | self._thoughts.kept())

    def _tensor(self, values: Sequence[float] | np.ndarray, dtype: torch.dtype) -> Tensor:
        return upload(torch.as_tensor(values, dtype=dtype), self._device)

    def _penalised(self, logits_SV: Tensor, sequences: Sequence[SampledSequence]) -> Tensor:
        """Apply repetition, frequency and presence penalties; a copy if anything changed."""
        rows = [row for row, sequence in enumerate(sequences) if _penalises(sequence.sampling)]
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

    def _tally(self, sequence: SampledSequence) -> TokenCounts:
        tally = self._token_counts.get(id(sequence))
        if tally is None:
            tally = self._token_counts[id(sequence)] = TokenCounts(sequence, self._vocab_size)
        tally.catch_up(self._vocab_size)
        return tally

    def _rows(self, values_SV: Tensor, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the given rows (without a copy if all), and their indices on the device."""
        rows_R = self._tensor(rows, torch.int64)
        return (values_SV if len(rows) == len(values_SV) else values_SV[rows_R]), rows_R

    def _draw(
        self, values_RV: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]
    ) -> Tensor:
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
            bounds = TruncationParams.of(
                [samplings[row] for row in cut], self._vocab_size, self._device
            )
            ids_R[open_R] = self._draw_cut(open_RV, uniform_R[open_R], bounds)
        return torch.where(finite_R, ids_R, best_R)

    def _truncates(self, sampling: Sampling) -> bool:
        return 0 < sampling.top_k < self._vocab_size or sampling.top_p < 1 or sampling.min_p > 0

    def _draw_cut(self, values_RV: Tensor, uniform_R: Tensor, bounds: "TruncationParams") -> Tensor:
        """Draw ids (R,) within truncation limits, widening the candidates until they suffice."""
        ids_R = torch.zeros(len(values_RV), dtype=torch.int64, device=self._device)
        open_R = torch.arange(len(values_RV), device=self._device)
        for width in (*WIDTHS, self._vocab_size):
            count = min(width, self._vocab_size)
            candidates_RC = ranked(values_RV, count)
            weights_RC, settled_R = bounds.weigh(values_RV, candidates_RC)
            by_id_RC, order_RC = candidates_RC.sort(dim=-1)
            places_R = inverse_cdf(weights_RC.gather(1, order_RC), uniform_R[open_R])
            ids_R[open_R] = by_id_RC.gather(1, places_R[:, None])[:, 0]
            if count >= bounds.widest or bool(settled_R.all()):
                break
            open_R, values_RV, bounds = (
                open_R[~settled_R],
                values_RV[~settled_R],
                bounds.select(~settled_R),
            )
        return ids_R

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


def inverse_cdf(weights_RC: Tensor, uniform_R: Tensor) -> Tensor:
    """Return indices (R,) where the cumulative weights first exceed the uniform share of their sum.

    Never an index of weight zero.

    In two steps, blocks and then one block, as cumulating a whole vocabulary in float64 costs more
    than the rest of a draw.
    """
    num_rows, size = weights_RC.shape
    blocks = size // CDF_BLOCK
    whole = blocks * CDF_BLOCK
    sums = [
        weights_RC[:, :whole].view(num_rows, blocks, CDF_BLOCK).sum(dim=-1, dtype=torch.float64),
        weights_RC[:, whole:].sum(dim=-1, keepdim=True, dtype=torch.float64),
    ]
    blocks_RB = torch.cat(sums, dim=1).cumsum(dim=-1)
    total_R1 = blocks_RB[:, -1:]
    target_R1 = _below(uniform_R[:, None] * total_R1, total_R1)
    block_R1 = torch.searchsorted(blocks_RB, target_R1, right=True)
    before_R1 = torch.where(block_R1 > 0, blocks_RB.gather(1, (block_R1 - 1).clamp(min=0)), 0.0)

    places_RB = block_R1 * CDF_BLOCK + torch.arange(CDF_BLOCK, device=weights_RC.device)
    inside_RB = weights_RC.gather(1, places_RB.clamp(max=size - 1)) * (places_RB < size)
    cumulated_RB = inside_RB.cumsum(dim=-1, dtype=torch.float64)
    target_R1 = _below(target_R1 - before_R1, cumulated_RB[:, -1:])
    return (block_R1 * CDF_BLOCK + torch.searchsorted(cumulated_RB, target_R1, right=True))[:, 0]


def _below(values: Tensor, limits: Tensor) -> Tensor:
    """Return `values` lowered where rounding has reached their limit.

    No cumulative weight exceeds such a value.
    """
    return torch.minimum(values, torch.nextafter(limits, torch.zeros_like(limits)))


class TruncationParams(NamedTuple):
    """Truncation parameters of a draw, one entry per row.

    Attributes:
        top_k_R: int64, at least 1, at most the vocabulary.
        top_p_R: float64; 1 or more means all.
        min_p_R: float64, relative to the likeliest token's probability.
        vocab_size: vocabulary of the model.
        widest: number of candidates that suffices for every row, whatever its logits.
        uncut: True if in some rows only top_p may truncate.
    """

    top_k_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor
    vocab_size: int
    widest: int
    uncut: bool

    @classmethod
    def of(
        cls, samplings: Sequence[Sampling], vocab_size: int, device: torch.device
    ) -> "TruncationParams":
        """Return the parameters of `samplings`."""
        top_k = [
            min(sampling.top_k, vocab_size) if sampling.top_k > 0 else vocab_size
            for sampling in samplings
        ]
        top_p = [sampling.top_p for sampling in samplings]
        min_p = [sampling.min_p for sampling in samplings]
        return cls(
            upload(torch.as_tensor(top_k, dtype=torch.int64), device),
            upload(torch.as_tensor(top_p, dtype=torch.float64), device),
            upload(torch.as_tensor(min_p, dtype=torch.float64), device),
            vocab_size,
            max(top_k),
            any(
                sampling.min_p <= 0 and k == vocab_size
                for sampling, k in zip(samplings, top_k, strict=True)
            ),
        )

    def select(self, rows: Tensor) -> "TruncationParams":
        """Return the parameters of `rows`."""
        return self._replace(
            top_k_R=self.top_k_R[rows], top_p_R=self.top_p_R[rows], min_p_R=self.min_p_R[rows]
        )

    def weigh(self, scaled_RV: Tensor, candidates_RC: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights of candidates, and the rows for which the candidates suffice.

        Args:
            scaled_RV: float32 logits after temperature, the highest of each row finite.
            candidates_RC: the highest ranking ids, best first.

        Returns:
            float64 (R, C), zero for truncated candidates, and bool (R,): False where more
            candidates are needed.
        """
        count = candidates_RC.shape[1]
        values_RC = scaled_RV.gather(1, candidates_RC).to(torch.float64)
        weights_RC = (values_RC - values_RC[:, :1]).exp()
        cumulated_RC = weights_RC.cumsum(dim=-1)

        likely_R = (weights_RC >= self.min_p_R[:, None]).sum(dim=-1)
        kept_R = torch.minimum(self.top_k_R.clamp(max=count), likely_R).clamp(min=1)
        whole = count == self.vocab_size
        known_R = (self.top_k_R <= count) | (likely_R < count) | whole

        # The total to which top_p refers: the weights left by min_p and top_k, or all weights.
        uncut_R = (self.top_k_R == self.vocab_size) & (self.min_p_R <= 0)
        total_R = cumulated_RC.gather(1, kept_R[:, None] - 1)[:, 0]
        if self.uncut:
            everything_R = 1 / scaled_RV.softmax(dim=-1).amax(dim=-1).to(torch.float64)
            total_R = torch.where(uncut_R, everything_R, total_R)
        short_RC = cumulated_RC < (self.top_p_R * total_R)[:, None]
        needed_R = short_RC.sum(dim=-1) + 1
        known_R = known_R | (uncut_R & (needed_R <= count))
        kept_R = torch.where(self.top_p_R < 1, torch.minimum(kept_R, needed_R), kept_R)

        places_C = torch.arange(count, device=candidates_RC.device)
        return weights_RC * (places_C < kept_R[:, None]), known_R


__all__ = ["SampledSequence", "SampledToken", "Sampler"]
