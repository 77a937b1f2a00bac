"""Experts of sizes that torch's grouped product refuses."""

from typing import Any

from torch import nn

_ALIGNMENT = 16
"""Bytes of which a row of weights or activations must be a multiple there."""


def compute_apart(model: nn.Module) -> None:
    """Have transformers compute the experts of `model` one after another, where it must."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if not type(module).__name__.endswith("Experts") or config is None:
            continue
        weights = [each for each in module.parameters(recurse=False) if each.dim() > 2]
        sizes = [size * each.itemsize for each in weights for size in each.shape[1:]]
        if any(size % _ALIGNMENT for size in sizes):
            config._experts_implementation = "eager"
