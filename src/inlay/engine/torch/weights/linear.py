"""Faster modules that replace a model's own after loading.

Three replacements, each compared with the original before it is used:
- projections of the same input become one product (query, key, value; gate, up);
- on a CPU, weights are packed once for oneDNN (`mkldnn::_reorder_linear_weight`,
  `mkldnn::_linear_pointwise`), where `F.linear` repacks them in every call. These operators are
  private to torch: if they are missing or disagree with `F.linear`, that is used instead. Products
  of a few rows in bfloat16 use native kernels on the same layout, if there are any and they agree
  with oneDNN's;
- root-mean-square norms, in transformers two casts and six operations over whole activations,
  become one native pass, or a reduction and two operations where there are no native kernels.
  `F.rms_norm` is no faster on a CPU than what it would replace.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inlay.engine.torch.lora import LoraBank
from inlay.engine.torch.native import Kernels, Panels, kernels

_logger = logging.getLogger(__name__)

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


_PANEL_WIDTHS = (32, 64)
"""Outputs per panel in oneDNN's layouts: with AMX, and without."""

_LEAST_ROWS = 4
"""Minimum positions of a step on CPUs where oneDNN does the products; missing ones are padded.

oneDNN reads weights at 17 GB/s for products of one row and 14 for two, but 20 for three to six, of
34 a core can read on an AMD machine.
"""


class PackedLinear(nn.Module):
    """A linear layer for inference with its weight in oneDNN's packed layout.

    The original weight is not kept.

    Attributes:
        nbytes: size of the packed weight.
        native_rows: maximum rows for the native kernel; 0 for none.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        *,
        gelu: bool = False,
        kernels: Kernels | None = None,
    ) -> None:
        """Pack `weight` [out, in].

        Args:
            weight: weight of the `nn.Linear`.
            bias: its bias, or None.
            gelu: apply the exact GELU in the same pass.
            kernels: used for products of a few rows where possible.
        """
        super().__init__()
        # Not a parameter: an opaque layout that must not be cast, moved or saved.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        self._bias = None if bias is None else bias.detach()
        self.nbytes: int = torch.ops.mkldnn._nbytes(self._weight)
        self._end = ("gelu", "none") if gelu else ("none", "")
        self._kernels = kernels
        self._panels: Panels | None = None
        self.native_rows = self._most = 0
        if kernels is not None and weight.dtype is torch.bfloat16 and not gelu:
            self._panels = self._find_panels(kernels, *weight.shape)
        if kernels is not None and self._panels is not None:
            self.native_rows = kernels.product_rows(self._panels)
        self._most = self.native_rows * weight.shape[1]

    def _find_panels(self, kernels: Kernels, outputs: int, inputs: int) -> Panels | None:
        """Return the layout in which the native product agrees with oneDNN's, or None."""
        if inputs % 2 or self.nbytes != 2 * outputs * inputs:
            return None
        x = torch.randn(5, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()
        expected = self(x).float()
        for width in _PANEL_WIDTHS:
            if outputs % width:
                continue
            panels = Panels(torch.ops.mkldnn.data_ptr(self._weight), outputs, inputs, width)
            # One row and five rows use different kernels.
            samples = [rows for rows in (1, 5) if rows <= kernels.product_rows(panels)]
            if all(
                _differ(kernels.product(x[:rows], panels, self._bias), expected[:rows])
                <= _TOLERANCE[torch.bfloat16]
                for rows in samples
            ):
                return panels
        return None

    def forward(self, x: Tensor) -> Tensor:
        """Compute [..., in] to [..., out]."""
        panels = self._panels
        if self._kernels is not None and panels is not None and 0 < x.numel() <= self._most:
            return self._kernels.product(x, panels, self._bias)
        end, algorithm = self._end
        return cast(
            "Tensor",
            torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, end, [], algorithm),
        )


class PlainLinear(nn.Module):
    """A linear layer for inference on any device, through `F.linear`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Keep `weight` [out, in]."""
        super().__init__()
        self._weight = nn.Parameter(weight.detach(), requires_grad=False)
        self._bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute [..., in] to [..., out]."""
        return F.linear(x, self._weight, self._bias)


class RMSNorm(nn.Module):
    """Root-mean-square norm of the last dimension, computed in float32 and rounded once.

    Attributes:
        weight: [size] float32.
        eps: added to the mean square.
    """

    def __init__(self, weight: Tensor, eps: float, kernels: Kernels | None = None) -> None:
        """Store `weight` in float32; `kernels` compute the norm in one pass."""
        super().__init__()
        self._size = weight.shape[0]
        self._kernels = kernels
        self.eps = eps
        self.weight = nn.Parameter(weight.detach().float(), requires_grad=False)
        self._offset = nn.Parameter(
            weight.new_tensor(eps, dtype=torch.float32), requires_grad=False
        )

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., size] to the same shape."""
        if self._kernels is not None:
            return self._kernels.rms_norm(x.contiguous(), self.weight, self.eps)
        norm = torch.linalg.vector_norm(x, 2, -1, keepdim=True, dtype=torch.float32)
        factor = torch.addcmul(self._offset, norm, norm, value=1 / self._size).rsqrt_()
        return torch.mul(x, factor).mul_(self.weight).to(x.dtype)


class _Fused:
    """One product for several projections of the same input.

    The parent module calls the parts one after another and does not know of this: the first call
    computes all parts, the others take theirs. For one forward pass at a time.
    """

    def __init__(self, linear: nn.Module, sizes: Sequence[int]) -> None:
        self.linear = linear
        self._sizes = list(sizes)
        self._input: Tensor | None = None
        self._outputs: list[Tensor | None] = []

    def take(self, index: int, x: Tensor) -> Tensor:
        """Return part `index` of the product with `x`."""
        if self._input is not x or self._outputs[index] is None:
            self._outputs = list(self.linear(x).split(self._sizes, -1))
            self._input = x
        output = self._outputs[index]
        self._outputs[index] = None
        if all(other is None for other in self._outputs):
            self._input = None
        return cast("Tensor", output)


class FusedPart(nn.Module):
    """Replacement of a projection whose product is computed together with its siblings'."""

    def __init__(self, fused: _Fused, index: int) -> None:
        super().__init__()
        self._fused = fused
        self._index = index

    @property
    def whole(self) -> nn.Module:
        """Linear layer that computes all parts, in order."""
        return self._fused.linear

    def forward(self, x: Tensor) -> Tensor:
        """Compute [..., in] to [..., out of this part]."""
        return self._fused.take(self._index, x)


def _differ(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest of `expected`; may be NaN."""
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())


def packs(dtype: torch.dtype) -> bool:
    """Return True if oneDNN's packed products exist and agree with `F.linear` for `dtype`."""
    if dtype not in _TOLERANCE:
        return False
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    bias = torch.randn(96, generator=generator).to(dtype)
    try:
        linear = PackedLinear(weight, bias)
        for shape in ((1, 1, 64), (1, 7, 64), (3, 64)):
            x = torch.randn(shape, generator=generator).to(dtype)
            error = _differ(linear(x), F.linear(x, weight, bias))
            if not error <= _TOLERANCE[dtype]:
                _logger.warning(
                    "packed linears differ by %.3g in %s and are not used", error, dtype
                )
                return False
    except (AttributeError, RuntimeError) as error:
        _logger.warning("packed linears are not available in %s: %s", dtype, error)
        return False
    return True


def accelerate(
    model: nn.Module, fused: Sequence[Sequence[str]], bank: LoraBank | None = None
) -> None:
    """Replace the linears and norms of `model` in place.

    A linear whose weight another module shares (a head tied to the embedding table) is packed as a
    copy; every other original weight is dropped as soon as it is replaced.

    Args:
        model: on its device, in its final dtype.
        fused: names of sibling linears that take the same input.
        bank: adds adapter slots to all linears of the model's body that see every position.
    """
    first = next(model.parameters())
    native = kernels() if first.device.type == "cpu" and Kernels.serve(first.dtype) else None
    pack = first.device.type == "cpu" and packs(first.dtype)
    swap = _Swap(pack, bank, native)
    for path, parent in list(model.named_modules()):
        for names in fused:
            siblings = [getattr(parent, name, None) for name in names]
            if all(type(sibling) is nn.Linear for sibling in siblings):
                swap.fuse(path, parent, names, cast("list[nn.Linear]", siblings))
        for name, child in list(parent.named_children()):
            # Not a subclass, which computes something else (the router of Llama 4's experts).
            if type(child) is nn.Linear:
                setattr(
                    parent,
                    name,
                    swap.linear(path, [name], child.weight, child.bias, [child.out_features]),
                )
            elif (norm := _faster_norm(child, native)) is not None:
                setattr(parent, name, norm)


def least_rows(model: nn.Module) -> int:
    """Return the minimum number of positions of a step: fewer would take longer."""
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    return _LEAST_ROWS if any(not linear.native_rows for linear in packed) else 1


class _Swap(NamedTuple):
    """Settings of the replacement of linears.

    `pack`: pack weights; `bank`: adapter slots, if any; `kernels`: native kernels, if any.
    """

    pack: bool
    bank: LoraBank | None
    native: Kernels | None

    def linear(
        self,
        path: str,
        names: Sequence[str],
        weight: Tensor,
        bias: Tensor | None,
        sizes: Sequence[int],
    ) -> nn.Module:
        """Return one product for modules `names` of the parent at `path`, with outputs `sizes`."""
        linear = (
            PackedLinear(weight, bias, kernels=self.native)
            if self.pack
            else PlainLinear(weight, bias)
        )
        # The head is not in the body, and an expert sees only some of the positions.
        if self.bank is None or not path or "experts" in path.split("."):
            return linear
        return self.bank.adapt(
            linear, weight, [f"{path}.{name}" for name in names], sizes, self.native
        )

    def fuse(
        self, path: str, parent: nn.Module, names: Sequence[str], linears: Sequence[nn.Linear]
    ) -> None:
        """Replace several projections by one product."""
        weight = torch.cat([linear.weight.detach() for linear in linears])
        biases: list[Tensor | None] = [linear.bias for linear in linears]
        joined = None
        if any(bias is not None for bias in biases):
            joined = torch.cat(
                [
                    linear.weight.new_zeros(linear.out_features) if bias is None else bias.detach()
                    for linear, bias in zip(linears, biases, strict=True)
                ]
            )
        sizes = [linear.out_features for linear in linears]
        shared = _Fused(self.linear(path, names, weight, joined, sizes), sizes)
        for index, name in enumerate(names):
            setattr(parent, name, FusedPart(shared, index))


def _faster_norm(module: nn.Module, native: Kernels | None) -> RMSNorm | None:
    """Return the replacement of a root-mean-square norm.

    None if `module` is no such norm, or an unknown variant.

    Some families multiply by the weight, some by one plus the weight: the variant that agrees with
    `module` on random input is used.
    """
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if (
        not type(module).__name__.endswith("RMSNorm")
        or not isinstance(weight, Tensor)
        or eps is None
    ):
        return None
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, weight.shape[0], generator=generator).to(weight)
    expected = module(x)
    for factor in (weight.detach().float(), 1 + weight.detach().float()):
        norm = RMSNorm(factor, eps, native)
        if _differ(norm(x), expected) <= _TOLERANCE[weight.dtype]:
            return norm
    return None
