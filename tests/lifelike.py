"""Gives tiny random models the statistics of published weights.

Plain random weights hide faults: with norms near 1, small biases and no loud channel, most wrong
answers are within the rounding of bfloat16. Published weights have norms of up to 600, biases of
300, channels 40 times as loud as others, and attention that looks at few positions.

    lifelike(tiny_embedding("bert"))       a copy of the directory, in bfloat16
    text("gemma3_text", loud=True)         a family of `tests.model_configs`, with its published rope
    enliven(module, seed=1)                any module of transformers or diffusers, in place

The numbers are those measured in Qwen2.5-Coder-1.5B, Gemma 3 270M and all-MiniLM-L6-v2.
"""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import Tensor, nn

from tests.models import FAMILIES, make, models_root

_DOWN = ("down_proj", "fc2", "lin2", "linear_fc2", "mlp.Wo", "output.dense", "net.2")
"""Linears that end a feed-forward layer: of them, some channels are loud."""

_QUERY_KEY = ("q_proj", "k_proj", "query", "key", "q_lin", "k_lin", "to_q", "to_k")
_LATENT = ("q_b_proj", "kv_a_proj_with_mqa")
_JOINT = ("qkv_proj", "qkv", "Wqkv", "query_key_value")
"""Products of queries, keys and values, in this order."""

_WIDE = 192
"""Hidden size of text models: enough channels for two to be loud, and for rounding to average."""

_QWEN_ROPE = {"rope_type": "default", "rope_theta": 1e6}
_HALF = {"partial_rotary_factor": 0.5}
_YARN = {"rope_type": "yarn", "beta_fast": 32.0, "original_max_position_embeddings": 4096}
_DEEPSEEK_ROPE = {**_YARN, "rope_theta": 1e4, "factor": 40.0, "beta_slow": 1.0}

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

PUBLISHED_ROPES: dict[str, dict[str, Any]] = {
    "llama3": _LLAMA3_ROPE,
    "llama4_text": {**_LLAMA3_ROPE, "factor": 16.0, "high_freq_factor": 1.0},
    "mixtral": _QWEN_ROPE,
    "qwen2": _QWEN_ROPE,
    "qwen2_moe": _QWEN_ROPE,
    "qwen3": _QWEN_ROPE,
    "qwen3_moe": {"rope_type": "default", "rope_theta": 1e7},
    "qwen3_next": {"rope_type": "default", "rope_theta": 1e7, **_HALF},
    "gemma3_text": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    "deepseek_v2": {**_DEEPSEEK_ROPE, "mscale": 0.707, "mscale_all_dim": 0.707},
    "deepseek_v3": {**_DEEPSEEK_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0},
    "gpt_oss": {
        **_YARN, "rope_theta": 150000.0, "factor": 32.0, "beta_slow": 1.0, "truncate": False
    },
}  # fmt: skip
"""Rotary embeddings as published; other families have theirs in `tests.model_configs` already."""

LOUD = ("gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families of which `loud` changes the norms."""

_PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 10.0, "final_logit_softcapping": 30.0},
    "gemma4_text": {"final_logit_softcapping": 30.0},
}
"""Fields that the tiny models have so small that most logits are the same."""


@cache
def text(family: str, seed: int = 0, *, loud: bool = False, **options: Any) -> Path:
    """The directory of a lifelike model of a family that generates text; treat it as read-only.

    `options` are fields of its configuration.
    """
    if family not in FAMILIES:
        raise ValueError(f"{family} is none of {', '.join(FAMILIES)}")
    sizes: dict[str, Any] = {
        "hidden_size": _WIDE,
        "intermediate_size": 2 * _WIDE,
        "max_position_embeddings": 32768,
    }
    if family in PUBLISHED_ROPES:
        sizes["rope_parameters"] = PUBLISHED_ROPES[family]
    sizes |= _PUBLISHED.get(family, {})
    plain = _new_directory(family)
    make(family, plain, **(sizes | options))
    found = lifelike(plain, seed, loud=loud)
    shutil.rmtree(plain)
    return found


@cache
def lifelike(directory: Path, seed: int = 0, *, loud: bool = False) -> Path:
    """A copy of a model's directory with lifelike weights in bfloat16; treat it as read-only."""
    config = json.loads((directory / "config.json").read_text())
    (architecture,) = config["architectures"]
    kind = getattr(transformers, architecture)
    model = kind.from_pretrained(directory, dtype=torch.float32)
    # A vocoder is float32, and its sound would be clipped.
    parts = [model.thinker, model.talker] if hasattr(model, "token2wav") else [model]
    for part in parts:
        enliven(part, seed, loud=loud)
    copy = _new_directory(directory.name)
    shutil.copytree(directory, copy)
    # Not buffers: published biases of routers are float32.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    model.save_pretrained(copy)
    # As it was, with fields that transformers does not know.
    (copy / "config.json").write_text(
        json.dumps({**config, "dtype": "bfloat16"}).replace('"float32"', '"bfloat16"')
    )
    return copy


def pipeline(directory: Path, seed: int = 0) -> Path:
    """A copy of a diffusers pipeline with lifelike weights in bfloat16."""
    kind = json.loads((directory / "model_index.json").read_text())["_class_name"]
    copy = _new_directory(kind)
    made: Any = getattr(diffusers, kind).from_pretrained(directory, dtype=torch.float32)
    for part in made.components.values():
        if isinstance(part, nn.Module):
            enliven(part, seed)
    made.to(torch.bfloat16).save_pretrained(copy)
    return copy


def _new_directory(name: str) -> Path:
    root = models_root() / "lifelike"
    root.mkdir(exist_ok=True)
    return root / f"{name}-{len(list(root.iterdir()))}"


@torch.no_grad()
def enliven(model: nn.Module, seed: int = 0, *, loud: bool = False) -> None:
    """Draw the norms, linears, experts, routers, biases and embeddings of `model` anew.

    Other parameters (convolutions, states' decays, tables of positions) are left as they are.

    Args:
        model: in float32.
        seed: of all draws.
        loud: norms as in Gemma 3, of up to 600, where the family's norms add 1 to their weights;
            of BERT-like models one input of each activation is 10 times as large as others.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20261128 + seed)
        first_key_bias = True
        paths = [path for path, _ in model.named_modules()]
        head_norms = any(_is_head_norm(path) for path in paths)
        gemma = any("pre_feedforward" in path for path in paths)
        for path, module in model.named_modules():
            kind, weight = type(module).__name__, getattr(module, "weight", None)
            if "Norm" in kind and isinstance(weight, Tensor) and weight.ndim == 1:
                after = "post_feedforward" in path or (gemma and "post_attention" in path)
                _draw_norm(path, module, loud and (head_norms or after), 600.0 if after else 150.0)
                if _is_head_norm(path):
                    _draw_head_norm(module, model.get_submodule(path.rpartition(".")[0]))
            elif "Experts" in kind:
                _draw_experts(module)
            elif isinstance(module, nn.Embedding):
                _draw_embedding(path, module)
            elif "Router" in kind and isinstance(weight, Tensor):
                weight.copy_(_normal(weight, 2.0))
            elif isinstance(module, nn.Linear) and module.weight.ndim == 2:
                _draw_linear(path, module, head_norms)
                if loud and path.endswith(("intermediate.dense", "lin1", "mlp.Wi")):
                    module.weight[len(module.weight) // 2] *= 10
                if module.bias is not None:
                    module.bias.normal_(0, 0.3)
                    if path.endswith(("k_proj", "key", "k_lin", "to_k")):
                        # Scores in bfloat16 and float16 break where such a bias is.
                        module.bias[:2] = 300.0 if first_key_bias else 8.0
                        first_key_bias = False
            if isinstance(sinks := getattr(module, "sinks", None), Tensor):
                sinks.normal_(1, 1)
            bias = getattr(module, "e_score_correction_bias", None)
            if isinstance(bias, Tensor):
                bias.normal_(0, 0.5)
        if isinstance(model, transformers.PreTrainedModel):
            model.tie_weights()


def adds_one(norm: nn.Module) -> bool:
    """A norm multiplies by one plus its weight: with a weight of 0 its output is not 0."""
    weight: Any = norm.weight
    kept = weight.detach().clone()
    weight.zero_()
    inputs = (torch.ones_like(weight)[None],) * (2 if type(norm).__name__.endswith("Gated") else 1)
    found: Tensor = norm(*inputs)
    weight.copy_(kept)
    return bool(found.any())


def _is_head_norm(path: str) -> bool:
    return path.endswith(("q_norm", "k_norm", "norm_q", "norm_k"))


def _draw_norm(path: str, norm: Any, loud: bool, largest: float) -> None:
    weight = norm.weight
    drawn = torch.rand_like(weight)
    channels = torch.randperm(len(weight))[:2]
    if "RMSNorm" not in type(norm).__name__ or isinstance(norm, nn.GroupNorm):
        weight.copy_(0.5 + 0.3 * drawn)
        weight[channels] *= 2
        if getattr(norm, "bias", None) is not None:
            norm.bias.normal_(0, 0.3)
            norm.bias[channels] = 1.6
    elif adds_one(norm):
        weight.copy_(30 + 30 * drawn if loud else 1 + 2 * drawn)
        weight[channels] = largest if loud else 150.0
    else:
        weight.copy_(0.6 + 0.8 * drawn)
        weight[channels] *= 3
        if path.endswith("model.norm"):
            weight.mul_(4.6)


def _draw_head_norm(norm: Any, attention: Any) -> None:
    """Norms of queries and keys take the place of their gains: scores spread by 3 to 4."""
    size = len(norm.weight)
    scaling = float(getattr(attention, "scaling", size**-0.5))
    factors = (0.75 + 0.5 * torch.rand_like(norm.weight)) * (3.5 / (size**0.5 * scaling)) ** 0.5
    norm.weight.copy_(factors - (1 if adds_one(norm) else 0))


def _draw_linear(path: str, linear: nn.Linear, head_norms: bool) -> None:
    weight = linear.weight
    if path.endswith(("router.proj", "shared_expert_gate")):
        weight.copy_(_normal(weight, 2.0))
        return
    weight.copy_(_normal(weight, 2.0 if path.endswith("lm_head") else 0.7))
    if path.endswith(_LATENT) or (path.endswith(_QUERY_KEY) and not head_norms):
        # Scores spread by 2 to 4: where they are flat, positions and heads hardly count.
        weight.mul_(2)
    elif path.endswith(_JOINT) and not head_norms:
        own = linear.in_features
        weight[: min(2 * own, len(weight) - own) if len(weight) == 3 * own else own].mul_(2)
    if path.endswith(_DOWN):
        _make_loud(weight)


def _draw_experts(module: Any) -> None:
    across = type(module).__name__.startswith(("GptOss", "Llama4"))  # [experts, in, out]
    for name, parameter in module.named_parameters(recurse=False):
        if name.endswith("bias"):
            parameter.normal_(0, 0.3)
        else:
            inputs = parameter.shape[1 if across else 2]
            parameter.normal_(0, 0.7 / inputs**0.5)
            if "down" in name:
                for expert in parameter:
                    _make_loud(expert.T if across else expert)


def _make_loud(weight: Tensor) -> None:
    """Give a weight [out, in] a loud output, a loud input, and both at once a massive one."""
    weight[len(weight) // 3] *= 8
    weight[:, weight.shape[1] // 5] *= 40 / 7


def _draw_embedding(path: str, table: nn.Embedding) -> None:
    if "position" in path or "type" in path:
        return
    if "relative" in path:
        # What a score has besides, as all-mpnet-base-v2's.
        table.weight.normal_(0, 2)
        return
    table.weight.normal_(0, 0.05)
    table.weight[:, table.embedding_dim // 3] *= 20
    if table.padding_idx is not None and table.padding_idx < len(table.weight):
        table.weight[table.padding_idx] = 0


def _normal(weight: Tensor, gain: float) -> Tensor:
    drawn: Tensor = torch.randn_like(weight) * (gain / weight.shape[-1] ** 0.5)
    return drawn
