"""The state dict of a GGUF file, for transformers: read as it is accessed.

Weights are dequantised, or kept in their blocks where there are products with these.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inlay.base.errors import InvalidRequestError
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.native.integers import RUN, Integers, integers
from inlay.engine.torch.weights.quantised.blocks import BlockWeight, ExpertBlocks
from inlay.engine.torch.weights.quantised.reading import KeptWeights
from inlay.engine.torch.weights.quantised.scheme import scheme_of
from inlay.tensors.blocks import TYPES, Bytes, dequantise
from inlay.tensors.checkpoint import config_of, stored_tensors
from inlay.tensors.gguf import is_gguf
from inlay.tensors.gguf_architectures import architecture_of
from inlay.tensors.gguf_model import (
    GgufModel,
    block_runs,
    not_finite,
    read_blocks,
    read_values,
    types_in,
)
from inlay.tensors.stored import StoredTensor

_EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(\w+)\.(weight|bias)")
_JOINT = {
    "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", 0),
    "w1": ("gate_up_proj", 0), "w3": ("gate_up_proj", 1), "w2": ("down_proj", 0),
}  # fmt: skip
"""Of the matrices of an expert: the parameter they are part of, and which half of its outputs."""

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
    found: dict[str, Any] = {
        name: _Weight(tensor, dtype, kept)
        for tensor in stored_tensors(file)
        if (name := rename(tensor.name)) is not None
    }
    by_turns = architecture_of(GgufModel.open(file).gguf).by_turns
    for name, experts in _of_experts(found).items():
        parts = [[found.pop(part) for part in expert] for expert in experts]
        if by_turns:
            found[name] = _TurnedExperts(parts)
        elif all(part.in_blocks for expert in parts for part in expert):
            found[name] = _Experts(parts)
        else:
            # What transformers merges cannot be kept.
            found |= {
                part: replace(of, kept=None)
                for names, each in zip(experts, parts, strict=True)
                for part, of in zip(names, each, strict=True)
            }
    return found


def _of_experts(names: Iterable[str]) -> dict[str, list[list[str]]]:
    """Return the parameters that transformers makes of matrices of experts.

    Of each, by expert, the names of the matrices whose rows are its outputs.
    """
    found = defaultdict[str, dict[int, dict[int, str]]](lambda: defaultdict(dict))
    for name in names:
        if (match := _EXPERT.fullmatch(name)) is not None:
            layer, expert, part, kind = match.groups()
            joint, half = _JOINT[part]
            whole = f"{layer.replace('.block_sparse_moe', '.mlp')}.experts.{joint}"
            whole += "_bias" if kind == "bias" else ""
            found[whole][int(expert)][half] = name
    return {
        whole: [[of[expert][half] for half in sorted(of[expert])] for expert in sorted(of)]
        for whole, of in found.items()
    }


@dataclass(frozen=True, slots=True)
class _Weight:
    """Stand-in for the slice of a file that transformers expects."""

    tensor: StoredTensor
    dtype: torch.dtype
    kept: KeptWeights | None

    @property
    def in_blocks(self) -> bool:
        """There are products with it as it is."""
        shape, type_ = self.tensor.shape, TYPES[self.tensor.dtype].number
        native = None if self.kept is None else self.kept.integers
        return native is not None and len(shape) == 2 and native.serves(type_, shape[1])

    def __getitem__(self, index: Any) -> Tensor:
        if self.kept is not None and index is ... and self.in_blocks:
            return self.kept.add(self.blocks())
        return dense(self.tensor, self.dtype)[index]

    def blocks(self) -> BlockWeight:
        """Return the matrix in blocks. Raises as `read_blocks`."""
        return _laid_out([self])


def _laid_out(parts: "Sequence[_Weight]") -> BlockWeight:
    """Return matrices of one type as one, their rows by turns. Raises as `read_blocks`."""
    (first, *_), tensor = parts, parts[0].tensor
    assert first.kept is not None
    assert first.kept.integers is not None
    runs: Iterable[Bytes] = block_runs(tensor, RUN)
    if len(parts) > 1:
        each = zip(*(block_runs(part.tensor, RUN) for part in parts), strict=True)
        runs = (np.stack(run, 1).reshape(-1, run[0].shape[1]) for run in each)
    outputs, inputs = tensor.shape
    try:
        return BlockWeight.of(
            first.kept.integers, TYPES[tensor.dtype].number, map(torch.from_numpy, runs),
            len(parts) * outputs, inputs,
        )  # fmt: skip
    except ValueError as error:
        for part in parts:
            read_blocks(part.tensor)
        raise not_finite(tensor) from error


@dataclass(frozen=True, slots=True)
class _Experts:
    """Stand-in for a parameter of all experts, [E, O, I]: each one's matrices below one another."""

    parts: list[list[_Weight]]

    def __getitem__(self, index: Any) -> Tensor:
        kept = self.parts[0][0].kept
        assert kept is not None
        assert index is ...
        experts = (BlockWeight.joined([part.blocks() for part in expert]) for expert in self.parts)
        return kept.add(ExpertBlocks(tuple(experts)))


@dataclass(frozen=True, slots=True)
class _TurnedExperts:
    """Stand-in for a parameter of all experts, [E, I, O], or of their biases, [E, O].

    Of each expert's matrices or vectors it has the first output of all, then the second, and so on.
    """

    parts: list[list[_Weight]]

    def __getitem__(self, index: Any) -> Tensor:
        (first, *_), *_ = self.parts
        same = all(
            len({part.tensor.dtype for part in expert}) == 1
            and all(part.in_blocks for part in expert)
            for expert in self.parts
        )
        if first.kept is not None and index is ... and same:
            return first.kept.add(ExpertBlocks(tuple(map(_laid_out, self.parts)), across=True))
        found = torch.empty(
            len(self.parts), *first.tensor.shape[1:], len(self.parts[0]) * first.tensor.shape[0],
            dtype=first.dtype,
        )  # fmt: skip
        for into, expert in zip(found, self.parts, strict=True):
            for place, part in enumerate(expert):
                into[..., place :: len(expert)] = dense(part.tensor, part.dtype).t()
        return found[index]


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
