"""Division of transformers models into body, head and tower, before and after loading."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import MoeModelOutputWithPast

from inlay.engine.torch.weights.linear_methods import LinearMethod
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


class _HeadRows(nn.Module):
    """Product with some rows of a head, in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._weight, self._bias = weight.float(), None if bias is None else bias.float()

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x.float(), self._weight, self._bias)


_RowsOf: TypeAlias = Callable[[Tensor], Tensor | None]


class NamedHead:
    """Head of a model for some ids alone, in float32 whatever the model's dtype."""

    def __init__(self, model: Any, name: str, rows: _RowsOf, bias: Tensor | None) -> None:
        """Use `of`."""
        self._head = head_of(model)
        self._name, self._rows, self._bias = name, rows, bias

    @classmethod
    def of(cls, model: Any) -> "NamedHead | None":
        """Return the head of `model`; None where its rows are not there as plain numbers.

        They are those of the embedding table where both are tied. A head has none that is
        quantised, divided over ranks, or packed in a layout that is not known.
        """
        # `get_output_embeddings` of a model that was split looks for the body it had.
        output, table = getattr(model, "lm_head", None), model.base_model.get_input_embeddings()
        name = next((name for name, child in model.named_children() if child is output), None)
        config = model.config.get_text_config()
        rows = _rows_of(output, config.vocab_size)
        if rows is None and config.tie_word_embeddings:
            rows = _rows_of(table, config.vocab_size)
        if name is None or rows is None:
            return None
        return cls(model, name, rows, getattr(output, "bias", None))

    def logits(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Compute the logits of some ids, with all steps of the family.

        Args:
            hidden: [N, C].
            ids: [K] int64.

        Returns:
            [N, K] float32.
        """
        with torch.inference_mode():
            weight, bias = self._rows(ids), None if self._bias is None else self._bias[ids]
            assert weight is not None, "`of` has found rows"
            head = copy.copy(self._head)
            head._modules = {**head._modules, self._name: _HeadRows(weight, bias)}
            logits: Tensor = head(inputs_embeds=hidden.float()[None]).logits[0]
        return logits.float()


def _rows_of(module: Any, count: int) -> _RowsOf | None:
    """Return what gives rows of a module's weight; None if it cannot, or has less than `count`."""
    if isinstance(module, LinearMethod):
        none = torch.empty(0, dtype=torch.long)
        return None if module.rows(none) is None else module.rows
    weight = getattr(module, "weight", None)
    if type(weight) not in (Tensor, nn.Parameter):
        return None
    rows = cast("Tensor", weight)
    return rows.__getitem__ if rows.is_floating_point() and len(rows) >= count else None
