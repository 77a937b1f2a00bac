"""A tensor out of a file to the rows of a prompt, in the model's dtype and checked."""

from typing import Literal, TypeAlias

import numpy as np

from inlay.base.errors import EmbeddingsError
from inlay.messages.prompt import DTYPE_SIZES, Buffer, Rows
from inlay.tensors.cast import NON_FINITE, Bits, cast, first_at_least, largest_magnitude, value_of
from inlay.tensors.tensor import BITS_DTYPES, Tensor, quoted

ModelDType: TypeAlias = Literal["bfloat16", "float16", "float32"]
"""dtypes a model's activations may have."""


MAX_PROMPTS = 128
"""Default bound of prompts in one tensor."""


def prompts_of(tensor: Tensor, *, max_prompts: int = MAX_PROMPTS) -> list[Tensor]:
    """The prompts in a tensor, each (num_tokens, hidden), sharing its memory.

    Args:
        tensor: (num_tokens, hidden) for one prompt or (batch, num_tokens, hidden) for that many,
            also for a batch of 1.
        max_prompts: allowed; a file of a few megabytes may hold a million prompts of one number
            each.

    Raises:
        EmbeddingsError: any other number of dimensions, or more prompts than allowed.
    """
    if len(tensor.shape) == 2:
        return [tensor]
    if len(tensor.shape) != 3:
        raise EmbeddingsError(
            "prompt_embeds must be a torch.Tensor of shape (num_tokens, hidden) or (batch, "
            "num_tokens, hidden); "
            f"got shape {tensor.shape}",
            reason="format",
        )
    batch, num_tokens, hidden = tensor.shape
    if batch > max_prompts:
        raise EmbeddingsError(
            f"prompt_embeds hold {batch} prompts in shape {tensor.shape}; allowed: at most "
            f"{max_prompts}"
        )
    size = len(tensor.data) // batch
    return [
        Tensor(
            tensor.data.slice(index * size, (index + 1) * size),
            tensor.dtype,
            (num_tokens, hidden),
            tensor.format,
            tensor.table_id,
        )
        for index in range(batch)
    ]


def to_rows(
    tensor: Tensor,
    *,
    hidden_size: int,
    dtype: str,
    max_abs: float | None = None,
    table_id: str | None = None,
) -> Rows:
    """The rows of one prompt in the model's dtype.

    They view the tensor's memory where the dtype is already that one.

    Args:
        tensor: (num_tokens, hidden).
        hidden_size: the model's.
        dtype: the model's activation dtype, a `ModelDType`.
        max_abs: largest magnitude an element may have after the cast; None for no bound beyond
            finite.
        table_id: id of the model's embedding table; None if it has none. A tensor that carries no
            id passes.

    Raises:
        EmbeddingsError: another embedding table, another hidden size, or an element that is not
            finite before or after the cast or too large; the message names the first such row.
    """
    if dtype not in ("bfloat16", "float16", "float32"):
        raise EmbeddingsError(f"no model has dtype {dtype!r}; allowed: bfloat16, float16, float32")
    if len(tensor.shape) != 2:
        raise EmbeddingsError(
            f"rows must be a torch.Tensor of shape (num_tokens, hidden); got shape {tensor.shape}",
            reason="format",
        )
    if tensor.table_id is not None and table_id is not None and tensor.table_id != table_id:
        raise EmbeddingsError(
            f"prompt_embeds were made for embedding table {quoted(tensor.table_id)}; the model's "
            "embedding table is "
            f"{quoted(table_id)}",
            reason="table",
        )
    num_tokens, hidden = tensor.shape
    if hidden != hidden_size:
        raise EmbeddingsError(
            f"size of tensor must match the model's hidden size: got {hidden} in shape "
            f"{tensor.shape}, "
            f"the model takes {hidden_size}",
            reason="shape",
        )
    bits = np.frombuffer(tensor.data.view, BITS_DTYPES[DTYPE_SIZES[tensor.dtype]])
    _check_magnitude(bits, tensor, dtype, max_abs)
    if tensor.dtype == dtype:
        return Rows(tensor.data, dtype, (num_tokens, hidden))
    cast_bits = cast(bits, tensor.dtype, dtype)
    return Rows(Buffer(cast_bits.data), dtype, (num_tokens, hidden))


def _check_magnitude(bits: Bits, tensor: Tensor, dtype: str, max_abs: float | None) -> None:
    """Rounding keeps order, so what becomes of the largest element says what becomes of all."""
    largest = largest_magnitude(bits)

    def first_row(magnitude: int) -> int:
        return first_at_least(bits, magnitude) // tensor.shape[1]

    non_finite = NON_FINITE[tensor.dtype]
    if largest >= non_finite:
        raise EmbeddingsError(
            f"prompt_embeds must be finite: row {first_row(non_finite)} holds a {tensor.dtype} NaN "
            "or infinity",
            reason="not_finite",
        )
    cast_largest = int(cast(np.array([largest], bits.dtype), tensor.dtype, dtype)[0])
    value = value_of(largest, tensor.dtype)
    if cast_largest >= NON_FINITE[dtype]:
        raise EmbeddingsError(
            f"prompt_embeds must be finite as the model's {dtype}: row {first_row(largest)} holds "
            f"{value:g} as {tensor.dtype}",
            reason="not_finite",
        )
    if max_abs is not None and value_of(cast_largest, dtype) > max_abs:
        raise EmbeddingsError(
            f"prompt_embeds exceed the largest magnitude allowed: row {first_row(largest)} holds "
            f"{value:g}; "
            f"allowed: at most {max_abs:g}",
            reason="magnitude",
        )
