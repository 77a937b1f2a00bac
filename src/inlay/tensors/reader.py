"""Container bytes to one tensor and back, whatever the format."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from inlay.base.errors import EmbeddingsError
from inlay.messages.prompt import Buffer
from inlay.tensors.npy_file import MAGIC, read_npy, write_npy
from inlay.tensors.safetensors_file import read_safetensors, write_safetensors
from inlay.tensors.tensor import (
    BITS_DTYPES,
    MAX_DIMENSIONS,
    MAX_TABLE_ID_LENGTH,
    NUMPY_DTYPES,
    ReadLimits,
    Tensor,
    TensorFormat,
    check_size,
    refused,
)
from inlay.tensors.torch_file import read_torch, write_torch

Container: TypeAlias = bytes | bytearray | memoryview | Buffer

_DEFAULT_LIMITS = ReadLimits()


def read(data: Container, *, limits: ReadLimits = _DEFAULT_LIMITS) -> Tensor:
    """Read the dense float tensor in a file by `torch.save`, safetensors or `numpy.save`.

    The format is recognised by content.

    Nothing is executed or inflated. Elements are not copied unless they are a strided view, and
    memory beyond that copy, which is never larger than `data`, stays under a megabyte whatever the
    bytes say. Values are not looked at: `to_rows` does.

    Args:
        data: the container's bytes; must not change while the tensor or its rows live.
        limits: what is allowed.

    Raises:
        EmbeddingsError: too small, too large, or not one dense float tensor; the message names what
            it is instead.
    """
    container = (data if isinstance(data, Buffer) else Buffer(data)).view
    check_size(len(container), limits=limits)
    start = bytes(container[:16])
    if start.startswith(b"PK\3\4"):
        return read_torch(container)
    if start.startswith(MAGIC):
        return read_npy(container)
    if start[8:9] == b"{":
        return read_safetensors(container)
    if start.startswith(b"\x80"):
        raise refused(
            "a bare pickle (the legacy non-zip form of torch.save?); save again without "
            "_use_new_zipfile_serialization=False"
        )
    raise refused(
        f"bytes in no known format, beginning with {bytes(start[:8]).decode('latin-1')!r}"
    )


def write(
    array: npt.NDArray[Any],
    format: TensorFormat,
    *,
    table_id: str | None = None,
    grid: tuple[int, int, int] | None = None,
) -> bytes:
    """The bytes of a file that holds `array`, which `read` gives back.

    Args:
        array: (num_tokens, hidden) or any other non-empty shape; float64, float32, float16, or
            `ml_dtypes`' bfloat16, float8_e4m3fn, float8_e5m2.
        format: "torch" (as `torch.save`; readable with `torch.load(weights_only=True)`),
            "safetensors", or "npy", which knows neither bfloat16 and float8 nor a table id.
        table_id: id of the embedding table the rows were taken from; at most 128 ASCII characters.
        grid: (time, height, width) in patches of the image whose rows these are; "safetensors"
            alone has a place for it.

    Raises:
        EmbeddingsError: an array, a table id, or a grid that the format cannot hold.
    """
    dtype = next(
        (name for name, known in NUMPY_DTYPES.items() if known == array.dtype.newbyteorder("<")),
        None,
    )
    if dtype is None:
        raise EmbeddingsError(
            f"embeddings of dtype {array.dtype}; allowed: {', '.join(NUMPY_DTYPES)}"
        )
    if array.size == 0 or array.ndim > MAX_DIMENSIONS:
        raise EmbeddingsError(
            f"embeddings of shape {array.shape}; at least one element and at most {MAX_DIMENSIONS} "
            "dimensions are needed"
        )
    if table_id is not None and not (
        0 < len(table_id) <= MAX_TABLE_ID_LENGTH and table_id.isascii()
    ):
        raise EmbeddingsError(
            f"embedding table id of {len(table_id)} characters; allowed: 1 to "
            f"{MAX_TABLE_ID_LENGTH}, all ASCII"
        )
    if grid is not None and format != "safetensors":
        raise EmbeddingsError(f"{format} has no place for the grid of an image; safetensors has")
    elements = np.asarray(array, NUMPY_DTYPES[dtype], order="C")
    if format == "npy":
        return write_npy(elements, dtype, table_id)
    data = elements.reshape(-1).view(BITS_DTYPES[1]).data
    if format == "torch":
        return write_torch(data, dtype, elements.shape, table_id)
    if format == "safetensors":
        return write_safetensors(data, dtype, elements.shape, table_id, grid)
    raise EmbeddingsError(f"unknown format {format!r}; allowed: 'torch', 'safetensors', 'npy'")
