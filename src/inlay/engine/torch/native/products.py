"""Products with packed and with quantised weights."""

import ctypes
import sys
from typing import NamedTuple

import torch
from torch import Tensor

from inlay.engine.torch.native.calls import functions, integer, pointer, structure

_PackedProduct = structure(
    "_PackedProduct",
    x=pointer, weight=pointer, bias=pointer, out=pointer,
    rows=integer, inputs=integer, outputs=integer, width=integer, threads=ctypes.c_int32,
)  # fmt: skip

_QuantisedProduct = structure(
    "_QuantisedProduct", x=pointer, codes=pointer, scales=pointer, shifts=pointer,
    bias=pointer, out=pointer, rows=integer, inputs=integer, outputs=integer, group=integer,
    kind=ctypes.c_int32, threads=ctypes.c_int32, tiles=ctypes.c_int32,
)  # fmt: skip

_VECTOR_ROWS = 4
"""Maximum number of rows for a packed product with neither tiles nor pairs."""

_TILE_ROWS = 128
"""Maximum number of rows for which tiles are faster than oneDNN.

By a fifth for 1 to 4, a third for 8 to 32, a seventh for 64, a twentieth for 128.
"""

ALL_ROWS = sys.maxsize
"""No limit of rows."""


class Panels(NamedTuple):
    """A weight packed by oneDNN.

    Attributes:
        address: address of [outputs / width, inputs / 2, width, 2] in bfloat16, of [outputs /
            width, inputs, width] in float32.
        outputs: a multiple of `width`.
        inputs: even.
        width: 32 or 64.
        dtype: bfloat16 or float32.
    """

    address: int
    outputs: int
    inputs: int
    width: int
    dtype: torch.dtype = torch.bfloat16


class PackedWeight(NamedTuple):
    """A quantised weight, in the layout of `quantised.cpp`.

    Attributes:
        kind: 0 for codes of four bits, 1 for eight, 2 for float8 e4m3.
        words: [panels, inputs / n, 64] int32.
        scales: [panels, groups, 64] float32.
        shifts: as scales, or None.
        inputs: of the weight.
        outputs: of the weight.
        group: inputs that share a scale.
        invariant: True: the bits of a row must not depend on the number of rows; needs `pairs`.
    """

    kind: int
    words: Tensor
    scales: Tensor
    shifts: Tensor | None
    inputs: int
    outputs: int
    group: int
    invariant: bool = False


class Products:
    """The compiled products; tensors as for `Kernels`.

    Attributes:
        tiles: True if this CPU has tiles, and this process may use them.
        pairs: True if it has products of pairs of bfloat16.
    """

    def __init__(self, products: ctypes.CDLL, quantised: ctypes.CDLL) -> None:
        self._product = functions(products, "packed_product", pointer)
        self._quantised = functions(quantised, "quantised_product", pointer)
        self.tiles = bool(products.inlay_have_tiles())
        self.pairs = bool(products.inlay_have_pairs())

    def product_rows(self, panels: Panels) -> int:
        """Return the maximum number of rows for which `product` is faster than oneDNN."""
        if panels.dtype is torch.float32:
            return ALL_ROWS if self.pairs else 0
        if self.tiles:
            return _TILE_ROWS if self._fit_tiles(panels) else _VECTOR_ROWS
        return ALL_ROWS if self.pairs else _VECTOR_ROWS

    def invariant_product(self, panels: Panels) -> bool:
        """Return True if `product` takes any number of rows, and each has the same bits in all."""
        if panels.dtype is torch.float32:
            return False
        return self._fit_tiles(panels) if self.tiles else self.pairs

    @staticmethod
    def _fit_tiles(panels: Panels) -> bool:
        return panels.width == 32 and panels.inputs % 32 == 0

    def product(self, x: Tensor, panels: Panels, bias: Tensor | None) -> Tensor:
        """Multiply `x` [..., inputs] with a packed weight of its dtype; returns [..., outputs].

        `x` has at most `product_rows` rows; any number where `invariant_product` is true.

        `bias` is [outputs] in that dtype, contiguous.
        """
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], panels.outputs)
        call = _PackedProduct(
            x.data_ptr(), panels.address, None if bias is None else bias.data_ptr(), out.data_ptr(),
            x.numel() // panels.inputs, panels.inputs, panels.outputs, panels.width,
            torch.get_num_threads(),
        )  # fmt: skip
        self._product[x.dtype](ctypes.byref(call))
        return out

    def quantised_product(self, x: Tensor, codes: PackedWeight, bias: Tensor | None) -> Tensor:
        """Multiply `x` [..., inputs] with a quantised weight; returns [..., outputs].

        `bias` is [outputs] in the dtype of `x`, contiguous.
        """
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], codes.outputs)
        call = _QuantisedProduct(
            x.data_ptr(), codes.words.data_ptr(), codes.scales.data_ptr(),
            None if codes.shifts is None else codes.shifts.data_ptr(),
            None if bias is None else bias.data_ptr(), out.data_ptr(), x.numel() // codes.inputs,
            codes.inputs, codes.outputs, codes.group, codes.kind, torch.get_num_threads(),
            self.tiles and not codes.invariant,
        )  # fmt: skip
        self._quantised[x.dtype](ctypes.byref(call))
        return out
