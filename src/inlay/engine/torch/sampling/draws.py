"""Ranking of tokens and draws from truncated distributions: pure functions of logits.

Suffixes of tensors: R rows, C candidates, V vocabulary, B blocks.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from blake3 import blake3
from torch import Tensor

from inlay.engine.torch.transfers import upload
from inlay.messages.request import Sampling

WIDTHS = (256, 4096, 32768)
"""Numbers of candidates to rank before the whole vocabulary is ranked.

256 nearly always suffice for a top_p, at a fiftieth of the cost of sorting 150,000.
"""

FEW = 1024
"""Values of a row that are sorted however few are wanted; many more rank by keys."""

CDF_BLOCK = 512
"""Weights summed at once when a uniform number is looked up."""

_counter = struct.Struct("<QQ")


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
    that reach it are sorted. Where many do, as all of a row of equal values, keys say which: one
    such row would make all rows of the batch as wide.
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
    reached_RV = values_RV >= reach_R1
    counts_R = reached_RV.count_nonzero(dim=-1)
    many_R = counts_R > max(FEW, 4 * count)
    if many_R.any():
        best_RC = ranked_by_key(values_RV[many_R], count)
        reached_RV[many_R] = reached_RV.new_zeros(len(best_RC), size).scatter(1, best_RC, True)
        counts_R[many_R] = count
    rows, ids = reached_RV.nonzero(as_tuple=True)
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
    ids_V = torch.arange(values_RV.shape[1], device=values_RV.device)
    return ((_order(values_RV) << 32) - ids_V).topk(count, dim=-1).indices


def _order(values: Tensor) -> Tensor:
    """Return int64 numbers of 32 bits that are ordered as float32 `values` are."""
    # Adding 0.0 turns -0.0 into 0.0. Bits of negative floats order in reverse.
    bits = (values + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)


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

    def draw(self, values_RV: Tensor, uniform_R: Tensor) -> Tensor:
        """Draw ids (R,); on a CPU by widening the candidates until they suffice.

        `values_RV` are float32 logits after temperature, the highest of each row finite;
        `uniform_R` are float64.
        """
        device = values_RV.device
        if device.type != "cpu":
            # Whether candidates suffice is not known without waiting for the device.
            return inverse_cdf(self.truncated(values_RV), uniform_R)
        ids_R = torch.zeros(len(values_RV), dtype=torch.int64, device=device)
        open_R = torch.arange(len(values_RV), device=device)
        params = self
        for width in (*WIDTHS, self.vocab_size):
            count = min(width, self.vocab_size)
            candidates_RC = ranked(values_RV, count)
            weights_RC, settled_R = params.weigh(values_RV, candidates_RC)
            by_id_RC, order_RC = candidates_RC.sort(dim=-1)
            places_R = inverse_cdf(weights_RC.gather(1, order_RC), uniform_R[open_R])
            ids_R[open_R] = by_id_RC.gather(1, places_R[:, None])[:, 0]
            if count >= params.widest or bool(settled_R.all()):
                break
            open_R, values_RV = open_R[~settled_R], values_RV[~settled_R]
            params = params.select(~settled_R)
        return ids_R

    def truncated(self, values_RV: Tensor) -> Tensor:
        """Return weights of all tokens, zero for truncated ones, without a wait for the device.

        What is kept is a prefix of the ranking: all tokens above some value, and of those that
        have it the first ones. The value is found by halving the range of its 32 bits.

        Args:
            values_RV: float32 logits after temperature, the highest of each row finite.
        """
        order_RV = _order(values_RV)
        best_R1 = values_RV.amax(dim=-1, keepdim=True)
        weights_RV = (values_RV - best_R1).to(torch.float64).exp()
        likely_R = (weights_RV >= self.min_p_R[:, None]).sum(dim=-1)
        most_R = torch.minimum(self.top_k_R, likely_R).clamp(min=1)
        kept_RV = _prefix(order_RV, torch.ones_like(weights_RV), most_R.to(torch.float64))
        # The total to which top_p refers: the weights left by min_p and top_k, which are all
        # weights where neither is set.
        total_R = (weights_RV * kept_RV).sum(dim=-1)
        nucleus_RV = _prefix(order_RV, weights_RV, self.top_p_R * total_R)
        kept_RV &= nucleus_RV | (self.top_p_R >= 1)[:, None]
        return weights_RV * kept_RV

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


def _prefix(order_RV: Tensor, weights_RV: Tensor, target_R: Tensor) -> Tensor:
    """Return the shortest prefix of the ranking whose weights reach a target, bool (R, V).

    At least one token; all of them where the target is out of reach.

    Args:
        order_RV: int64 of 32 bits, higher ones first; equal ones by id.
        weights_RV: float64, equal where `order_RV` is.
        target_R: float64.
    """
    target_R = target_R.clamp(min=torch.finfo(torch.float64).tiny)
    low_R = torch.full_like(target_R, -(1 << 31), dtype=torch.int64)
    high_R = torch.full_like(low_R, (1 << 31) - 1)
    # The highest bound at which the tokens from there on reach the target.
    for _ in range(32):
        middle_R = (low_R + high_R + 1) >> 1
        above_RV = order_RV >= middle_R[:, None]
        reached_R = (weights_RV * above_RV).sum(dim=-1) >= target_R
        low_R = torch.where(reached_R, middle_R, low_R)
        high_R = torch.where(reached_R, high_R, middle_R - 1)
    above_RV, equal_RV = order_RV > low_R[:, None], order_RV == low_R[:, None]
    missing_R = target_R - (weights_RV * above_RV).sum(dim=-1)
    each_R = (weights_RV * equal_RV).amax(dim=-1)
    needed_R = (missing_R / each_R).ceil().clamp(min=1)
    return above_RV | (equal_RV & (equal_RV.cumsum(dim=-1) <= needed_R[:, None]))
