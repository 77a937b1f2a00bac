"""Arguments with which the body of a transformers model computes a batch."""

from typing import Any

import torch
from torch import Tensor

from inlay.engine.torch.batch import Batch


def has_inputs_per_layer(config: Any) -> bool:
    """Return True if layers add further embeddings of the ids (Gemma 4)."""
    return bool(getattr(config, "hidden_size_per_layer_input", 0))


def inner_features(batch: Batch, features: Tensor, padding: int) -> dict[str, Any]:
    """Return the arguments by which a body adds `features` after its first layers (DeepStack)."""
    rows = batch.positions.new_zeros(1, len(batch.positions) + padding, dtype=torch.bool)
    rows[0, batch.row_index] = True
    return {"visual_pos_masks": rows, "deepstack_visual_embeds": list(features)}
