"""Casts and checks on elements as bits, a cache-sized piece at a time.

The formats all put sign, exponent and fraction in this order, so that the bits without the sign, read as an integer,
order by magnitude: one integer maximum says at once whether everything is finite and how large the largest is. Pieces stay
in cache, and numpy lets other threads run during each. Rounding is to nearest, ties to even (IEEE 754, 4.3.1).
"""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from inlay.prompt import DTYPE_SIZES
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
        # Of the negative elements the largest magnitude is the largest unsigned integer, of the others the largest signed one.
        negative = int(bits[start : start + step].max()) & without_sign
        positive = int(signed[start : start + step].max())
        largest = max(largest, negative, positive)
    return largest


def first_at_least(bits: Bits, magnitude: int) -> int:
    """Index of the first element whose bits without the sign are at least `magnitude`, -1 if there is none."""
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
        source: any of `inlay.prompt.DTYPE_SIZES`.
        target: "bfloat16", "float16" or "float32". Where an element rounds beyond its largest number the result is infinite.
    """
    if source == target:
        return bits
    if DTYPE_SIZES[source] == 1:
        every = _cast_piece(_widened(np.arange(256, dtype=np.uint8), source), "float32", target)
    cast_bits = np.empty(bits.size, BITS_DTYPES[DTYPE_SIZES[target]])
    step = _PIECE_BYTES // bits.dtype.itemsize
    for start in range(0, bits.size, step):
        piece = bits[start : start + step]
        cast_bits[start : start + step] = (
            every[piece] if DTYPE_SIZES[source] == 1 else _cast_piece(piece, source, target)
        )
    return cast_bits


def _cast_piece(piece: Bits, source: str, target: str) -> Bits:
    if target == "bfloat16":
        return _to_bfloat16(_narrowed_to_odd(piece) if source == "float64" else _widened(piece, source))
    elements = piece if source == "float64" else _widened(piece, source)
    elements = elements.view(NUMPY_DTYPES["float64" if source == "float64" else "float32"])
    with np.errstate(over="ignore", under="ignore"):
        return elements.astype(NUMPY_DTYPES[target]).view(BITS_DTYPES[DTYPE_SIZES[target]])


def _widened(piece: Bits, source: str) -> Bits:
    """Elements no wider than float32 as float32 bits, exactly."""
    if source == "float32":
        return piece
    if source == "bfloat16":
        return piece.astype(np.uint32) << np.uint32(16)
    with np.errstate(invalid="ignore"):
        return piece.view(NUMPY_DTYPES[source]).astype(np.float32).view(np.uint32)


def _to_bfloat16(piece: Bits) -> Bits:
    """float32 bits rounded to their upper half: to even by adding just under half, and one more where the upper is odd."""
    rounded = piece >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += piece
    rounded += np.uint32(0x7FFF)
    rounded >>= np.uint32(16)
    return rounded


def _narrowed_to_odd(piece: Bits) -> Bits:
    """float64 bits as float32 bits, inexact ones with an odd last bit, so that a second rounding is as good as one.

    Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd" (2008).
    """
    wide = piece.view(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        near = wide.astype(np.float32)
    back = near.astype(np.float64)
    bits = near.view(np.uint32)
    even = (back != wide) & (bits & np.uint32(1) == 0)
    towards_zero = np.abs(back) > np.abs(wide)
    bits -= (even & towards_zero).astype(np.uint32)
    bits += (even & ~towards_zero).astype(np.uint32)
    return bits
