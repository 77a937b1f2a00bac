"""GGUF files for tests, written without the package `gguf`."""

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from inlay.tensors.blocks import TYPES

Stored = tuple[str, tuple[int, ...], bytes]
"""Type, shape as torch has it, and blocks."""


def gguf_bytes(
    metadata: Mapping[str, Any], tensors: Mapping[str, Stored], alignment: int = 32
) -> bytes:
    """A file of version 3. Values are u32, f32, bool, text, or arrays of i32, f32, text."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    head += b"".join(text(key) + value(of) for key, of in metadata.items())
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        head += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += struct.pack("<IQ", TYPES[kind].number, len(data))
        data += raw + bytes(-len(raw) % alignment)
    return head + bytes(-len(head) % alignment) + data


def text(of: str) -> bytes:
    raw = of.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(of: Any) -> bytes:
    match of:
        case bool():
            return struct.pack("<IB", 7, of)
        case int():
            return struct.pack("<II", 4, of)
        case float():
            return struct.pack("<If", 6, of)
        case str():
            return struct.pack("<I", 8) + text(of)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(of)) + b"".join(map(text, of))
        case [float(), *_]:
            return struct.pack(f"<IIQ{len(of)}f", 9, 6, len(of), *of)
        case _:
            return struct.pack(f"<IIQ{len(of)}i", 9, 5, len(of), *of)


def stored(values: npt.NDArray[np.float32], kind: str = "F32") -> Stored:
    """A tensor as F32, F16, or rounded to the blocks of Q8_0, Q4_0 or what the package `gguf` can."""
    shape = values.shape
    if kind in ("F32", "F16"):
        return kind, shape, values.astype("<f4" if kind == "F32" else "<f2").tobytes()
    if kind not in ("Q8_0", "Q4_0"):
        return kind, shape, quantize(values, GGMLQuantizationType[kind]).tobytes()
    most = {"Q8_0": 127, "Q4_0": 7}[kind]
    blocks = values.reshape(-1, 32)
    scales = (np.abs(blocks).max(1, keepdims=True) / most).astype("<f2")
    codes = np.rint(blocks / np.maximum(scales.astype(np.float32), 1e-9))
    codes = np.clip(codes, -most, most).astype(np.int8)
    if kind == "Q4_0":
        unsigned = (codes + 8).astype(np.uint8)
        codes = (unsigned[:, :16] | unsigned[:, 16:] << 4).view(np.int8)
    raw = np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], axis=1)
    return kind, shape, raw.tobytes()
