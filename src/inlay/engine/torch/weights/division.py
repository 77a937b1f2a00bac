"""Division of transformers models into body, head and tower, before and after loading."""

import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from inlay.engine.torch.weights.media_families import ImageFamily


@dataclass
class _HiddenStates(MoeModelOutputWithPast):  # type: ignore[misc]  # transformers has no types
    """Result of a body, with the fields that Gemma 4 and models with a tower read."""

    shared_kv_states: None = None
    image_hidden_states: None = None
    video_hidden_states: None = None
    audio_hidden_states: None = None
    rope_deltas: None = None
    attention_mask: None = None
    labels: None = None


class _EmbeddingStub(nn.Module):
    """Stand-in for a model's body that returns its input as last hidden states."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _HiddenStates:
        return _HiddenStates(last_hidden_state=inputs_embeds)


def split_tower(model: Any, family: ImageFamily) -> tuple[Any, Any]:
    """Take `model` apart; it is not whole afterwards.

    Returns:
        The causal language model, and the body without it, which computes image features; None if
        the family has no tower.
    """
    body: Any = None
    if family.language is not None:
        body = model if family.own_head else getattr(model, model.base_model_prefix)
        language = getattr(body, family.language)
        delattr(body, family.language)
        if family.own_head:
            model = language
        else:
            setattr(model, model.base_model_prefix, language)
    if not hasattr(model, model.base_model_prefix):
        # Llama 4's causal model gives the attribute of the whole model.
        model.base_model_prefix = "model"
    return model, body


def drop_tower_layers(config: Any) -> None:
    """Have transformers build a model without the layers of its tower, whose weights are not read.

    What is around them is read into memory of the CPU, to be dropped.
    """
    for part in ("vision_config", "audio_config"):
        tower = getattr(config, part, None)
        for name in ("num_hidden_layers", "depth", "encoder_layers"):
            if hasattr(tower, name):
                setattr(tower, name, 0)


def head_of(model: Any) -> Any:
    """Return `model` without its body: hidden states to logits.

    Includes all steps of its family (soft caps, scales).
    """
    head = copy.copy(model)
    head._modules = {**model._modules, model.base_model_prefix: _EmbeddingStub()}
    return head
