"""Shapes of a model's attention layers, found by running one position through the model."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from inlay.engine.torch.attention.paged import Scoring
from inlay.errors import EngineError, InvalidRequestError


class LayerShape(NamedTuple):
    """Keys and values that one attention layer stores per position.

    Attributes:
        window: a position sees itself and the `window - 1` before it; None for all before it.
        num_heads: key and value heads.
        key_size: elements of a key head.
        value_size: elements of a value head.
        latent: a value is the first part of its key, and only the key is kept.
    """

    window: int | None
    num_heads: int
    key_size: int
    value_size: int
    latent: bool = False

    @property
    def kept(self) -> tuple[int, int, int]:
        """Heads, and elements that pages keep of a key head and of a value head."""
        return self.num_heads, self.key_size, 0 if self.latent else self.value_size

    @property
    def elements(self) -> int:
        """Elements stored per position, keys and values together."""
        heads, *sizes = self.kept
        return heads * sum(sizes)


class _Observer:
    """Attention that records the shapes it is called with and returns zeros."""

    def __init__(self) -> None:
        self.seen: dict[int, LayerShape] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Record the shapes; return zeros."""
        latent = scoring.latent
        self.seen[layer] = LayerShape(
            scoring.window, key.shape[0], key.shape[2], value.shape[2], latent is not None
        )
        size = value.shape[2] if latent is None else latent.value_size
        return value.new_zeros(query.shape[1], query.shape[0], size)


def observe(model: nn.Module) -> tuple[LayerShape, ...]:
    """Return the shape of each attention layer of a transformers model's body, in order.

    Raises:
        InvalidRequestError: a layer uses an option that this engine's attention does not support.
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
            )
    except EngineError as error:
        raise InvalidRequestError(f"the model cannot be served: {error.message}") from error
    if sorted(observer.seen) != list(range(len(observer.seen))):
        raise InvalidRequestError(f"the model numbers its attention layers {sorted(observer.seen)}")
    return tuple(observer.seen[layer] for layer in range(len(observer.seen)))
