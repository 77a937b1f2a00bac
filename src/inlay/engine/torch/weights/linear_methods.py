"""Ways to keep the weight of a linear layer and to multiply with it.

All are one thing to the rest of the engine, `LinearMethod`. On a CPU:
- `PackedLinear` packs the weight once for oneDNN (`mkldnn::_reorder_linear_weight`,
  `mkldnn::_linear_pointwise`), where `F.linear` repacks it in every call. These operators are
  private to torch: if they are missing or disagree with `F.linear`, that is used instead. Products
  use native kernels on the same layout where those are faster, and agree with oneDNN's: with
  AVX512-BF16 and no AMX always, elsewhere in bfloat16 for a few rows;
- `QuantisedLinear` keeps codes of four or eight bits, and reads them as they are;
- `BlockLinear` keeps GGUF's blocks, and multiplies with activations of eight bits.

`PlainLinear` runs on any device.
"""

import ctypes
import logging
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inlay.engine.torch.native import ALL_ROWS, PackedWeight, Panels, Products
from inlay.engine.torch.weights.quantised.blocks import BlockWeight
from inlay.engine.torch.weights.quantised.weight import QuantisedWeight

_logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Most that `differ` may return for two products that are rounded once."""

_PANEL_WIDTHS = (32, 64)
"""Outputs per panel in oneDNN's layouts: with AMX, and without."""


class LinearMethod(nn.Module):
    """A weight [out, in] as it is kept, with its bias; `forward` maps [..., in] to [..., out].

    Attributes:
        nbytes: bytes that a product reads.
        native_rows: maximum rows for the native kernel; 0 for none.
        invariant: True if the bits of a row do not depend on the number of rows.
    """

    nbytes: int
    native_rows: int = 0
    invariant: bool = False
    _bias: Tensor | None

    @property
    def bias(self) -> Tensor | None:
        """The bias [out], or None."""
        return self._bias

    def rows(self, ids: Tensor) -> Tensor | None:
        """Return rows [K, in] of the weight for ids [K] int64; None where it is kept otherwise."""
        return None


class PackedLinear(LinearMethod):
    """A linear layer with its weight in oneDNN's packed layout; the original is not kept."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        *,
        gelu: bool = False,
        products: Products | None = None,
        invariant: bool = False,
    ) -> None:
        """Pack `weight` [out, in].

        Args:
            weight: weight of the `nn.Linear`.
            bias: its bias, or None.
            gelu: apply the exact GELU in the same pass.
            products: used where possible and faster.
            invariant: use them wherever that makes the layer invariant.
        """
        super().__init__()
        # Not a parameter: an opaque layout that must not be cast, moved or saved.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        self._bias = None if bias is None else bias.detach()
        self.nbytes = torch.ops.mkldnn._nbytes(self._weight)
        self._gelu = gelu
        self._products = products
        self._inputs = weight.shape[1]
        # A view of the packed weight: `_weight` owns the memory.
        address = torch.ops.mkldnn.data_ptr(self._weight)
        self._packed = _in_panels(address, self.nbytes, weight)
        self._panels = self._find_panels(weight)
        # In bfloat16 a GELU after the product would be given rounded values.
        native = torch.float32, *(() if gelu else (torch.bfloat16,))
        if products is not None and self._panels is not None and weight.dtype in native:
            self.native_rows = products.product_rows(self._panels)
            if invariant and products.invariant_product(self._panels):
                self.native_rows = ALL_ROWS
                self.invariant = True
        self._most = self.native_rows * weight.shape[1]

    def _find_panels(self, weight: Tensor) -> Panels | None:
        """Return the layout of the packed weight where it has no padding; None for another one."""
        (outputs, inputs), dtype = weight.shape, weight.dtype
        if self._packed is None or inputs % 2 or self.nbytes != dtype.itemsize * outputs * inputs:
            return None
        return Panels(self._packed.data_ptr(), outputs, inputs, self._packed.shape[2], dtype)

    def rows(self, ids: Tensor) -> Tensor | None:
        """As `LinearMethod.rows`; None for a layout that is not known."""
        if self._packed is None:
            return None
        width = self._packed.shape[2]
        return self._packed[ids // width, :, ids % width].flatten(1)[:, : self._inputs]

    def _native(self, products: Products, panels: Panels, x: Tensor) -> Tensor:
        found = products.product(x, panels, self._bias)
        return F.gelu(found) if self._gelu else found

    def forward(self, x: Tensor) -> Tensor:
        """Compute [..., in] to [..., out]."""
        panels = self._panels
        if self._products is not None and panels is not None and 0 < x.numel() <= self._most:
            return self._native(self._products, panels, x)
        end, algorithm = ("gelu", "none") if self._gelu else ("none", "")
        return cast(
            "Tensor",
            torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, end, [], algorithm),
        )


class PlainLinear(LinearMethod):
    """A linear layer for inference on any device, through `F.linear`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Keep `weight` [out, in]."""
        super().__init__()
        self._weight = nn.Parameter(weight.detach(), requires_grad=False)
        self._bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.nbytes = weight.nbytes

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows [K, in] of the weight for ids [K] int64."""
        return self._weight[ids]

    def forward(self, x: Tensor) -> Tensor:
        """Compute [..., in] to [..., out]."""
        return F.linear(x, self._weight, self._bias)


class QuantisedLinear(LinearMethod):
    """A linear layer whose weight stays quantised; without native products, each dequantises it."""

    def __init__(
        self,
        weight: QuantisedWeight,
        bias: Tensor | None,
        products: Products | None = None,
        *,
        invariant: bool = False,
    ) -> None:
        """Keep `weight`; `products` multiply with it, if `invariant` in one order of sums."""
        super().__init__()
        self._weight = weight
        self._bias = None if bias is None else bias.detach().contiguous()
        self._products = products
        self.nbytes = weight.nbytes
        self.native_rows = 0 if products is None else ALL_ROWS
        self.invariant = invariant and products is not None and products.pairs
        self._codes = PackedWeight(
            weight.kind, weight.words, weight.scales, weight.shifts, weight.inputs,
            weight.outputs, weight.group, self.invariant,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Compute [..., in] to [..., out]."""
        if self._products is None:
            return self._weight.product(x, self._bias)
        if self._weight.order is not None:
            x = x[..., self._weight.order]
        return self._products.quantised_product(x, self._codes, self._bias)


class BlockLinear(LinearMethod):
    """A linear layer whose weight stays in GGUF's blocks; activations are rounded to eight bits.

    Attributes:
        weight: the matrix.
        native: the product with it; None for one by its definition.
    """

    def __init__(self, weight: BlockWeight, bias: Tensor | None, *, plain: bool = False) -> None:
        """Keep `weight`; `plain`: multiply by its definition, without native products."""
        super().__init__()
        self.weight = weight
        self._bias = None if bias is None else bias.detach().contiguous()
        self.nbytes = weight.nbytes
        self.native = None if plain else weight.native.multiplier(weight.parts, self._bias)
        self.native_rows = 0 if plain else ALL_ROWS
        self.invariant = not plain

    def forward(self, x: Tensor) -> Tensor:
        """Compute [..., in] to [..., out]."""
        if self.native is None:
            return self.weight.product(x, self._bias)
        return self.native(x)


def differ(found: Tensor, expected: Tensor, outputs: Tensor | None = None) -> float:
    """Return the largest difference of an element, relative to its own size; may be NaN.

    |found - expected| / (|expected| + the root mean square of its row or its channel, whichever is
    larger): rows are the last dimension. A loud element hides nothing in the others of its row but
    what is below their rounding, and one that is small by chance in a loud channel rounds as that.

    Args:
        found: [..., N].
        expected: [..., N].
        outputs: [..., N], rows by which channels are measured; `expected` unless given.
    """
    expected = expected.float()
    rows = expected.square().mean(-1, keepdim=True)
    channels = (expected if outputs is None else outputs.float()).reshape(-1, expected.shape[-1])
    size = expected.abs() + torch.maximum(rows, channels.square().mean(0)).sqrt()
    error = (found.float() - expected).abs()
    return float((error / size.clamp(min=torch.finfo(torch.float32).tiny)).max())


def _in_panels(address: int, nbytes: int, weight: Tensor) -> Tensor | None:
    """Return a view of `weight` [O, I] where it lies in panels, as `Panels`; None for others.

    Known by the bits of the first and the last panel. Outputs and inputs may be padded.

    Returns:
        [panels, inputs / pairs, width, pairs].
    """
    (outputs, inputs), dtype = weight.shape, weight.dtype
    pairs = 2 if dtype is torch.bfloat16 else 1
    memory = torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=dtype)
    for width in _PANEL_WIDTHS:
        panels = -(-outputs // width)
        padded, rest = divmod(len(memory), panels * width)
        if rest or padded % pairs or padded < inputs:
            continue
        packed = memory.view(panels, padded // pairs, width, pairs)
        if all(_is_panel(packed[at], weight[at * width :][:width]) for at in (0, panels - 1)):
            return packed
    return None


def _is_panel(panel: Tensor, rows: Tensor) -> bool:
    found = panel.transpose(0, 1).flatten(1)[: rows.shape[0], : rows.shape[1]].contiguous()
    return torch.equal(found.view(torch.uint8), rows.detach().contiguous().view(torch.uint8))


def packs(dtype: torch.dtype) -> bool:
    """Return True if oneDNN's packed products exist and agree with `F.linear` for `dtype`."""
    if dtype not in TOLERANCE:
        return False
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(99, 64, generator=generator).to(dtype)
    bias = torch.randn(99, generator=generator).to(dtype)
    try:
        linear = PackedLinear(weight, bias)
        for shape in ((1, 1, 64), (1, 7, 64), (3, 64), (35, 64)):
            x = torch.randn(shape, generator=generator).to(dtype)
            error = differ(linear(x), F.linear(x, weight, bias))
            if not error <= TOLERANCE[dtype]:
                _logger.warning(
                    "packed linears differ by %.3g in %s and are not used", error, dtype
                )
                return False
    except (AttributeError, RuntimeError) as error:
        _logger.warning("packed linears are not available in %s: %s", dtype, error)
        return False
    return True
