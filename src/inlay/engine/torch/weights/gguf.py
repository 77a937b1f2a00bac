"""The state dict of a GGUF file, for transformers: read as it is accessed.

Weights are dequantised, or kept in their blocks where there are products with these.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inlay.base.errors import InvalidRequestError
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.native.integers import Integers, integers
from inlay.engine.torch.weights.quantised.blocks import BlockWeight
from inlay.engine.torch.weights.quantised.reading import KeptWeights
from inlay.engine.torch.weights.quantised.scheme import scheme_of
from inlay.tensors.blocks import TYPES, dequantise
from inlay.tensors.checkpoint import config_of, stored_tensors
from inlay.tensors.gguf import is_gguf
from inlay.tensors.gguf_model import not_finite, read_blocks, read_values, types_in
from inlay.tensors.stored import StoredTensor

_CHUNK = 1 << 22
"""Values that are there in float32 at a time."""


@dataclass(frozen=True, slots=True)
class BlockProducts:
    """Products in integers, and what weights are rounded to for them as they are loaded.

    Attributes:
        native: the products.
        quantization: as `EngineSettings.quantization`; None: weights are in blocks already.
    """

    native: Integers
    quantization: str | None = None

    @property
    def rounding(self) -> str:
        """Rounding of activations, and of weights, as the model's identity and card have it."""
        return "int8" if self.quantization is None else f"int8, weights {self.quantization}"


def block_products(
    settings: EngineSettings, path: Path, device: torch.device
) -> BlockProducts | None:
    """Return products for which weights are in blocks; None where they are dequantised, or plain.

    Args:
        settings: of the engine.
        path: of the model.
        device: that it is computed on.

    Raises:
        InvalidRequestError: int8 was asked for, or a quantization, and cannot be; the message says
            why.
    """
    quantization = settings.compute.quantization
    if settings.compute.activations == "exact" and quantization is None:
        return None
    in_blocks = any(TYPES[type_].elements > 1 for type_ in types_in(path))
    reason, found = "", None
    if quantization is not None:
        reason = _not_plain(path)
        if settings.compute.activations == "exact":
            reason = "its products round activations to eight bits: without --activations exact"
    elif not in_blocks:
        reason = f"the weights of {path} are not in blocks of a GGUF file"
    if reason:
        pass
    elif device.type != "cpu":
        reason = f"it is for CPUs, and the model is on {device.type}"
    elif settings.devices.tensor_parallel_size > 1:
        reason = "blocks are not divided over ranks (--tensor-parallel-size)"
    elif (found := integers()) is None:
        reason = "it needs a CPU with AVX2, and a C++ compiler or compiled kernels"
    if reason and quantization is not None:
        raise InvalidRequestError(f"--quantization {quantization}: {reason}", param="quantization")
    if reason and settings.compute.activations == "int8":
        raise InvalidRequestError(f"--activations int8: {reason}", param="activations")
    return None if found is None else BlockProducts(found, quantization)


def _not_plain(path: Path) -> str:
    """Return why the weights of a model cannot be rounded at load; "" where they can."""
    config = config_of(path)
    if is_gguf(path):
        return f"{path} is GGUF: its weights are as they are"
    if scheme_of(config) is not None:
        return f"the weights of {path} are quantised already"
    towers = sorted(name for name in config if name in ("vision_config", "audio_config"))
    if towers:
        return f"for models of text alone, and {path} has {towers[0]}"
    return ""


def gguf_weights(
    file: Path,
    dtype: torch.dtype,
    rename: Callable[[str], str | None],
    kept: KeptWeights | None = None,
) -> dict[str, Any]:
    """Return the `state_dict` for `from_pretrained`; each tensor is read when it is accessed.

    Args:
        file: of the model.
        dtype: of the weights.
        rename: returns the model's name of a tensor, None for one to leave out.
        kept: gets the matrices that stay in blocks, if it has products with them.

    Raises:
        InvalidRequestError: as `stored_tensors`; when one is accessed, as `read_blocks`.
    """
    return {
        name: _Weight(tensor, dtype, kept)
        for tensor in stored_tensors(file)
        if (name := rename(tensor.name)) is not None
    }


@dataclass(frozen=True, slots=True)
class _Weight:
    """Stand-in for the slice of a file that transformers expects."""

    tensor: StoredTensor
    dtype: torch.dtype
    kept: KeptWeights | None

    def __getitem__(self, index: Any) -> Tensor:
        native = None if self.kept is None else self.kept.integers
        shape, type_ = self.tensor.shape, TYPES[self.tensor.dtype].number
        if (
            self.kept is not None
            and native is not None
            and len(shape) == 2
            and index is ...
            and native.serves(type_, shape[1])
        ):
            blocks = torch.from_numpy(read_blocks(self.tensor, halves=False))
            try:
                return self.kept.add(BlockWeight.of(native, type_, blocks, *shape))
            except ValueError as error:
                raise not_finite(self.tensor) from error
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
