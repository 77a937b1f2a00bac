"""Shapes of what a model's layers keep, found by running one position through the model."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from inlay.base.errors import EngineError, InvalidRequestError
from inlay.engine.torch.attention.paged import Scoring
from inlay.engine.torch.attention.shape import RECURRENT_WINDOW, LayerShape
from inlay.engine.torch.native.recurrent import DeltaRule
from inlay.messages.digest import BLOCK_SIZE


class _Observer:
    """Attention and recurrence that record the shapes they are called with and return zeros."""

    def __init__(self) -> None:
        self.seen: dict[int, LayerShape] = {}
        self.states: dict[int, int] = {}

    def compute(self, module: Any, hidden: Tensor) -> Tensor:
        """Record the size of a recurrent layer's state; return zeros."""
        self.states[module.layer_idx] = DeltaRule.of(module).state_size
        return torch.zeros_like(hidden)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Record the shapes; return zeros."""
        if not scoring.scaling > 0:
            # Kernels take the greatest score before they scale.
            raise EngineError(f"layer {layer} scales scores by {scoring.scaling}, not above 0")
        latent = scoring.latent
        self.seen[layer] = LayerShape(
            scoring.window, key.shape[0], key.shape[2], value.shape[2], latent is not None
        )
        size = value.shape[2] if latent is None else latent.value_size
        return value.new_zeros(query.shape[1], query.shape[0], size)


def observe(model: nn.Module, *, recurrent: bool = False) -> tuple[LayerShape, ...]:
    """Return the shape of each layer of a transformers model's body, in order.

    Raises:
        InvalidRequestError: a layer uses an option that this engine's attention does not support,
            or recurrent layers stand beside unlike attention layers.
    """
    observer = _Observer()
    position = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
    try:
        with torch.inference_mode():
            model(
                input_ids=position,
                position_ids=position,
                use_cache=False,
                paged=observer,
                **({"states": observer} if recurrent else {}),
            )
    except EngineError as error:
        raise InvalidRequestError(f"the model cannot be served: {error.message}") from error
    seen = observer.seen
    if observer.states:
        alike = set(seen.values())
        if len(alike) != 1:
            raise InvalidRequestError(
                f"beside recurrent layers, attention layers must be alike; got {len(alike)} kinds"
            )
        like = alike.pop()
        if any(size % like.num_heads for size in observer.states.values()):
            raise InvalidRequestError(
                f"states of {sorted(set(observer.states.values()))} elements are not divided by "
                f"{like.num_heads} key and value heads"
            )
        seen |= {
            layer: like._replace(window=RECURRENT_WINDOW, state_size=size)
            for layer, size in observer.states.items()
        }
    if sorted(seen) != list(range(len(seen))):
        raise InvalidRequestError(f"the model numbers its layers {sorted(seen)}")
    return tuple(seen[layer] for layer in range(len(seen)))


def least_page_size(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Return the least positions of a page that holds the state of every recurrent layer.

    A multiple of `inlay.messages.digest.BLOCK_SIZE`, the smallest one without such layers.
    """
    least = 1
    for layer in layers:
        state = layer.state_size * torch.float32.itemsize
        least = max(least, -(-state // (layer.elements * dtype.itemsize)))
    return -(-least // BLOCK_SIZE) * BLOCK_SIZE
