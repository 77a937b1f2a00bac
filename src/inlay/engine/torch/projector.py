"""A projector of hidden states: what makes them rows of another model."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from inlay.base.errors import InvalidRequestError
from inlay.tensors.projector import projector_layers


class Projector:
    """Linear layers with GELU between them."""

    def __init__(self, file: Path, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """Load it.

        Raises:
            InvalidRequestError: not such a file, or not for states of this width.
        """
        layers = projector_layers(file)
        if layers[0].width != width:
            raise InvalidRequestError(
                f"{file} takes {layers[0].width} elements; the model's hidden states have {width}"
            )
        tensors = {name: tensor.to(device, dtype) for name, tensor in load_file(file).items()}
        self.size = layers[-1].size
        self._layers: list[tuple[Tensor, Tensor | None]] = []
        for layer in layers:
            stem = f"{layer.name}." if layer.name else ""
            self._layers.append((tensors[f"{stem}weight"], tensors.get(f"{stem}bias")))

    @torch.inference_mode()
    def __call__(self, states: Tensor) -> Tensor:
        """Return rows [N, size] of hidden states [N, width]."""
        for number, (weight, bias) in enumerate(self._layers):
            states = F.linear(F.gelu(states) if number else states, weight, bias)
        return states
