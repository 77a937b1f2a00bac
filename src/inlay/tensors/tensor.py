"""Result type of all readers, and their common checks.

Size limits, refusals, strided views made dense.
"""

from math import prod
from typing import Any, Literal, TypeAlias

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt

from inlay.base.errors import EmbeddingsError
from inlay.messages.prompt import DTYPE_SIZES, Buffer

TensorFormat: TypeAlias = Literal["torch", "safetensors", "npy"]

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "float64": np.dtype("<f8"),
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
"""numpy's dtype for each dtype a tensor may have, by torch's names."""

BITS_DTYPES: dict[int, np.dtype[Any]] = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}
"""Unsigned integers by size in bytes: elements moved or compared as bits."""

INTEGER_DTYPES: dict[str, np.dtype[Any]] = {"int32": np.dtype("<i4"), "int64": np.dtype("<i8")}
"""numpy's dtype for each dtype of small tensors of integers, which `read` refuses."""

_SIZES = DTYPE_SIZES | {name: dtype.itemsize for name, dtype in INTEGER_DTYPES.items()}

ELEMENT_SIZES = _SIZES | {
    "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "uint16": 2, "uint32": 4, "uint64": 8,
}  # fmt: skip
"""Bytes of an element of each dtype that a model's weights may have, by torch's names."""

MIN_BYTES = 100
"""Decoded bytes under which no container can hold a tensor."""

MAX_DIMENSIONS = 8
MAX_TABLE_ID_LENGTH = 128

_MIB, _KIB = 1024 * 1024, 1024


class ReadLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of `read`.

    Attributes:
        max_bytes: container bytes of one tensor file, after base64.
        flag: option of the server that sets the limit.
    """

    max_bytes: int = 10 * _MIB
    flag: str = "--max-prompt-embeds-bytes"


class Tensor(msgspec.Struct, frozen=True):
    """A dense tensor out of a file: C order, little endian, not yet checked for finite values.

    Attributes:
        data: the elements; views the bytes that were read wherever those are contiguous, so these
            must not change.
        dtype: one of `inlay.messages.prompt.DTYPE_SIZES`.
        shape: every size at least 1; () for a scalar.
        format: the container it came in.
        table_id: id of the embedding table the rows were taken from, where the file says so.
        grid: (time, height, width) in patches of the image whose rows these are, likewise.
    """

    data: Buffer
    dtype: str
    shape: tuple[int, ...]
    format: TensorFormat
    table_id: str | None = None
    grid: tuple[int, int, int] | None = None

    @property
    def array(self) -> npt.NDArray[Any]:
        """Elements as a read-only numpy view (bfloat16 and float8 by `ml_dtypes`)."""
        return np.frombuffer(self.data.view, NUMPY_DTYPES[self.dtype]).reshape(self.shape)


def check_size(num_bytes: int, *, limits: ReadLimits) -> None:
    """Check the size of a container, which may be done before its bytes are there.

    Raises:
        EmbeddingsError: under 100 bytes or over `limits.max_bytes`.
    """
    if num_bytes < MIN_BYTES:
        raise EmbeddingsError(
            f"prompt_embeds decoded data must be at least {MIN_BYTES} bytes, got {num_bytes} bytes",
            reason="too_small",
        )
    if num_bytes > limits.max_bytes:
        raise EmbeddingsError(
            f"prompt_embeds exceeds maximum size of {_size(limits.max_bytes)}: got {num_bytes} "
            f"bytes after decoding ({limits.flag})",
            reason="too_large",
        )


def _size(num_bytes: int) -> str:
    for unit, name in ((_MIB, "MB"), (_KIB, "KB")):
        if num_bytes >= unit and num_bytes % unit == 0:
            return f"{num_bytes // unit}{name}"
    return f"{num_bytes} bytes"


_NOT_A_TENSOR = (
    "prompt_embeds must be a torch.Tensor: one dense floating-point tensor, written by torch.save, "
    "safetensors or numpy.save; got "
)


def refused(what: str) -> EmbeddingsError:
    """The error for bytes that are not one dense float tensor.

    `what` names what they are instead.
    """
    return EmbeddingsError(_NOT_A_TENSOR + what, reason="format")


def what_came(error: EmbeddingsError) -> str:
    """Return what such an error says the bytes are instead."""
    return error.message.removeprefix(_NOT_A_TENSOR)


def quoted(text: str) -> str:
    """Text out of a file as it may stand in a message: escaped, and short."""
    return ascii(text if len(text) <= 80 else text[:77] + "...")


def dense(
    view: memoryview,
    dtype: str,
    shape: tuple[int, ...],
    *,
    strides: tuple[int, ...] | None = None,
    offset: int = 0,
) -> Buffer:
    """The elements of a strided view of `view`, in C order.

    Args:
        view: the storage, bytes.
        dtype: one of `DTYPE_SIZES` or `INTEGER_DTYPES`.
        shape: elements in each dimension.
        strides: elements from one index to the next in each dimension, C order if None.
        offset: first element.

    Raises:
        EmbeddingsError: empty, out of bounds, overlapping, or with more dimensions than any prompt
            has.
    """
    strides = c_strides(shape) if strides is None else strides
    check_view(shape, strides, offset, _SIZES[dtype], len(view))
    return elements(view, shape, strides, offset, _SIZES[dtype])


def check_view(
    shape: tuple[int, ...], strides: tuple[int, ...], offset: int, size: int, length: int
) -> None:
    """Check a view of elements of `size` bytes in a storage of `length` bytes.

    Raises:
        EmbeddingsError: as `dense`.
    """
    if len(shape) > MAX_DIMENSIONS:
        raise refused(f"a tensor of {len(shape)} dimensions; allowed: at most {MAX_DIMENSIONS}")
    if any(n <= 0 for n in shape):
        raise refused(f"an empty tensor of shape {shape}; at least one element is needed")
    if len(strides) != len(shape):
        raise refused(f"a tensor of {len(shape)} sizes and {len(strides)} strides")
    if offset < 0 or any(stride < 0 for stride in strides):
        raise refused(
            f"a tensor of shape {shape} with strides {strides} and offset {offset}; none may be "
            "negative"
        )
    steps = sorted((stride, n) for stride, n in zip(strides, shape, strict=True) if n > 1)
    reach = 0
    for stride, n in steps:
        # A dimension whose step clears everything the smaller steps reach cannot make two indices
        # meet. Views that interleave without meeting fail this too; torch's own test for overlap is
        # the same.
        if stride <= reach:
            how = "stride 0 (an expanded tensor)" if stride == 0 else "overlapping elements"
            raise refused(
                f"a view of shape {shape} and strides {strides} with {how}; call "
                ".contiguous().clone() before saving"
            )
        reach += stride * (n - 1)
    end = (offset + reach + 1) * size
    if end > length:
        raise refused(
            f"a tensor of shape {shape}, strides {strides} and offset {offset}, which ends at byte "
            f"{end} of a storage "
            f"of {length} bytes"
        )


def elements(
    view: memoryview, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, size: int
) -> Buffer:
    """The elements, of `size` bytes, of a view that `check_view` has passed, in C order.

    A contiguous view is not copied. Of any other, only its own elements are: as these may not
    overlap, the copy is never larger than `view`.
    """
    if all(a == b for a, b, n in zip(strides, c_strides(shape), shape, strict=True) if n > 1):
        return Buffer(view[offset * size : (offset + prod(shape)) * size])
    # A dimension of one element has no step: what the file says of it may be any number, also one
    # beyond 64 bits.
    in_bytes = tuple(
        stride * size if n > 1 else 0 for stride, n in zip(strides, shape, strict=True)
    )
    bits = np.ndarray(shape, BITS_DTYPES[size], view, offset * size, in_bytes)
    return Buffer(memoryview(bits.tobytes()))


def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a C-ordered tensor of `shape`."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))
