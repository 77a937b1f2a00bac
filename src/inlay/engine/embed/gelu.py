"""GELU fused into the linear layer before it, on a CPU."""

import logging
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from inlay.engine.torch.native import kernels
from inlay.engine.torch.weights.linear_methods import PackedLinear, packs

_logger = logging.getLogger(__name__)

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def fuse_gelu(model: nn.Module, place: tuple[str, str, str]) -> None:
    """Fuse linear and GELU in every module of one class, where the result is the same.

    Args:
        model: on its device, in its final dtype.
        place: suffix of the module's class name, the attribute of its GELU, and the attribute of
            the linear before it.
    """
    ending, activation, linear = place
    first = next(model.parameters())
    if first.device.type != "cpu" or not packs(first.dtype):
        return
    for parent in list(model.modules()):
        if type(parent).__name__.endswith(ending) and isinstance(
            getattr(parent, linear, None), nn.Linear
        ):
            fused = _fused(getattr(parent, linear), getattr(parent, activation))
            if fused is None:
                return
            setattr(parent, linear, fused)
            setattr(parent, activation, nn.Identity())


def _fused(linear: nn.Linear, activation: Any) -> PackedLinear | None:
    """Return the fused product, or None if its result differs.

    It differs for other activations, and is missing in some builds of torch.
    """
    weight = linear.weight
    x = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(1)).to(weight.dtype)
    native = kernels()
    try:
        with torch.inference_mode():
            fused = PackedLinear(
                weight, linear.bias, gelu=True, products=None if native is None else native.products
            )
            expected = activation(F.linear(x, weight, linear.bias)).float()
            error = (fused(x).float() - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
    except RuntimeError as unknown:
        _logger.warning("GELU is not applied in products: %s", unknown)
        return None
    return fused if error <= _TOLERANCE[weight.dtype] else None
