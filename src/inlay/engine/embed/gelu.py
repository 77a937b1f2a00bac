"""Linear and exact GELU in one product, of encoders on a CPU."""

import logging
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import GELUActivation

from inlay.engine.torch.native import kernels
from inlay.engine.torch.weights.linear_methods import TOLERANCE, PackedLinear, differ, packs

_logger = logging.getLogger(__name__)


def fuse_gelu(model: nn.Module, place: tuple[str, str, str]) -> None:
    """Fuse linear and exact GELU in every module of one class that has them.

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
            if not _is_exact_gelu(getattr(parent, activation)):
                return
            fused = _fused(getattr(parent, linear))
            if fused is None:
                return
            setattr(parent, linear, fused)
            setattr(parent, activation, nn.Identity())


def _is_exact_gelu(activation: object) -> bool:
    """Return True for x * Phi(x), but not for its approximations, nor for any other function."""
    if isinstance(activation, nn.GELU):
        known = activation.approximate == "none"
    else:
        known = isinstance(activation, GELUActivation)
    grid = torch.linspace(-10, 10, 4001)
    with torch.inference_mode():
        return known and torch.allclose(cast("Any", activation)(grid), F.gelu(grid), atol=1e-6)


def _fused(linear: nn.Linear) -> PackedLinear | None:
    """Return the product followed by the exact GELU; None if some build of torch lacks it."""
    weight, native = linear.weight, kernels()
    x = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(1)).to(weight.dtype)
    try:
        with torch.inference_mode():
            fused = PackedLinear(
                weight, linear.bias, gelu=True, products=None if native is None else native.products
            )
            # The fused one is given what the product has before it is rounded.
            product = F.linear(x.float(), *(part.float() for part in linear.parameters()))
            error = differ(fused(x), F.gelu(product))
    except RuntimeError as unknown:
        _logger.warning("GELU is not applied in products: %s", unknown)
        return None
    if error <= TOLERANCE[weight.dtype]:
        return fused
    _logger.warning("GELU in a product differs by %.3g and is not used", error)
    return None
