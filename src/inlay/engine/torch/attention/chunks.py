"""Llama 4's attention beyond its first chunk: local layers in chunks, the others by temperature."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from inlay.engine.torch.windows import Chunk


class Temperature(NamedTuple):
    """Scaling of queries that grows with their positions (arXiv 2501.19399).

    Attributes:
        floor: positions of each step of it.
        scale: factor of the logarithm of the steps.
    """

    floor: float
    scale: float

    def of(self, query: Tensor, places: Tensor) -> Tensor:
        """Return scaled queries [1, Q, T, D] at `places` [1, T], as transformers scales them."""
        steps = torch.floor((places.float() + 1.0) / self.floor)
        factors = torch.log1p(steps) * self.scale + 1.0
        return (query * factors[:, None, :, None]).to(query.dtype)


def see_chunks(model: nn.Module) -> bool:
    """Have layers of Llama 4 tell what they see; return True if their attention needs `places`.

    transformers masks by a chunk's places in its own batch and takes temperatures from them; in a
    packed batch they are those of other sequences.
    """
    needed = False
    for module in model.modules():
        if type(module).__name__ != "Llama4TextAttention":
            continue
        layer: Any = module
        config = layer.config
        if config.layer_types[layer.layer_idx] == "chunked_attention":
            layer.chunk = Chunk(config.attention_chunk_size)
        if layer.attn_temperature_tuning and not layer.use_rope:
            layer.temperature = Temperature(layer.floor_scale, layer.attn_scale)
            needed = True
        layer.attn_temperature_tuning = False
    return needed
