"""Block types of GGUF: what the bytes of a block mean, by numpy. The reference of all products.

A tensor's rows are whole blocks, each with scales of its own. The formulas, and the order of their
float32 operations, are those of ggml (`ggml-quants.c`) and of the package `gguf` (`quants.py`), so
values are theirs bit for bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""Blocks, [blocks, bytes of a block]."""
Floats: TypeAlias = npt.NDArray[np.float32]
Raw: TypeAlias = bytes | bytearray | memoryview | Bytes

_CHUNK = 1 << 18
"""Values computed at a time: as many as caches hold."""

_IQ4 = np.array(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.float32
)
_FP4 = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.float32)
"""Values of e2m1, doubled: the scale of a block is halved."""
_LARGEST_EXPONENT = 252
"""Of a block of MXFP4, with which 12 is finite in float32."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of GGUF's tensors.

    Attributes:
        name: as GGUF has it.
        number: in files.
        elements: of a block.
        nbytes: of a block.
        halves: where the float16 scales of a block are.
        factors: the largest magnitudes that those are multiplied with.
        fill: writes the values of blocks into [blocks, elements].
    """

    name: str
    number: int
    elements: int
    nbytes: int
    halves: tuple[int, ...]
    factors: tuple[int, ...]
    fill: Callable[[Bytes, Floats], None]

    def size(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor of `shape`, whose rows are whole blocks."""
        return prod(shape) // self.elements * self.nbytes


def dequantise(type: str, raw: Raw, shape: tuple[int, ...]) -> Floats:
    """The values of a tensor, float32 of `shape`.

    Args:
        type: one of `TYPES`.
        raw: its blocks, row after row.
        shape: rows last, as torch has it; a row is whole blocks.

    Raises:
        ValueError: `raw` is not as long as `shape` needs.
    """
    kind = TYPES[type]
    blocks = _blocks(kind, raw)
    if shape[-1] % kind.elements or len(blocks) * kind.elements != prod(shape):
        raise ValueError(f"{blocks.size} bytes of {type} are no tensor of shape {shape}")
    values = np.empty((len(blocks), kind.elements), np.float32)
    step = max(1, _CHUNK // kind.elements)
    # Products of a scale that is no number are for `is_finite` to refuse.
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            kind.fill(blocks[start : start + step], values[start : start + step])
    return values.reshape(shape)


def is_finite(type: str, raw: Raw) -> bool:
    """True if no scale of a block, or value of a float type, is infinite or no number."""
    kind = TYPES[type]
    blocks = _blocks(kind, raw)
    if type == "MXFP4":
        return bool((blocks[:, 0] <= _LARGEST_EXPONENT).all())
    if not kind.halves:
        return kind.elements > 1 or bool(np.isfinite(dequantise(type, raw, (len(blocks),))).all())
    return all(bool(np.isfinite(_half(blocks, at)).all()) for at in kind.halves)


def largest(type: str, raw: Raw, least: float = 0.0) -> float:
    """The largest magnitude of the values of blocks, or `least` if none is above it.

    Only blocks whose scales allow more than what was found before are dequantised.
    """
    kind = TYPES[type]
    blocks = _blocks(kind, raw)
    found, step = least, max(1, _CHUNK // kind.elements)
    for start in range(0, len(blocks), step):
        part = blocks[start : start + step]
        if kind.halves:
            bound = np.zeros(len(part), np.float32)
            for at, factor in zip(kind.halves, kind.factors, strict=True):
                # More by what roundings of float32 may add.
                bound += np.abs(_half(part, at)[:, 0]) * np.float32(factor * (1 + 1e-6))
            part = part[~(bound <= found)]
        values = dequantise(type, part, (*part.shape[:1], kind.elements))
        found = max(found, float(np.abs(values).max(initial=0)))
    return found


def _blocks(kind: BlockType, raw: Raw) -> Bytes:
    flat = raw.reshape(-1) if isinstance(raw, np.ndarray) else np.frombuffer(raw, np.uint8)
    if flat.size % kind.nbytes:
        raise ValueError(f"{flat.size} bytes of {kind.name} are no whole blocks of {kind.nbytes}")
    return flat.reshape(-1, kind.nbytes)


def _half(blocks: Bytes, at: int) -> Floats:
    """Return the float16 at a place of each block, [blocks, 1]."""
    halves = np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")
    return halves.astype(np.float32)


def _f32(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view("<f4")


def _f16(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view("<f2")


def _bf16(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view(ml_dtypes.bfloat16)


def _nibbles(codes: Bytes, out: npt.NDArray[Any]) -> None:
    """Write the codes of a block of 32: low halves of 16 bytes, then high ones."""
    np.bitwise_and(codes, 15, out=out[:, :16], casting="unsafe")
    np.right_shift(codes, 4, out=out[:, 16:], casting="unsafe")


def _q4_0(blocks: Bytes, out: Floats) -> None:
    codes = np.empty(out.shape, np.int8)
    _nibbles(blocks[:, 2:], codes)
    np.multiply(codes - np.int8(8), _half(blocks, 0), out=out)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    codes = np.empty(out.shape, np.uint8)
    _nibbles(blocks[:, 4:], codes)
    np.multiply(codes, _half(blocks, 0), out=out)
    out += _half(blocks, 2)


def _five_bits(blocks: Bytes, at: int) -> npt.NDArray[np.uint8]:
    """Return codes whose fifth bits are the word at a place, and whose nibbles follow it."""
    codes = np.empty((len(blocks), 32), np.uint8)
    _nibbles(blocks[:, at + 4 :], codes)
    codes |= np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << 4
    return codes


def _q5_0(blocks: Bytes, out: Floats) -> None:
    np.multiply(_five_bits(blocks, 2).view(np.int8) - np.int8(16), _half(blocks, 0), out=out)


def _q5_1(blocks: Bytes, out: Floats) -> None:
    np.multiply(_five_bits(blocks, 4), _half(blocks, 0), out=out)
    out += _half(blocks, 2)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _half(blocks, 0), out=out)


def six_bit_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The scales and mins of Q4_K and Q5_K, [blocks, 8] each, from their 12 bytes."""
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=1)
    mins = np.concatenate([middle & 63, (high >> 4) | (middle >> 6) << 4], axis=1)
    return scales, mins


def _k_values(blocks: Bytes, codes: Bytes, out: Floats) -> None:
    """Write the values of codes [blocks, 8, 32] of Q4_K and Q5_K."""
    scales, mins = six_bit_scales(blocks[:, 4:16])
    values = out.reshape(-1, 8, 32)
    np.multiply(codes, (_half(blocks, 0) * scales)[:, :, None], out=values)
    values -= (_half(blocks, 2) * mins)[:, :, None]


def _halves_of_64(packed: Bytes) -> Bytes:
    """Return codes [blocks, 8, 32]: 32 bytes hold two blocks, in low and in high halves."""
    codes = np.empty((len(packed), 4, 2, 32), np.uint8)
    pairs = packed.reshape(-1, 4, 32)
    np.bitwise_and(pairs, 15, out=codes[:, :, 0])
    np.right_shift(pairs, 4, out=codes[:, :, 1])
    return codes.reshape(-1, 8, 32)


def _q4_k(blocks: Bytes, out: Floats) -> None:
    _k_values(blocks, _halves_of_64(blocks[:, 16:]), out)


def _q5_k(blocks: Bytes, out: Floats) -> None:
    codes = _halves_of_64(blocks[:, 48:])
    bits = np.unpackbits(blocks[:, 16:48], axis=1, bitorder="little").reshape(-1, 32, 8)
    codes |= bits.transpose(0, 2, 1) << 4
    _k_values(blocks, codes, out)


def _q6_k(blocks: Bytes, out: Floats) -> None:
    low, high = blocks[:, :128].reshape(-1, 2, 2, 32), blocks[:, 128:192].reshape(-1, 2, 32)
    codes = np.empty((len(blocks), 2, 4, 32), np.uint8)
    np.bitwise_and(low, 15, out=codes[:, :, :2])
    np.right_shift(low, 4, out=codes[:, :, 2:])
    for place in range(4):
        codes[:, :, place] |= (high >> (2 * place) & 3) << 4
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    signed = codes.reshape(-1, 16, 16).view(np.int8) - np.int8(32)
    np.multiply(signed, scales[:, :, None], out=out.reshape(-1, 16, 16))


def _iq4_nl(blocks: Bytes, out: Floats) -> None:
    codes = np.empty(out.shape, np.uint8)
    _nibbles(blocks[:, 2:], codes)
    np.multiply(_IQ4[codes], _half(blocks, 0), out=out)


def _iq4_xs(blocks: Bytes, out: Floats) -> None:
    number = len(blocks)
    codes = np.empty((number * 8, 32), np.uint8)
    _nibbles(np.ascontiguousarray(blocks[:, 8:]).reshape(-1, 16), codes)
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    high = (
        np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    )
    scales = (low | (high << 4).astype(np.uint8)).view(np.int8) - np.int8(32)
    steps = (_half(blocks, 0) * scales)[:, :, None]
    np.multiply(_IQ4[codes].reshape(-1, 8, 32), steps, out=out.reshape(-1, 8, 32))


def _mxfp4(blocks: Bytes, out: Floats) -> None:
    codes = np.empty(out.shape, np.uint8)
    _nibbles(blocks[:, 1:], codes)
    exponents = blocks[:, :1].astype(np.uint32)
    # Half of 2^(e - 127); the two smallest are subnormal.
    bits = np.where(exponents < 2, np.uint32(0x00200000) << exponents, (exponents - 1) << 23)
    np.multiply(_FP4[codes], bits.view(np.float32), out=out)


TYPES: dict[str, BlockType] = {
    name: BlockType(name, *facts)
    for name, facts in {
        "F32": (0, 1, 4, (), (), _f32),
        "F16": (1, 1, 2, (), (), _f16),
        "BF16": (30, 1, 2, (), (), _bf16),
        "Q4_0": (2, 32, 18, (0,), (8,), _q4_0),
        "Q4_1": (3, 32, 20, (0, 2), (15, 1), _q4_1),
        "Q5_0": (6, 32, 22, (0,), (16,), _q5_0),
        "Q5_1": (7, 32, 24, (0, 2), (31, 1), _q5_1),
        "Q8_0": (8, 32, 34, (0,), (128,), _q8_0),
        "Q4_K": (12, 256, 144, (0, 2), (63 * 15, 63), _q4_k),
        "Q5_K": (13, 256, 176, (0, 2), (63 * 31, 63), _q5_k),
        "Q6_K": (14, 256, 210, (208,), (128 * 32,), _q6_k),
        "IQ4_NL": (20, 32, 18, (0,), (127,), _iq4_nl),
        "IQ4_XS": (23, 256, 136, (0,), (32 * 127,), _iq4_xs),
        "MXFP4": (39, 32, 17, (), (), _mxfp4),
    }.items()
}
"""The types that are read, by name."""

BY_NUMBER = {kind.number: kind for kind in TYPES.values()}
