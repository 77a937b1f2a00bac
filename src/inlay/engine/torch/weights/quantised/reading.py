"""The state dict of a quantised checkpoint, for transformers: read as it is accessed."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from inlay.base.errors import InvalidRequestError
from inlay.engine.torch.native.integers import Integers
from inlay.engine.torch.weights.quantised.blocks import BlockWeight, ExpertBlocks
from inlay.engine.torch.weights.quantised.formats import QuantisedFiles, Read, find
from inlay.engine.torch.weights.quantised.scheme import Scheme
from inlay.engine.torch.weights.quantised.weight import AnyQuantised, KeptWeight
from inlay.tensors.checkpoint import stored_tensors

_MERGED = re.compile(r"\.experts\.\d+\.")
"""Weights that transformers merges into one: they are dequantised."""


def check_has_scales(directory: Path) -> None:
    """Refuse quantised weights without a quantisation config.

    They would be read without their scales.

    Raises:
        InvalidRequestError: names such a weight.
    """
    for tensor in stored_tensors(directory):
        if tensor.dtype.startswith("F8") or tensor.name.endswith((".qweight", ".weight_packed")):
            raise InvalidRequestError(
                f"{tensor.name} is {tensor.dtype}, and config.json has no quantization_config that "
                "says how it is scaled"
            )


@contextmanager
def quantised_weights(
    directory: Path,
    scheme: Scheme | None,
    leave_out: tuple[str, ...],
    kept: "KeptWeights | None",
    rename: Callable[[str], str | None] = str,
) -> Iterator[dict[str, Any]]:
    """Yield the `state_dict` for `from_pretrained`; each tensor is read when it is accessed.

    Args:
        directory: directory of the checkpoint.
        scheme: how it stores its weights; None if none is quantised.
        leave_out: name prefixes of tensors to skip.
        kept: gets the weights that layers of the model keep quantised; without it all are
            dequantised.
        rename: returns the model's name of a tensor in the files, None for one to skip.

    Raises:
        InvalidRequestError: a weight without what it takes to read it, or in another form; the
            message names it.
    """
    stored = {
        tensor.name: tensor
        for tensor in stored_tensors(directory)
        if not tensor.name.startswith(leave_out or ("\0",)) and rename(tensor.name) is not None
    }
    found = {} if scheme is None else find(scheme, stored)
    parts = frozenset[str]().union(*(weight.parts for weight in found.values()))
    with ExitStack() as opened:
        files = {
            file: opened.enter_context(safe_open(file, framework="pt"))
            for file in {tensor.file for tensor in stored.values()}
        }
        slices = {name: files[tensor.file].get_slice(name) for name, tensor in stored.items()}

        def read(name: str) -> Tensor:
            tensor: Tensor = slices[name][...]
            return tensor

        weights: dict[str, Any] = {
            name: part for name, part in slices.items() if name not in parts
        } | {
            name: _Weight(weight, read, None if _MERGED.search(name) else kept)
            for name, weight in found.items()
        }
        yield {str(rename(name)): weight for name, weight in weights.items()}


@dataclass(frozen=True, slots=True)
class _Weight:
    """Stand-in for the slice of a file that transformers expects."""

    found: QuantisedFiles
    read: Read
    kept: "KeptWeights | None"

    def __getitem__(self, index: Any) -> Tensor:
        codes = self.found.read(self.read)
        if self.kept is not None and index is ... and codes.fits:
            return self.kept.add(codes.kept())
        return codes.dense()[index]


class KeptWeights:
    """The weights of a model that are quantised in memory as in the files."""

    def __init__(self, dtype: torch.dtype, integers: Integers | None = None) -> None:
        """Keep weights for a model of `dtype`; those in GGUF's blocks if `integers` multiplies."""
        self._dtype = dtype
        self.integers = integers
        self._weights: list[KeptWeight] = []

    def add(self, weight: AnyQuantised | ExpertBlocks) -> KeptWeight:
        """Return the parameter in place of `weight`."""
        self._weights.append(KeptWeight.of(weight, self._dtype))
        return self._weights[-1]

    def settle(self, model: nn.Module) -> None:
        """Dequantise the weights of a loaded model that its layers have no products of.

        Those of plain linear layers and of experts in blocks have; tables in blocks are looked up
        in.

        Raises:
            InvalidRequestError: transformers has put something else in place of a weight.
        """
        lost = {id(weight) for weight in self._weights}
        lost.difference_update(map(id, model.parameters()))
        shapes = [tuple(weight.shape) for weight in self._weights if id(weight) in lost]
        if shapes:
            raise InvalidRequestError(
                f"{len(shapes)} quantised weights, the first of shape {shapes[0]}, are merged or "
                "cast as this model is loaded, which is not supported"
            )
        dequantise(model, lambda module: type(module) is not nn.Linear and not _in_blocks(module))


def _in_blocks(module: nn.Module) -> bool:
    """Return True for a table, or a layer's experts, in blocks."""
    kind = BlockWeight if isinstance(module, nn.Embedding) else ExpertBlocks
    # Biases of experts are [E, O].
    least = 2 if kind is BlockWeight else 3
    held = [each for each in module.parameters(recurse=False) if each.dim() >= least]
    return bool(held) and all(
        isinstance(each, KeptWeight) and isinstance(each.quantised, kind) for each in held
    )


def dequantise(model: nn.Module, where: Callable[[nn.Module], bool] = lambda module: True) -> None:
    """Replace the quantised weights of a model's modules, in place, by their values."""
    for module in filter(where, model.modules()):
        for name, weight in list(module.named_parameters(recurse=False)):
            if isinstance(weight, KeptWeight):
                dense = weight.quantised.dense().to(weight.dtype)
                setattr(module, name, nn.Parameter(dense, requires_grad=False))
