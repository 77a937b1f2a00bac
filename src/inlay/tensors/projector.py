"""Projectors: linear layers that make rows of one model of the hidden states of another.

A safetensors file of `NAME.weight` [out, in] and perhaps `NAME.bias` [out]. Layers follow each
other by the numbers in their names ("linear_1", "linear_2"; "0", "2"), with GELU between them.
"""

import re
from pathlib import Path
from typing import NamedTuple

from inlay.base.errors import InvalidRequestError
from inlay.tensors.stored import tensors_in

_DTYPES = frozenset({"F32", "F16", "BF16"})


class ProjectorLayer(NamedTuple):
    """One linear layer.

    Attributes:
        name: of its tensors, without ".weight".
        width: elements that it takes.
        size: elements that it gives.
        bias: it has a bias.
    """

    name: str
    width: int
    size: int
    bias: bool


def projector_layers(file: Path) -> list[ProjectorLayer]:
    """Return the layers of a projector, in their order; reads the header alone.

    Raises:
        InvalidRequestError: not such a file, or layers that do not fit one another.
    """
    tensors = {tensor.name: tensor for tensor in tensors_in(file)}
    found: list[ProjectorLayer] = []
    for name in sorted(tensors, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]):
        tensor = tensors[name]
        stem, _, part = name.rpartition(".")
        bias = tensors.get(f"{stem}.bias" if stem else "bias")
        if tensor.dtype not in _DTYPES or part not in ("weight", "bias"):
            raise InvalidRequestError(
                f"{file}: {name} of dtype {tensor.dtype} is no part of a projector; allowed: "
                f"NAME.weight and NAME.bias of {', '.join(sorted(_DTYPES))}"
            )
        if part == "weight":
            shape = tensor.shape
            if len(shape) != 2 or (bias is not None and bias.shape != shape[:1]):
                raise InvalidRequestError(
                    f"{file}: {name} is {list(shape)}; allowed: [out, in], with a bias of [out]"
                )
            if found and found[-1].size != shape[1]:
                raise InvalidRequestError(
                    f"{file}: {name} takes {shape[1]} elements, and {found[-1].name} before it "
                    f"gives {found[-1].size}"
                )
            found.append(ProjectorLayer(stem, shape[1], shape[0], bias is not None))
    biases = sum(name.endswith("bias") for name in tensors)
    if not found or biases != sum(layer.bias for layer in found):
        raise InvalidRequestError(f"{file}: a projector has weights, and no bias without one")
    return found
