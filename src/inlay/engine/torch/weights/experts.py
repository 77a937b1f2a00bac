"""Experts: those in GGUF's blocks, and those of sizes that torch's grouped product refuses."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from inlay.engine.torch.native.integers import BlockProduct
from inlay.engine.torch.weights.quantised.blocks import ExpertBlocks
from inlay.engine.torch.weights.quantised.weight import KeptWeight

_ALIGNMENT = 16
"""Bytes of which a row of weights or activations must be a multiple there."""

EXPERT_ROUNDINGS = 4
"""Of gate and up, of what they give together, of what an expert gives, and of their sum."""


def compute_apart(model: nn.Module) -> None:
    """Have transformers compute the experts of `model` one after another, where it must."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if not type(module).__name__.endswith("Experts") or config is None:
            continue
        weights = [each for each in module.parameters(recurse=False) if each.dim() > 2]
        sizes = [size * each.itemsize for each in weights for size in each.shape[1:]]
        kept = any(isinstance(each, KeptWeight) for each in weights)
        if kept or any(size % _ALIGNMENT for size in sizes):
            config._experts_implementation = "eager"


class BlockExperts(nn.Module):
    """The experts of a layer in GGUF's blocks: the rows that chose one are one product with it.

    What experts give is summed in float32, in the order of a row's choice, and rounded once, so
    that the bits of a row do not depend on the others.
    """

    def __init__(self, own: Any, gate_up: ExpertBlocks, down: ExpertBlocks) -> None:
        """Take the place of transformers' module `own`, whose gate this is."""
        super().__init__()
        self._gated: Callable[[Tensor], Tensor] = own._apply_gate
        self._gate_up, self._down = _products(gate_up), _products(down)

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Compute [T, C] to [T, C]; `chosen` and `weights` [T, K] are of experts."""
        rows, choices = chosen.shape
        order = chosen.flatten().argsort(stable=True)
        given, found = hidden[order // choices], hidden.new_empty(rows * choices, hidden.shape[-1])
        start = 0
        for expert, count in enumerate(chosen.flatten().bincount().tolist()):
            if count:
                place = order[start : start + count]
                inner = self._gated(self._gate_up[expert](given[start : start + count]))
                found[place] = self._down[expert](inner)
                start += count
        parts = found.view(rows, choices, -1).float() * weights[..., None].float()
        return parts.sum(1).to(hidden.dtype)


def weights_of_experts(module: nn.Module) -> list[str]:
    """Return the names of a module's matrices of experts, [E, O, I] each, that may be in blocks.

    Empty for what is none, or has biases or another layout, as transformers' module itself says.
    """
    says = {"has_gate": True, "is_concatenated": True, "is_transposed": False, "has_bias": False}
    says["has_post_expert_norm"] = False
    plain = all(getattr(module, name, None) is said for name, said in says.items())
    return ["gate_up_proj", "down_proj"] if plain else []


def faster_experts(module: nn.Module) -> BlockExperts | None:
    """Return the replacement of a module of experts in blocks; None for any other."""
    weights = [getattr(module, name) for name in weights_of_experts(module)]
    match [each.quantised for each in weights if isinstance(each, KeptWeight)]:
        case [ExpertBlocks() as gate_up, ExpertBlocks() as down]:
            return BlockExperts(module, gate_up, down)
    return None


def routed(experts: nn.Module, count: int) -> Any:
    """Return `experts` as a module of rows [R, C] alone, each of which chooses two of `count`.

    Two more than the first, those in the middle and the last are not: to dequantise all takes long.
    """
    some = torch.tensor([0, count // 2, count - 1])

    def compute(x: Tensor) -> Tensor:
        at = torch.arange(len(x))
        chosen = torch.stack([some[at % 3], some[(at + 1) % 3]], -1)
        weights = torch.tensor([0.7, 0.3]).to(x.dtype).expand(len(x), 2)
        found: Tensor = experts(x, chosen, weights)
        return found

    return compute


def _products(experts: ExpertBlocks) -> list[BlockProduct]:
    return [each.native.multiplier(each.parts, None) for each in experts.experts]
