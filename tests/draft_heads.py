"""Tiny EAGLE-3 heads with random weights, as they are published, and what they guess by plain torch.

write_eagle(directory, model, layers=(0, 1, 2))      the layout of SafeAILab's EAGLE
write_eagle(directory, model, speculators=True)      that of vLLM's `speculators`
EagleReference(directory, model).guess(prompt, output, 3)
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from inlay.prompt import Prompt, Tokens
from tests.engine import reference
from tests.equality.reference import model_of

HEADS, SHARED = 4, 2
EPS = 1e-6


def write_eagle(
    directory: Path,
    model: Path,
    *,
    layers: Sequence[int] | None = (0, 1, 2),
    tokens: Sequence[int] | None = None,
    own_table: bool = False,
    speculators: bool = False,
    seed: int = 7,
    **changes: Any,
) -> Path:
    """A head for the model in a directory.

    Args:
        directory: made if it does not exist.
        model: directory of the served model.
        layers: hidden states that it reads; the reference implementation's if None.
        tokens: its vocabulary, rising; all of the model's, without maps, if None.
        own_table: whether the file has an embedding table of its own.
        speculators: the layout of `speculators`, in which the normed state is the residual.
        seed: of its weights.
        changes: fields of its configuration.
    """
    served = AutoConfig.from_pretrained(model).get_text_config()
    size, inner, vocabulary = served.hidden_size, 80, served.vocab_size
    draft = vocabulary if tokens is None else len(tokens)
    width = size // HEADS
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).mul_(1.5 / shape[-1] ** 0.5)

    def norm() -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    place = "layers.0" if speculators else "midlayer"
    weights = {
        "fc.weight": drawn(size, size * (3 if layers is None else len(layers))),
        "norm.weight": norm(),
        "lm_head.weight": drawn(draft, size),
        f"{place}.hidden_norm.weight": norm(),
        f"{place}.input_layernorm.weight": norm(),
        f"{place}.post_attention_layernorm.weight": norm(),
        f"{place}.self_attn.q_proj.weight": drawn(HEADS * width, 2 * size),
        f"{place}.self_attn.k_proj.weight": drawn(SHARED * width, 2 * size),
        f"{place}.self_attn.v_proj.weight": drawn(SHARED * width, 2 * size),
        f"{place}.self_attn.o_proj.weight": drawn(size, HEADS * width),
        f"{place}.mlp.gate_proj.weight": drawn(inner, size),
        f"{place}.mlp.up_proj.weight": drawn(inner, size),
        f"{place}.mlp.down_proj.weight": drawn(size, inner),
    }
    if own_table:
        weights["embed_tokens.weight"] = 0.5 * torch.randn(vocabulary, size, generator=generator)
    if tokens is not None:
        ids = torch.tensor(tokens)
        weights["d2t"] = ids - torch.arange(draft)
        weights["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, ids, True)
    layer = {
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": SHARED,
        "max_position_embeddings": 512,
        "rms_norm_eps": EPS,
        "vocab_size": vocabulary,
        "rope_theta": 10000.0,
    }
    config: dict[str, Any] = {"draft_vocab_size": draft}
    if layers is not None:
        config["eagle_aux_hidden_state_layer_ids"] = list(layers)
    if speculators:
        config |= {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "norm_before_residual": True,
            "transformer_layer_config": layer,
        }
    else:
        config |= {"architectures": ["LlamaForCausalLMEagle3"], **layer}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config | changes))
    return directory


class EagleReference:
    """A head that computes everything afresh, with no cache and no pages."""

    def __init__(self, directory: Path, model: Path) -> None:
        """Read the head in `directory` for the model in another."""
        self.model = model
        config = json.loads((directory / "config.json").read_text())
        stored = load_file(directory / "model.safetensors")
        self.weights = {
            name.removeprefix("midlayer.").removeprefix("layers.0."): tensor
            for name, tensor in stored.items()
        }
        self.normed = config.get("norm_before_residual", False)
        layer = LlamaConfig(**config.get("transformer_layer_config", config))
        self.rotary = LlamaRotaryEmbedding(layer)
        count = AutoConfig.from_pretrained(model).get_text_config().num_hidden_layers
        default = [2, count // 2, count - 3]
        self.layers = config.get("eagle_aux_hidden_state_layer_ids", default)

    @torch.no_grad()
    def guess(self, prompt: Prompt, output: Sequence[int], count: int) -> list[int]:
        """The `count` tokens after a prompt and some output."""
        known = Prompt((*prompt.segments, Tokens(output))) if output else prompt
        embeds = reference.embedded(self.model, known)
        states = model_of(self.model)(inputs_embeds=embeds, output_hidden_states=True).hidden_states
        read = torch.cat([states[layer][0] for layer in self.layers], -1)[:-1]
        hidden = read @ self.weights["fc.weight"].T
        after = self._embedded(known)[1:]
        found: list[int] = []
        for _ in range(count):
            last = self._layer(after, hidden)[-1]
            logits = self._norm("norm", last) @ self.weights["lm_head.weight"].T
            draft = int(logits.argmax())
            found.append(
                draft + int(self.weights["d2t"][draft]) if "d2t" in self.weights else draft
            )
            hidden = torch.cat((hidden, last[None]))
            after = torch.cat((after, self._embedded(Prompt.of(Tokens([found[-1]])))))
        return found

    def _embedded(self, prompt: Prompt) -> Tensor:
        """[positions, C], text by the head's own table if it has one."""
        table = self.weights.get("embed_tokens.weight")
        return torch.cat(
            [
                table[list(segment.ids)]
                if table is not None and isinstance(segment, Tokens)
                else reference.embedded(self.model, Prompt.of(segment))[0]
                for segment in prompt.segments
            ]
        )

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], EPS)

    def _product(self, name: str, x: Tensor) -> Tensor:
        found: Tensor = x @ self.weights[f"{name}.weight"].T
        return found

    def _layer(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        normed = self._norm("hidden_norm", hidden)
        both = torch.cat((self._norm("input_layernorm", embeds), normed), -1)
        query, key, value = (
            self._product(f"self_attn.{name}_proj", both)
            .view(1, len(both), heads, -1)
            .transpose(1, 2)
            for name, heads in (("q", HEADS), ("k", SHARED), ("v", SHARED))
        )
        cos, sin = self.rotary(both, torch.arange(len(both))[None])
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        residual = normed if self.normed else hidden
        residual = residual + self._product("self_attn.o_proj", seen[0].transpose(0, 1).flatten(1))
        x = self._norm("post_attention_layernorm", residual)
        inner = F.silu(self._product("mlp.gate_proj", x)) * self._product("mlp.up_proj", x)
        return residual + self._product("mlp.down_proj", inner)


__all__ = ["EagleReference", "write_eagle"]
