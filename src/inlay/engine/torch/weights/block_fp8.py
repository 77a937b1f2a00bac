"""Checkpoints in block-scaled fp8, as published for DeepSeek-V3 and R1.

Weights are dequantised as they are read.

A weight W [R, C] is stored as float8_e4m3fn, and beside it `NAME_scale_inv` [ceil(R / 128), ceil(C
/ 128)]: the value of W[i, j] is its fp8 value times scale_inv[i // 128, j // 128]; blocks at the
edges are cut off. The layout is described in
https://github.com/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md.

No fp8 products are used, so this runs on any device, and needs the memory of a checkpoint in the
compute dtype. Activations are not quantised: results are closer to the exact ones than those of fp8
kernels, and differ from them. transformers can dequantise too, but only weights whose blocks all
have one size: R1's `kv_a_proj_with_mqa` has 576 rows.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from torch import Tensor

from inlay.errors import InvalidRequestError
from inlay.tensors.table import StoredTensor, stored_tensors

Block: TypeAlias = tuple[int, int]
"""Rows and columns that share a scale."""

_SCALE = "_scale_inv"
_SCALES = ("F32", "BF16", "F16")


def block_of(config: Mapping[str, Any]) -> Block | None:
    """Return the block size of a model's quantised weights; None if they are not quantised.

    Raises:
        InvalidRequestError: another kind of quantisation; the message names it.
    """
    quantised = config.get("quantization_config")
    if not quantised:
        return None
    if not isinstance(quantised, dict):
        raise InvalidRequestError(
            f"config.json: quantization_config is {quantised!r}, not an object"
        )
    method, block = quantised.get("quant_method", "unknown"), quantised.get("weight_block_size")
    if method != "fp8":
        said = str(method)
    elif (
        not isinstance(block, list)
        or len(block) != 2
        or not all(type(n) is int and n > 0 for n in block)
    ):
        said = f"fp8, weight_block_size {block}"
    elif quantised.get("fmt", "e4m3") != "e4m3":
        said = f"fp8, fmt {quantised['fmt']}"
    else:
        return block[0], block[1]
    raise InvalidRequestError(
        f"the checkpoint is quantised ({said}); the torch engine serves float32, bfloat16 and "
        "float16 weights, and e4m3 fp8 scaled in blocks, which it dequantises"
    )


def check_has_scales(directory: Path) -> None:
    """Refuse fp8 weights without a quantisation config.

    They would be read without their scales.

    Raises:
        InvalidRequestError: names such a weight.
    """
    for tensor in stored_tensors(directory):
        if tensor.dtype.startswith("F8"):
            raise InvalidRequestError(
                f"{tensor.name} is {tensor.dtype}, and config.json has no quantization_config that "
                "says how it is scaled"
            )


@contextmanager
def dequantised(
    directory: Path, block: Block, leave_out: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """Yield the `state_dict` for `from_pretrained`.

    Each tensor is read and dequantised when it is accessed.

    Args:
        directory: directory of the checkpoint.
        block: rows and columns that share a scale.
        leave_out: name prefixes of tensors to skip.

    Raises:
        InvalidRequestError: a weight without a scale for every block, or in another fp8 dtype.
    """
    stored = {
        tensor.name: tensor
        for tensor in stored_tensors(directory)
        if not tensor.name.startswith(leave_out or ("\0",))
    }
    for tensor in stored.values():
        if tensor.dtype.startswith("F8"):
            _check(tensor, stored.get(tensor.name + _SCALE), block)
    with ExitStack() as opened:
        files = {
            file: opened.enter_context(safe_open(file, framework="pt"))
            for file in {tensor.file for tensor in stored.values()}
        }
        slices = {name: files[tensor.file].get_slice(name) for name, tensor in stored.items()}
        yield {
            name: _Weight(part, slices[name + _SCALE], block) if name + _SCALE in slices else part
            for name, part in slices.items()
            if not (name.endswith(_SCALE) and name.removesuffix(_SCALE) in slices)
        }


def product(weight: Tensor, scale: Tensor, block: Block) -> Tensor:
    """Return the values of a stored weight [R, C] and its block scales: float32 [R, C].

    Scales are [ceil(R / block rows), ceil(C / block columns)].
    """
    values = weight.to(torch.float32)
    columns = scale.to(torch.float32).repeat_interleave(block[1], dim=1)[:, : values.shape[1]]
    for band, of_columns in enumerate(columns):
        values[band * block[0] : (band + 1) * block[0]] *= of_columns
    return values


@dataclass(frozen=True, slots=True)
class _Weight:
    """Stand-in for the slice of a file that transformers expects."""

    weight: Any
    scale: Any
    block: Block

    def __getitem__(self, index: Any) -> Tensor:
        return product(self.weight[...], self.scale[...], self.block)[index]


def _check(weight: StoredTensor, scale: StoredTensor | None, block: Block) -> None:
    if weight.dtype != "F8_E4M3" or len(weight.shape) != 2:
        raise InvalidRequestError(
            f"{weight.name} is {weight.dtype} of shape {weight.shape}; allowed: matrices in F8_E4M3"
        )
    if scale is None:
        raise InvalidRequestError(
            f"{weight.name} is {weight.dtype} and has no {weight.name}{_SCALE} beside it"
        )
    grid = tuple(-(-size // each) for size, each in zip(weight.shape, block, strict=True))
    if scale.shape != grid or scale.dtype not in _SCALES:
        raise InvalidRequestError(
            f"{scale.name} is {scale.dtype} of shape {scale.shape}; a weight of shape "
            f"{weight.shape} in blocks of {block[0]} x {block[1]} has scales of shape {grid} in "
            f"{', '.join(_SCALES)}"
        )


__all__ = ["Block", "block_of", "check_has_scales", "dequantised", "product"]
