"""Casts and checks on elements as bits, a cache-sized piece at a time.

The formats all put sign, exponent and fraction in this order, so that the bits without the sign,
read as an integer, order by magnitude: one integer maximum says at once whether everything is
finite and how large the largest is. Rounding is to nearest, ties to even (IEEE 754, 4.3.1).
"""

from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from inlay.base.pace import yield_gil
from inlay.messages.prompt import DTYPE_SIZES
from inlay.tensors.tensor import BITS_DTYPES, NUMPY_DTYPES

Bits: TypeAlias = npt.NDArray[Any]
"""Elements as unsigned integers of the same size, one dimension."""

_PIECE_BYTES = 256 * 1024

NON_FINITE = {
    "float64": 0x7FF << 52,
    "float32": 0xFF << 23,
    "float16": 0x1F << 10,
    "bfloat16": 0xFF << 7,
    "float8_e5m2": 0x1F << 2,
    "float8_e4m3fn": 0x7F,
}
"""The smallest magnitude, as bits, that is not a number or not finite."""


def largest_magnitude(bits: Bits) -> int:
    """The largest element without its sign, as bits."""
    size = bits.dtype.itemsize
    step = _PIECE_BYTES // size
    signed = bits.view(f"<i{size}")
    without_sign = (1 << (8 * size - 1)) - 1
    largest = 0
    for start in range(0, bits.size, step):
        # Of the negative elements the largest magnitude is the largest unsigned integer, of the
        # others the largest signed one.
        negative = int(bits[start : start + step].max()) & without_sign
        positive = int(signed[start : start + step].max())
        largest = max(largest, negative, positive)
        yield_gil()
    return largest


def first_at_least(bits: Bits, magnitude: int) -> int:
    """Index of the first element with bits, sign apart, of at least `magnitude`; -1 for none."""
    size = bits.dtype.itemsize
    step = _PIECE_BYTES // size
    without_sign = bits.dtype.type((1 << (8 * size - 1)) - 1)
    for start in range(0, bits.size, step):
        hits = (bits[start : start + step] & without_sign) >= magnitude
        if hits.any():
            return start + int(hits.argmax())
    return -1


def value_of(magnitude: int, dtype: str) -> float:
    """The number that bits without a sign stand for."""
    bits = np.array([magnitude], BITS_DTYPES[DTYPE_SIZES[dtype]])
    return float(bits.view(NUMPY_DTYPES[dtype]).astype(np.float64)[0])


def cast(bits: Bits, source: str, target: str) -> Bits:
    """`bits` of dtype `source` as bits of dtype `target`, each correctly rounded once.

    Args:
        bits: finite elements.
        source: any of `inlay.messages.prompt.DTYPE_SIZES`.
        target: "bfloat16", "float16" or "float32". What rounds beyond its largest number becomes
            infinite.
    """
    if source == target:
        return bits
    out = np.empty(bits.size, BITS_DTYPES[DTYPE_SIZES[target]])
    step = _PIECE_BYTES // bits.dtype.itemsize
    # bfloat16 is the upper half of float32, which numpy copies faster than a look-up.
    by_table = bits.dtype.itemsize <= 2 and (source, target) != ("bfloat16", "float32")
    table = _every_cast(source, target) if by_table else None
    for start in range(0, bits.size, step):
        piece, out_piece = bits[start : start + step], out[start : start + step]
        if table is None:
            _round(piece, source, out_piece, target)
        else:
            # Every index is in range; "wrap" only spares numpy the test.
            np.take(table, piece, out=out_piece, mode="wrap")
        yield_gil()
    return out


@cache
def _every_cast(source: str, target: str) -> Bits:
    """Look-up table of the cast of each of the 256 or 65,536 bit patterns of `source`.

    Looked up faster than numpy computes it.
    """
    patterns = np.arange(1 << (8 * DTYPE_SIZES[source]), dtype=BITS_DTYPES[DTYPE_SIZES[source]])
    with np.errstate(invalid="ignore", over="ignore"):
        exact = patterns.view(NUMPY_DTYPES[source]).astype(np.float32)
        return exact.astype(NUMPY_DTYPES[target]).view(BITS_DTYPES[DTYPE_SIZES[target]])


def _round(piece: Bits, source: str, out: Bits, target: str) -> None:
    elements = piece.view(NUMPY_DTYPES[source])
    with np.errstate(over="ignore", under="ignore"):
        if source == "float64" and target == "bfloat16":
            # The cast goes by way of float32.
            elements = _float32_to_odd(elements)
        out.view(NUMPY_DTYPES[target])[:] = elements


def _float32_to_odd(wide: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Round to odd: float32 elements that may be rounded again without double rounding.

    Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using
    rounding to odd" (2008).
    """
    near = wide.astype(np.float32)
    back = near.astype(np.float64)
    bits = near.view(np.uint32)
    even = (back != wide) & (bits & np.uint32(1) == 0)
    too_large = np.abs(back) > np.abs(wide)
    bits -= even & too_large
    bits += even & ~too_large
    return near
