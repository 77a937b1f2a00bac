"""Several named arrays in one safetensors file, in memory: what an answer of vectors is."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from inlay.base.errors import EngineError
from inlay.tensors.safetensors_file import METADATA, NAMES, encode_header
from inlay.tensors.tensor import NUMPY_DTYPES

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]

_BY_NAME = {name: np.dtype(NUMPY_DTYPES.get(dtype, dtype)) for dtype, name in NAMES.items()}


class _Described(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def write_arrays(arrays: Arrays, metadata: Mapping[str, str]) -> bytes:
    """Return a safetensors file of arrays, those of large elements first, so that all lie even."""
    header: dict[str, Any] = {METADATA: dict(metadata)}
    parts, at = [], 0
    for name, array in sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize):
        part = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": NAMES[array.dtype.name],
            "shape": array.shape,
            "data_offsets": (at, at + len(part)),
        }
        parts.append(part)
        at += len(part)
    return b"".join([encode_header(header), *parts])


def read_arrays(data: bytes | memoryview) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    """Return the arrays of a safetensors file, which share its memory, and its metadata.

    Raises `EngineError` for what is no such file: it was made by `write_arrays`.
    """
    length = int.from_bytes(data[:8], "little")
    body = memoryview(data)[8 + length :]
    try:
        header = msgspec.json.decode(data[8 : 8 + length])
        metadata = msgspec.convert(header.pop(METADATA, {}), dict[str, str])
        entries = msgspec.convert(header, dict[str, _Described])
        found = {
            name: np.frombuffer(body[slice(*entry.data_offsets)], _BY_NAME[entry.dtype]).reshape(
                entry.shape
            )
            for name, entry in entries.items()
        }
    except (msgspec.MsgspecError, AttributeError, KeyError, ValueError) as error:
        raise EngineError(f"this is no safetensors file: {error}") from error
    return found, metadata
