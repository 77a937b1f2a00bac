"""The state dict of a GGUF file, for transformers: dequantised as it is read."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inlay.tensors.blocks import dequantise
from inlay.tensors.checkpoint import stored_tensors
from inlay.tensors.gguf_model import read_blocks, read_values
from inlay.tensors.stored import StoredTensor

_CHUNK = 1 << 22
"""Values that are there in float32 at a time."""


def gguf_weights(
    file: Path, dtype: torch.dtype, rename: Callable[[str], str | None]
) -> dict[str, Any]:
    """Return the `state_dict` for `from_pretrained`; each tensor is read when it is accessed.

    Args:
        file: of the model.
        dtype: of the weights.
        rename: returns the model's name of a tensor, None for one to leave out.

    Raises:
        InvalidRequestError: as `stored_tensors`; when one is accessed, as `read_blocks`.
    """
    return {
        name: _Weight(tensor, dtype)
        for tensor in stored_tensors(file)
        if (name := rename(tensor.name)) is not None
    }


@dataclass(frozen=True, slots=True)
class _Weight:
    """Stand-in for the slice of a file that transformers expects."""

    tensor: StoredTensor
    dtype: torch.dtype

    def __getitem__(self, index: Any) -> Tensor:
        return dense(self.tensor, self.dtype)[index]


def dense(tensor: StoredTensor, dtype: torch.dtype) -> Tensor:
    """The values of a tensor in GGUF as the model has them. Raises as `read_blocks`."""
    if len(tensor.shape) != 2:
        return torch.from_numpy(read_values(tensor)).to(dtype)
    blocks, (rows, columns) = read_blocks(tensor), tensor.shape
    found = torch.empty(tensor.shape, dtype=dtype)
    step = max(1, _CHUNK // columns)
    for start in range(0, rows, step):
        part = blocks[start : start + step]
        values = dequantise(tensor.dtype, part, (len(part), columns))
        found[start : start + step] = torch.from_numpy(values)
    return found
