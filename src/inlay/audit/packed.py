"""Files of rows of many prompts, one after another: safetensors with `rows` and `offsets`.

`rows` is (N, h), `offsets` (prompts + 1): prompt i has the rows from offsets[i] to offsets[i + 1].
"""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from inlay.audit.prompts import Floats
from inlay.errors import InvalidRequestError
from inlay.tensors.table import StoredTensor, tensors_in

_ROWS: Mapping[str, npt.DTypeLike] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}
_OFFSETS: Mapping[str, npt.DTypeLike] = {"I64": np.int64, "I32": np.int32}


def pack(rows: Sequence[Floats], ids: Sequence[npt.NDArray[np.int64]], seed: int) -> bytes:
    """A file of rows, with the token behind each (`token_ids`) and a seed in its metadata.

    Args:
        rows: (n, h) float32 for each prompt.
        ids: (n,) for each prompt.
        seed: of randomness that is new each time.
    """
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    tensors: dict[str, tuple[str, npt.NDArray[Any]]] = {
        "rows": ("F32", np.concatenate(rows)),
        "offsets": ("I64", offsets),
        "token_ids": ("I64", np.concatenate(ids)),
    }
    header: dict[str, Any] = {"__metadata__": {"seed": str(seed)}}
    end = 0
    for name, (dtype, array) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": array.shape,
            "data_offsets": (end, end + array.nbytes),
        }
        end += array.nbytes
    text = json.dumps(header).encode()
    text = text.ljust(len(text) + -len(text) % 8)
    data = (array.tobytes() for _, array in tensors.values())
    return b"".join((len(text).to_bytes(8, "little"), text, *data))


def unpack(file: Path, name: str) -> list[Floats]:
    """The rows of each prompt, float32.

    Raises:
        InvalidRequestError: not such a file.
    """
    stored = {tensor.name: tensor for tensor in tensors_in(file)}
    if not {"rows", "offsets"} <= set(stored):
        raise InvalidRequestError(
            f"{name} holds {', '.join(sorted(stored)) or 'nothing'}; it must hold `rows`, those of "
            "all texts one after another, and `offsets`, where each begins and the last ends"
        )
    rows = _read(stored["rows"], _ROWS, 2, name)
    offsets = _read(stored["offsets"], _OFFSETS, 1, name).tolist()
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != len(rows):
        raise InvalidRequestError(f"{name}: offsets must go from 0 to the {len(rows)} of its rows")
    if any(stop < start for start, stop in pairwise(offsets)):
        raise InvalidRequestError(f"{name}: offsets must not fall")
    wide = rows.astype(np.float32)
    return [wide[start:stop] for start, stop in pairwise(offsets)]


def _read(
    tensor: StoredTensor, dtypes: Mapping[str, npt.DTypeLike], dimensions: int, name: str
) -> npt.NDArray[Any]:
    dtype = np.dtype(dtypes[tensor.dtype]) if tensor.dtype in dtypes else None
    count = int(np.prod(tensor.shape, dtype=object))
    if dtype is None or len(tensor.shape) != dimensions or count * dtype.itemsize != tensor.nbytes:
        raise InvalidRequestError(
            f"{name}: {tensor.name} is {tensor.dtype} of shape {tensor.shape} in {tensor.nbytes} "
            f"bytes; it must be {' or '.join(dtypes)} with {dimensions} dimensions"
        )
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.offset)
        return np.frombuffer(stream.read(tensor.nbytes), dtype).reshape(tensor.shape)
