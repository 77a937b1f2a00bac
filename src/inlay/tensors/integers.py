"""Small tensors of integers in files, as grids of patches are sent."""

import numpy as np

from inlay.base.errors import EmbeddingsError
from inlay.tensors.npy_file import MAGIC, read_npy
from inlay.tensors.tensor import INTEGER_DTYPES, dense, refused
from inlay.tensors.torch_file import stored

MAX_BYTES = 65536
"""Bytes of a file with a few integers."""

_NPY = {"<i4": "int32", "<i8": "int64"}


def read_integers(container: bytes, *, count: int) -> tuple[int, ...]:
    """The elements of a tensor of `count` integers in a file by `torch.save` or `numpy.save`.

    Raises:
        EmbeddingsError: too large, another number of elements, or anything else.
    """
    if len(container) > MAX_BYTES:
        raise refused(f"a file of {len(container)} bytes for {count} integers")
    view = memoryview(container)
    if container.startswith(b"PK\3\4"):
        _, _, value, storage = stored(view)
        dtype, shape = value.dtype, value.shape
        if dtype not in INTEGER_DTYPES:
            raise refused(f"a tensor of {dtype} where integers belong")
        data = dense(storage, dtype, shape, strides=value.strides, offset=value.offset)
    elif container.startswith(MAGIC):
        tensor = read_npy(view, _NPY)
        dtype, shape, data = tensor.dtype, tensor.shape, tensor.data
    else:
        raise refused(
            f"bytes in no known format, beginning with {bytes(container[:8]).decode('latin-1')!r}"
        )
    found = np.frombuffer(data.view, INTEGER_DTYPES[dtype])
    if found.size != count:
        raise EmbeddingsError(f"a tensor of shape {shape} where {count} integers belong")
    return tuple(int(number) for number in found)
