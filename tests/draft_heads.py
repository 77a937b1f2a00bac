"""Tiny EAGLE-3 heads with random weights, as they are published, and what they guess by plain torch.

write_eagle(directory, model, layers=(0, 1, 2))      the layout of SafeAILab's EAGLE
write_eagle(directory, model, speculators=True)      that of vLLM's `speculators`
EagleReference(directory, model).guess(prompt, output, 3)
"""

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from inlay.messages.prompt import Prompt, Tokens
from tests.deepseek import plain_r1
from tests.engine import reference
from tests.equality.reference import model_of
from tests.models import make
from tests.vision_models import vision

HEADS, SHARED = 4, 2
EPS = 1e-6
MTP = "model.layers.2."
"""Prefix of the names of the prediction layer's weights."""
QWEN_MTP, ATTENTION = "mtp.", "layers.2."
"""The same of Qwen's files, and of the weights of the layer of attention in its tiny models."""
INSIDE = "model.language_model."
"""Prefix of the names of the language model's weights in a model with images."""


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


class HeadReference(ABC):
    """A head that computes everything afresh, with no cache and no pages."""

    model: Path
    """Directory of the served model."""

    @torch.no_grad()
    def guess(self, prompt: Prompt, output: Sequence[int], count: int) -> list[int]:
        """The `count` tokens after a prompt and some output."""
        known = Prompt((*prompt.segments, Tokens(output))) if output else prompt
        embeds = reference.embedded(self.model, known)
        states = model_of(self.model)(inputs_embeds=embeds, output_hidden_states=True).hidden_states
        hidden = self.combine([each[0, :-1] for each in states])
        after = self.embedded(known)[1:]
        found: list[int] = []
        for _ in range(count):
            last = self.states(after, hidden)[-1]
            found.append(self.token(last))
            hidden = torch.cat((hidden, last[None]))
            after = torch.cat((after, self.embedded(Prompt.of(Tokens([found[-1]])))))
        return found

    def embedded(self, prompt: Prompt) -> Tensor:
        """[positions, C]."""
        return reference.embedded(self.model, prompt)[0]

    @abstractmethod
    def combine(self, states: Sequence[Tensor]) -> Tensor:
        """What it reads of the served model's states, [positions, C] of every layer."""

    @abstractmethod
    def states(self, after: Tensor, hidden: Tensor) -> Tensor:
        """Its states [positions, C]."""

    @abstractmethod
    def token(self, state: Tensor) -> int:
        """The likeliest token at a state [C]."""


class EagleReference(HeadReference):
    """An EAGLE-3 head."""

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

    def combine(self, states: Sequence[Tensor]) -> Tensor:
        return self._product("fc", torch.cat([states[layer] for layer in self.layers], -1))

    def token(self, state: Tensor) -> int:
        draft = int(self._product("lm_head", self._norm("norm", state)).argmax())
        return draft + int(self.weights["d2t"][draft]) if "d2t" in self.weights else draft

    def embedded(self, prompt: Prompt) -> Tensor:
        """As above, text by the head's own table if it has one."""
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

    def states(self, after: Tensor, hidden: Tensor) -> Tensor:
        normed = self._norm("hidden_norm", hidden)
        both = torch.cat((self._norm("input_layernorm", after), normed), -1)
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


def write_mtp(directory: Path) -> Path:
    """The tiny R1 in float32; what joins its prediction layer to the model is random."""
    shutil.copytree(plain_r1(), directory)
    file = directory / "model.safetensors"
    stored = load_file(file)
    generator = torch.Generator().manual_seed(3)
    size = stored["model.norm.weight"].shape[0]
    joint = torch.randn(size, 2 * size, generator=generator) / (2 * size) ** 0.5
    stored[f"{MTP}eh_proj.weight"] = joint
    for name in ("enorm", "hnorm", "shared_head.norm"):
        stored[f"{MTP}{name}.weight"] = 1 + 0.2 * torch.randn(size, generator=generator)
    save_file(stored, file, metadata={"format": "pt"})
    return directory


def write_qwen_mtp(directory: Path, family: str) -> Path:
    """A tiny Qwen with a prediction layer: a copy of its layer of attention, and random numbers."""
    return _with_qwen_mtp(make(family, directory), "model.")


def write_vision_mtp(directory: Path, family: str) -> Path:
    """The same of a tiny Qwen with images."""
    return _with_qwen_mtp(Path(shutil.copytree(vision(family), directory)), INSIDE)


def _with_qwen_mtp(directory: Path, inside: str) -> Path:
    file = directory / "model.safetensors"
    stored = load_file(file)
    generator = torch.Generator().manual_seed(3)
    size = stored[f"{inside}norm.weight"].shape[0]
    for name, tensor in list(stored.items()):
        if name.startswith(inside + ATTENTION):
            noise = torch.randn(tensor.shape, generator=generator)
            own = f"{QWEN_MTP}layers.0.{name.removeprefix(inside + ATTENTION)}"
            stored[own] = tensor + 0.3 * tensor.std() * noise
    joint = torch.randn(size, 2 * size, generator=generator) / (2 * size) ** 0.5
    stored[f"{QWEN_MTP}fc.weight"] = joint
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        # One is added to it.
        stored[f"{QWEN_MTP}{name}.weight"] = 0.2 * torch.randn(size, generator=generator)
    save_file(stored, file, metadata={"format": "pt"})
    return directory


class MtpReference(HeadReference):
    """A multi-token prediction layer: transformers' layer as a model of its own."""

    def __init__(self, model: Path, own: Path, *, qwen: bool = False) -> None:
        """Write the layer of `model`, one of Qwen or DeepSeek, as a model into `own`."""
        self.model = model
        stored = load_file(model / "model.safetensors")
        config = json.loads((model / "config.json").read_text())
        inside = INSIDE if "text_config" in config else "model."
        if "text_config" in config:
            config = config["text_config"] | {"architectures": None}
        place = f"{QWEN_MTP}layers.0." if qwen else MTP
        layer = {
            f"model.layers.0.{name.removeprefix(place)}": tensor
            for name, tensor in stored.items()
            if name.startswith(place)
        } | {"model.embed_tokens.weight": stored[f"{inside}embed_tokens.weight"]}
        if qwen:
            layer["model.norm.weight"] = stored[f"{QWEN_MTP}norm.weight"].clone()
            layer["lm_head.weight"] = stored["lm_head.weight"].clone()
            config |= {"layer_types": ["full_attention"], "mlp_only_layers": []}
            names = "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden"
        else:
            layer["model.norm.weight"] = stored[f"{MTP}shared_head.norm.weight"].clone()
            layer["lm_head.weight"] = stored[f"{MTP}shared_head.head.weight"].clone()
            config["first_k_dense_replace"] = 0
            names = "eh_proj", "enorm", "hnorm"
        own.mkdir()
        save_file(layer, own / "model.safetensors", metadata={"format": "pt"})
        (own / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
        self.layer = model_of(own)
        first = QWEN_MTP if qwen else MTP
        self.joint, *norms = (stored[f"{first}{name}.weight"] for name in names)
        self.norms = [norm + qwen for norm in norms]

    def combine(self, states: Sequence[Tensor]) -> Tensor:
        return states[-1]

    def states(self, after: Tensor, hidden: Tensor, positions: Tensor | None = None) -> Tensor:
        normed = [
            F.rms_norm(x, x.shape[-1:], norm, EPS)
            for x, norm in zip((after, hidden), self.norms, strict=True)
        ]
        joined = torch.cat(normed, -1) @ self.joint.T
        made = self.layer.model(inputs_embeds=joined[None], position_ids=positions)
        found: Tensor = made.last_hidden_state[0]
        return found

    def token(self, state: Tensor) -> int:
        return int(self.layer.lm_head(state).argmax())


class VisionMtpReference(MtpReference):
    """A multi-token prediction layer of a model whose prompts hold images.

    The model is transformers' of the whole, with `inputs_of` for what its processor makes of the
    token ids of a prompt and its output.
    """

    def __init__(self, model: Path, own: Path, inputs_of: Callable[[list[int]], Any]) -> None:
        """As `MtpReference`; `inputs_of` takes the output so far."""
        super().__init__(model, own, qwen=True)
        config = AutoConfig.from_pretrained(model)
        kind = getattr(transformers, config.architectures[0])
        self.whole = kind.from_pretrained(model, dtype=torch.float32).eval()
        self.inputs_of = inputs_of

    @torch.no_grad()
    def guess(self, prompt: Prompt, output: Sequence[int], count: int) -> list[int]:
        seen: dict[str, Any] = {}
        language = self.whole.model.language_model
        hook = language.register_forward_pre_hook(
            lambda _, __, given: seen.update(given), with_kwargs=True
        )
        try:
            states = self.whole.model(**self.inputs_of(list(output))).last_hidden_state[0]
        finally:
            hook.remove()
        hidden, after = states[:-1], seen["inputs_embeds"][0, 1:]
        positions = seen["position_ids"][-3:]
        found: list[int] = []
        for _ in range(count):
            last = self.states(after, hidden, positions[..., : len(hidden)])[-1]
            found.append(self.token(last))
            hidden = torch.cat((hidden, last[None]))
            after = torch.cat((after, language.embed_tokens(torch.tensor([found[-1]]))))
            positions = torch.cat((positions, positions[..., -1:] + 1), -1)
        return found


__all__ = [
    "EagleReference",
    "HeadReference",
    "MtpReference",
    "VisionMtpReference",
    "write_eagle",
    "write_mtp",
    "write_qwen_mtp",
    "write_vision_mtp",
]
