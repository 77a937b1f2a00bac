"""Weights of multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024), for a latent cache.

The keys and values of a position are products of its latent, so pages keep the latent and the one
rotary part that all heads share. A product with a key is the same as one of the latent with the
query times the key's weight, and a sum of values is a sum of latents times the value's weight:
with queries and outputs *absorbed* in this way, attention is that of one head whose value is the
first part of its key. For many queries it is cheaper to *expand* the latents again.

Shapes: Q heads, T queries, L positions, K elements of a key that stand for its latent, R rotary
elements, E elements of a value, C of a latent, A rank of an adapter.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inlay.engine.torch.lora import AdaptedLinear, LoraBank
from inlay.engine.torch.weights.quantised.weight import KeptWeight

_EXPANDING = "expand_kv"
"""Method of transformers' modules that makes keys and values of latents."""


class LatentWeights(nn.Module):
    """The weights by which latents become the keys and values of all heads.

    Attributes:
        rotary: R.
        latent_size: C.
        value_size: E.
    """

    def __init__(self, weight: Tensor, heads: int, rotary: int, value_size: int) -> None:
        """Take `weight` [Q * (K + E), C] apart."""
        super().__init__()
        both = weight.detach().view(heads, -1, weight.shape[1])
        keys, values = torch.split(both, [both.shape[1] - value_size, value_size], 1)
        self._keys = nn.Parameter(keys.contiguous(), requires_grad=False)
        # Transposed, as a batched product in 16 bits would copy it each time.
        self._values = nn.Parameter(values.transpose(1, 2).contiguous(), requires_grad=False)
        self.rotary = rotary
        self.latent_size = weight.shape[1]
        self.value_size = value_size
        self.adapted: AdaptedLinear | None = None

    def worth_expanding(self, count: int, context: int) -> bool:
        """Return True if `count` queries at the end of `context` positions are cheaper expanded.

        By the multiplications of a head.
        """
        size, seen = self._keys.shape[1], count * (context - (count - 1) // 2)
        weights = self.latent_size * (size + self.value_size)
        expanded = context * weights + seen * (size + self.rotary + self.value_size)
        return expanded < count * weights + seen * (2 * self.latent_size + self.rotary)

    def absorb(self, query: Tensor, adapters: Sequence[tuple[int, Tensor]]) -> Tensor:
        """Return queries of latents [Q, T, C + R] for queries [Q, T, K + R].

        `adapters` are slots, and the indices of queries that have their adapters.
        """
        own, rotary = torch.split(query, [query.shape[2] - self.rotary, self.rotary], 2)
        found = torch.cat((torch.bmm(own, self._keys), rotary), 2)
        for slot, rows in adapters:
            for down, up in self._low_rank(slot):
                low = torch.bmm(own[:, rows], up[:, : own.shape[2]])
                found[:, rows, : self.latent_size] += low @ down
        return found

    def outputs(self, found: Tensor, adapters: Sequence[tuple[int, Tensor]]) -> Tensor:
        """Return weighted sums of values, [T, Q, E], from those of latents, [T, Q, C]."""
        sums = found.transpose(0, 1)
        values = torch.bmm(sums, self._values)
        for slot, rows in adapters:
            for down, up in self._low_rank(slot):
                low = sums[:, rows] @ down.T
                values[:, rows] += torch.bmm(low, up[:, -self.value_size :].transpose(1, 2))
        return values.transpose(0, 1)

    def expand(self, latents: Tensor, heads: slice, slot: int) -> tuple[Tensor, Tensor]:
        """Return keys [heads, L, K + R] and values [heads, L, E] of some heads.

        `latents` [L, C + R] are as in pages; `slot` is that of their adapter, or `lora.BASE`.
        """
        own, rotary = torch.split(latents, [self.latent_size, self.rotary], 1)
        weights, size = self._keys[heads], self._keys.shape[1]
        keys = own.new_empty(len(weights), len(own), size + self.rotary)
        products = F.linear(own, weights.flatten(0, 1)).view(len(own), -1, size)
        keys[..., :size] = products.transpose(0, 1)
        keys[..., size:] = rotary
        values = torch.matmul(own, self._values[heads])
        for down, up in self._low_rank(slot):
            low, ups = own @ down.T, up[heads].transpose(1, 2)
            keys[..., :size] += torch.matmul(low, ups[..., :size])
            values += torch.matmul(low, ups[..., size:])
        return keys, values

    def _low_rank(self, slot: int) -> list[tuple[Tensor, Tensor]]:
        """Return down [A, C] and up [Q, K + E, A] of the adapter in `slot`, if it has them."""
        low = None if self.adapted is None else self.adapted.matrices(slot, 0)
        if low is None:
            return []
        return [(low.down, low.up.view(len(low.up), len(self._keys), -1).permute(1, 2, 0))]


def keep_latent(model: nn.Module, bank: LoraBank | None) -> None:
    """Let the modules of latent attention in `model` hand latents to their attention function.

    Their keys become [1, 1, T, C + R] and their values the first C elements of these; the weights
    are in `module.latent`. Before `accelerate`, which would pack the weight for what it is not used
    for.

    Args:
        model: on its device, in its final dtype.
        bank: gets a place for adapters of the weight.
    """
    for path, module in list[tuple[str, Any]](model.named_modules()):
        if not hasattr(module, _EXPANDING):
            continue
        weight = module.kv_b_proj.weight
        dense = weight
        if isinstance(weight, KeptWeight):
            dense = weight.quantised.dense().to(weight.dtype)
        latent = LatentWeights(dense, module.num_heads, module.qk_rope_head_dim, module.v_head_dim)
        if bank is not None:
            place = f"{path}.kv_b_proj"
            adapted = bank.adapt(nn.Identity(), dense, [place], [len(dense)])
            latent.adapted = cast("AdaptedLinear", adapted)
        del module.kv_b_proj
        module.latent = latent
        setattr(module, _EXPANDING, _latent_keys)


def _latent_keys(latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Return a key of both [1, 1, T, C + R], and `latent` [1, 1, T, C] as its value."""
    return torch.cat((latent, rotary), -1), latent
