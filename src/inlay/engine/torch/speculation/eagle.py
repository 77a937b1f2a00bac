"""EAGLE-3 heads, as SafeAILab's EAGLE, vLLM's `speculators` and others publish them.

A head is one Llama layer whose queries, keys and values are products of two normed vectors: the
embedding of the next position and the served model's states of three of its layers, which `fc` has
made one of. Its vocabulary may be a part of the served model's: token i is `i + d2t[i]` there.
Reference: `eagle/model/cnets.py` of SafeAILab/EAGLE, and vLLM's `llama_eagle3.py`.

Shapes: T positions, C hidden size, V tokens of the head.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Run
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from inlay.engine.torch.attention.paged import IMPLEMENTATION, PagedAttention
from inlay.engine.torch.attention.shape import LayerShape
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.speculation.draft_head import check_served, refusal
from inlay.engine.torch.weights.families import check_positions
from inlay.engine.torch.weights.linear import accelerate
from inlay.tensors.checkpoint import config_of, stored_tensors

METHOD = "eagle3"

_SERVED = ("gpt_oss", "llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Types of models that heads are published for."""

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

_UNSUPPORTED = ("norm_before_fc", "fc_norm", "norm_output", "parallel_drafting")
"""Variants of vLLM's that are refused if they are set."""


class EagleHead(nn.Module):
    """A `DraftHead`; use `load_eagle`. Names of its parts are those in the files."""

    def __init__(self, config: LlamaConfig, layers: tuple[int, ...], draft_vocab_size: int) -> None:
        """Build it without weights; all that a file may lack is None.

        Args:
            config: of its layer.
            layers: numbers of the served model's hidden states that it reads.
            draft_vocab_size: V.
        """
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.layers = layers
        self.fc = nn.Linear(size * len(layers), size, bias=False)
        self.input_layernorm = LlamaRMSNorm(size, eps)
        self.hidden_norm = LlamaRMSNorm(size, eps)
        self.self_attn = LlamaAttention(config, 0)
        for name in _FUSED[0]:
            width = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * size, width, bias=config.attention_bias))
        self.post_attention_layernorm = LlamaRMSNorm(size, eps)
        self.mlp = LlamaMLP(config)
        self.norm = LlamaRMSNorm(size, eps)
        self.lm_head = nn.Linear(size, draft_vocab_size, bias=False)
        self.embed_tokens: nn.Embedding | None = None
        self.rotary: nn.Module | None = None
        self.target_ids: Tensor | None = None
        self._residual_is_normed = bool(getattr(config, "norm_before_residual", False))
        heads, width = config.num_key_value_heads, self.self_attn.head_dim
        self.shape = LayerShape(None, heads, width, width)

    @property
    def table(self) -> nn.Module | None:
        """As in `DraftHead`."""
        return self.embed_tokens

    def combine(self, states: Run[Tensor]) -> Tensor:
        """As in `DraftHead`."""
        combined: Tensor = self.fc(torch.cat(list(states), -1))
        return combined

    def advance(
        self, embeds: Tensor, states: Tensor, positions: Tensor, paged: PagedAttention
    ) -> Tensor:
        """As in `DraftHead`."""
        normed = self.hidden_norm(states)
        residual = normed if self._residual_is_normed else states
        both = torch.cat((self.input_layernorm(embeds), normed), -1)
        angles = None if self.rotary is None else self.rotary(states, positions[None])
        seen, _ = self.self_attn(both[None], angles, None, paged=paged)
        residual = residual + seen[0]
        found: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return found

    def likeliest(self, states: Tensor) -> Tensor:
        """As in `DraftHead`."""
        ids: Tensor = self.lm_head(self.norm(states)).argmax(-1)
        return ids if self.target_ids is None else self.target_ids[ids]


def load_eagle(directory: Path, model: CausalModel) -> EagleHead:
    """Load the head in `directory` for `model`.

    Raises:
        InvalidRequestError: it cannot be read, is of another kind, or does not go with `model`.
    """
    check_served(model, METHOD)
    served = config_of(Path(model.path)).get("model_type")
    if served not in _SERVED:
        raise refusal(
            METHOD, f"models of type {served!r} have no such heads; allowed: {', '.join(_SERVED)}"
        )
    raw = config_of(directory)
    config = _layer_config(raw)
    if config.hidden_size != model.hidden_size:
        raise refusal(
            METHOD,
            f"the head's hidden size is {config.hidden_size}, the model's {model.hidden_size}",
        )
    tensors = _read(directory)
    draft_vocab_size = len(_wanted(tensors, "lm_head.weight"))
    layers = _layers_read(raw, len(model.decoder_layers))
    target_ids = _target_ids(tensors, draft_vocab_size, model.vocab_size)
    table = tensors.pop("embed_tokens.weight", None)
    with torch.device("meta"):
        head = EagleHead(config, layers, draft_vocab_size)
    _assign(head, tensors)
    if table is not None:
        if table.shape != (model.vocab_size, model.hidden_size):
            raise refusal(
                METHOD,
                f"embed_tokens.weight is {tuple(table.shape)}; the model has {model.vocab_size} "
                f"tokens of {model.hidden_size} elements",
            )
        head.embed_tokens = nn.Embedding(*table.shape, _weight=table)
    head.rotary = LlamaRotaryEmbedding(config)
    head.requires_grad_(False).eval().to(model.device, model.dtype)
    if target_ids is not None:
        head.target_ids = target_ids.to(model.device)
    accelerate(head, _FUSED)
    return head


def _layer_config(raw: Mapping[str, Any]) -> LlamaConfig:
    """Return the configuration of the head's layer from its `config.json`, of either layout.

    Raises:
        InvalidRequestError: it is of another kind.
    """
    kind = raw.get("speculators_model_type", METHOD)
    nested = raw.get("eagle_config") or {}
    asked = [name for name in _UNSUPPORTED if raw.get(name) or nested.get(name)]
    if kind != METHOD or asked or nested.get("use_aux_hidden_state") is False:
        named = ", ".join(asked) or f"{kind} with {nested}"
        raise refusal(METHOD, f"the head is of another variant ({named})")
    layer = dict(raw.get("transformer_layer_config") or raw)
    if layer.get("model_type", "llama") != "llama" or layer.get("num_hidden_layers", 1) != 1:
        raise refusal(
            METHOD,
            f"the head has {layer.get('num_hidden_layers', 1)} layers of type "
            f"{layer.get('model_type')!r}; one of type 'llama' is supported",
        )
    # A head of `speculators` that does not say it has the normed state as residual.
    default = "speculators_model_type" in raw
    normed = raw.get("norm_before_residual", default)
    config = LlamaConfig(**{**layer, "norm_before_residual": normed})
    config._attn_implementation = IMPLEMENTATION
    check_positions(config, config.max_position_embeddings)
    return config


def _layers_read(raw: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """Return the numbers of the hidden states that a head reads of a model of `count` layers."""
    nested = raw.get("eagle_config") or {}
    name = "eagle_aux_hidden_state_layer_ids"
    layers = raw.get(name) or nested.get(name) or (2, count // 2, count - 3)
    if not all(isinstance(each, int) and 0 <= each <= count for each in layers):
        raise refusal(METHOD, f"the head reads layers {list(layers)} of a model that has {count}")
    return tuple(layers)


def _read(directory: Path) -> dict[str, Tensor]:
    """Return the weights under the names that they have in `EagleHead`."""
    found: dict[str, Tensor] = {}
    for file in {tensor.file for tensor in stored_tensors(directory)}:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                own = name.removeprefix("model.").removeprefix("layers.0.")
                found[own.removeprefix("midlayer.")] = opened.get_tensor(name)
    return found


def _wanted(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise refusal(METHOD, f"the head lacks {name}")
    return tensors[name]


def _target_ids(tensors: dict[str, Tensor], draft: int, served: int) -> Tensor | None:
    """Take the maps of tokens out of `tensors`; return the served model's ids int64 [V].

    None if they are the head's own. Raises `InvalidRequestError` if they are of another vocabulary.
    """
    offsets, mask = tensors.pop("d2t", None), tensors.pop("t2d", None)
    ids = torch.arange(draft) if offsets is None else torch.arange(draft) + offsets.long()
    if mask is not None and len(mask) != served:
        raise refusal(METHOD, f"the head is for {len(mask)} tokens; the model has {served}")
    outside = int(ids.min()) < 0 or int(ids.max()) >= served
    if len(offsets if offsets is not None else ids) != draft or outside:
        raise refusal(
            METHOD, f"the head's {draft} tokens are not all among the {served} of the model"
        )
    if offsets is None and draft != served:
        raise refusal(
            METHOD, f"the head has {draft} tokens, the model {served}, and d2t is missing"
        )
    return None if offsets is None else ids


def _assign(head: EagleHead, tensors: Mapping[str, Tensor]) -> None:
    """Put weights in their places; what is beside them is left out.

    Raises:
        InvalidRequestError: some are missing or of another shape.
    """
    own = head.state_dict()
    for name, place in own.items():
        shape = _wanted(tensors, name).shape
        if shape != place.shape:
            raise refusal(
                METHOD, f"{name} is {tuple(shape)}; {tuple(place.shape)} goes with the model"
            )
    head.load_state_dict({name: tensors[name] for name in own}, assign=True)
