"""Products in integers with weights in GGUF's blocks (`integers.cpp`)."""

import ctypes
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from inlay.engine.torch.large_pages import Slabs
from inlay.engine.torch.native.build import load
from inlay.engine.torch.native.calls import Functions, functions, integer, pointer, structure

SHARED = 32
"""Inputs of a row that share a scale when it is quantised."""

_LEAST = 1e-30
"""Below it, numbers of a row count as zero."""

RUN = 16
"""Rows of a matrix that are laid out together."""

_IntegerPart = structure("_IntegerPart", panels=pointer, outputs=integer, type=integer)

_IntegerProduct = structure(
    "_IntegerProduct", x=pointer, parts=pointer, bias=pointer, out=pointer, rows=integer,
    inputs=integer, outputs=integer, count=integer, threads=ctypes.c_int32,
)  # fmt: skip


class IntegerPanels(NamedTuple):
    """A matrix [outputs, inputs] in blocks of one type, in the layout of `blocks.h`.

    Attributes:
        type: number of the type in GGUF files.
        data: panels, uint8.
        outputs: of the matrix.
        inputs: of the matrix.
    """

    type: int
    data: Tensor
    outputs: int
    inputs: int


class Integers:
    """The compiled products; all tensors are on the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._product = functions(library, "integer_product", pointer)
        self._size = library.inlay_integer_panels_bytes
        self._size.argtypes, self._size.restype = (ctypes.c_int32, integer, integer), integer
        self._pack = library.inlay_integer_panels
        self._pack.argtypes = (
            ctypes.c_int32, pointer, pointer, integer, integer, integer, integer, ctypes.c_int32
        )  # fmt: skip
        self._pack.restype = integer
        self._memory = Slabs()
        self._rows = library.inlay_integer_rows
        self._rows.argtypes = (
            ctypes.c_int32, pointer, pointer, integer, integer, integer, pointer, ctypes.c_int32
        )  # fmt: skip
        self._rows.restype = integer

    def serves(self, type: int, inputs: int) -> bool:
        """Return True if there are products with matrices of `inputs` in blocks of `type`."""
        return bool(self._size(type, 1, inputs))

    def panels(self, type: int, runs: Iterable[Tensor], outputs: int, inputs: int) -> IntegerPanels:
        """Lay out a matrix that `serves` knows.

        Args:
            type: number of its type in GGUF files.
            runs: uint8 [rows, bytes of a row], contiguous: its blocks as in files, some rows at a
                time, all but the last a multiple of `RUN`; each may lie where the last one did.
            outputs: rows of the matrix.
            inputs: columns of the matrix.

        Raises:
            ValueError: a scale is no finite number; the message names the row.
        """
        data, first = self._memory.take(self._size(type, outputs, inputs)), 0
        for blocks in runs:
            wrong = self._pack(
                type, data.data_ptr(), blocks.data_ptr(), first, len(blocks), outputs, inputs,
                torch.get_num_threads(),
            )  # fmt: skip
            if wrong >= 0:
                raise ValueError(f"row {wrong} has a block whose scale is no finite number")
            first += len(blocks)
        return IntegerPanels(type, data, outputs, inputs)

    def rows(self, panels: IntegerPanels, ids: Tensor) -> Tensor:
        """Return rows `ids` [N] int64 of a matrix, float32 [N, inputs].

        Raises:
            IndexError: it has no such row.
        """
        ids = ids.contiguous()
        out = torch.empty(len(ids), panels.inputs)
        wrong = self._rows(
            panels.type, panels.data.data_ptr(), ids.data_ptr(), len(ids), panels.outputs,
            panels.inputs, out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        if wrong >= 0:
            raise IndexError(f"row {int(ids[wrong])} of a matrix of {panels.outputs}")
        return out

    def product(self, x: Tensor, parts: Sequence[IntegerPanels], bias: Tensor | None) -> Tensor:
        """Multiply `x` with matrices one below another: [..., inputs] to [..., outputs].

        As `multiplier`, for one product.
        """
        return self.multiplier(parts, bias)(x)

    def multiplier(self, parts: Sequence[IntegerPanels], bias: Tensor | None) -> "BlockProduct":
        """Return the product with matrices one below another.

        Args:
            parts: matrices of the same inputs.
            bias: [outputs of all parts] in the dtype of x, contiguous.
        """
        return BlockProduct(self._product, parts, bias)


class BlockProduct:
    """A product with matrices one below another: [..., inputs] to [..., outputs].

    The rows of x, float32 or bfloat16, are quantised as by `quantised`. What a row gives has the
    same bits whatever the number of rows and threads.

    Attributes:
        inputs: of each part.
        outputs: of all parts.
    """

    def __init__(
        self, kernels: Functions, parts: Sequence[IntegerPanels], bias: Tensor | None
    ) -> None:
        self.outputs = sum(part.outputs for part in parts)
        self._kernels = kernels
        self.inputs, self._count = parts[0].inputs, len(parts)
        self._parts = (_IntegerPart * len(parts))(
            *(_IntegerPart(part.data.data_ptr(), part.outputs, part.type) for part in parts)
        )
        self._parts_at = ctypes.addressof(self._parts)
        # Held, as their memory is only pointed to.
        self._kept = (*parts, bias)
        self._bias_at = None if bias is None else bias.data_ptr()

    def kernel(self, dtype: torch.dtype) -> int | None:
        """Return the address of the kernel that takes `call`."""
        return ctypes.cast(self._kernels[dtype], pointer).value

    def call(self, x: Tensor, out: Tensor) -> ctypes.Structure:
        """Return the kernel's argument, for `x` and `out` that are contiguous, and kept."""
        return self.call_at(x.data_ptr(), out.data_ptr(), x.numel() // self.inputs)

    def call_at(self, x: int, out: int, rows: int) -> ctypes.Structure:
        """Return it for rows at addresses."""
        return _IntegerProduct(
            x, self._parts_at, self._bias_at, out, rows, self.inputs, self.outputs, self._count,
            torch.get_num_threads(),
        )  # fmt: skip

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply."""
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], self.outputs))
        self._kernels[x.dtype](ctypes.byref(self.call(x, out)))
        return out


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the integers [..., inputs / 32, 32] and scales [..., inputs / 32] of rows of `x`.

    Both float32. The largest of 32 numbers becomes 127 or -127; halves are rounded to even.
    """
    blocks = x.float().reshape(*x.shape[:-1], -1, SHARED)
    tops = blocks.abs().amax(-1)
    large = tops > _LEAST
    # Of tensors: a number over a tensor is its reciprocal times the number, rounded twice.
    most = tops.new_tensor(127)
    factors = torch.where(large, most / tops, torch.zeros_like(tops))
    return (blocks * factors[..., None]).round(), torch.where(large, tops / most, 0 * tops)


@cache
def integers() -> Integers | None:
    """Return this process's products, compiled at the first call; None if there are none."""
    library = load("integers")
    return Integers(library) if library is not None and library.inlay_have_integers() else None
