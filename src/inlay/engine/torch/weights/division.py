"""Division of transformers models into body, head and tower, before and after loading."""

import copy
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
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


class _Rows(nn.Module):
    """Product with some rows of a head, in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._weight, self._bias = weight.float(), None if bias is None else bias.float()

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x.float(), self._weight, self._bias)


class NamedHead:
    """Head of a model for some ids alone, in float32 whatever the model's dtype."""

    def __init__(self, model: Any, name: str, weight: Tensor, bias: Tensor | None) -> None:
        """Use `of`."""
        self._head = head_of(model)
        self._name, self._weight, self._bias = name, weight, bias

    @classmethod
    def of(cls, model: Any) -> "NamedHead | None":
        """Return the head of `model`; None where its rows are not there as plain numbers.

        They are those of the embedding table where both are tied.
        """
        output, table = model.get_output_embeddings(), model.get_input_embeddings()
        name = next((name for name, child in model.named_children() if child is output), None)
        weight = getattr(output, "weight", None)
        if not _is_plain(weight) and model.config.get_text_config().tie_word_embeddings:
            weight = getattr(table, "weight", None)
        rows = model.config.get_text_config().vocab_size
        if name is None or not _is_plain(weight) or len(weight) < rows:
            return None
        return cls(model, name, weight, getattr(output, "bias", None))

    def logits(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Compute the logits of some ids, with all steps of the family.

        Args:
            hidden: [N, C].
            ids: [K] int64.

        Returns:
            [N, K] float32.
        """
        with torch.inference_mode():
            bias = None if self._bias is None else self._bias[ids]
            head = copy.copy(self._head)
            head._modules = {**head._modules, self._name: _Rows(self._weight[ids], bias)}
            logits: Tensor = head(inputs_embeds=hidden.float()[None]).logits[0]
        return logits.float()


def _is_plain(weight: object) -> TypeGuard[Tensor]:
    return type(weight) in (Tensor, nn.Parameter) and cast("Tensor", weight).is_floating_point()
