"""The architectures of models in GGUF files that are read: ggml's names and keys to transformers'.

What is in no file (layers with windows, scales, how experts are weighed) stands in llama.cpp's
`llama-model.cpp`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np

from inlay.base.errors import InvalidRequestError
from inlay.tensors.gguf import GgufFile
from inlay.tensors.tensor import quoted

_GEMMA3_LOCAL_THETA = 10000.0
_GEMMA3_PATTERN = 6
"""Every sixth layer of Gemma 3 sees everything."""
_GPT_OSS_PATTERN = 2
_GEMMA3_27B_LAYERS = 62
_WINDOWED = "sliding_attention"

_MAX_EXPERTS = 1024
"""Of a layer: each is a matrix of its own, and a file may say any number of them."""

_ATTENTION = {
    "attn_norm.weight": ("input_layernorm.weight", "H"),
    "attn_q.weight": ("self_attn.q_proj.weight", "QH"),
    "attn_k.weight": ("self_attn.k_proj.weight", "KH"),
    "attn_v.weight": ("self_attn.v_proj.weight", "KH"),
    "attn_output.weight": ("self_attn.o_proj.weight", "HQ"),
    "ffn_norm.weight": ("post_attention_layernorm.weight", "H"),
}
_LAYER = _ATTENTION | {
    "ffn_gate.weight": ("mlp.gate_proj.weight", "IH"),
    "ffn_up.weight": ("mlp.up_proj.weight", "IH"),
    "ffn_down.weight": ("mlp.down_proj.weight", "HI"),
}
_QKV_BIAS = {
    "attn_q.bias": ("self_attn.q_proj.bias", "Q"),
    "attn_k.bias": ("self_attn.k_proj.bias", "K"),
    "attn_v.bias": ("self_attn.v_proj.bias", "K"),
}
_OUTPUT_BIAS = {"attn_output.bias": ("self_attn.o_proj.bias", "H")}
_SINKS = {"attn_sinks.weight": ("self_attn.sinks", "A")}
_QK_NORM = {
    "attn_q_norm.weight": ("self_attn.q_norm.weight", "D"),
    "attn_k_norm.weight": ("self_attn.k_norm.weight", "D"),
}
_EXPERTS = {
    "ffn_gate_inp.weight": ("mlp.gate.weight", "EH"),
    "ffn_gate_exps.weight": ("mlp.experts.{}.gate_proj.weight", "EFH"),
    "ffn_up_exps.weight": ("mlp.experts.{}.up_proj.weight", "EFH"),
    "ffn_down_exps.weight": ("mlp.experts.{}.down_proj.weight", "EHF"),
}
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp.weight": ("block_sparse_moe.gate.weight", "EH"),
    "ffn_gate_exps.weight": ("block_sparse_moe.experts.{}.w1.weight", "EIH"),
    "ffn_up_exps.weight": ("block_sparse_moe.experts.{}.w3.weight", "EIH"),
    "ffn_down_exps.weight": ("block_sparse_moe.experts.{}.w2.weight", "EHI"),
}
_GPT_OSS_EXPERTS = {
    "ffn_gate_inp.weight": ("mlp.router.weight", "EH"),
    "ffn_gate_inp.bias": ("mlp.router.bias", "E"),
    "ffn_gate_exps.weight": ("mlp.experts.{}.gate_proj.weight", "EIH"),
    "ffn_up_exps.weight": ("mlp.experts.{}.up_proj.weight", "EIH"),
    "ffn_down_exps.weight": ("mlp.experts.{}.down_proj.weight", "EHI"),
    "ffn_gate_exps.bias": ("mlp.experts.{}.gate_proj.bias", "EI"),
    "ffn_up_exps.bias": ("mlp.experts.{}.up_proj.bias", "EI"),
    "ffn_down_exps.bias": ("mlp.experts.{}.down_proj.bias", "EH"),
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp.weight": ("mlp.shared_expert_gate.weight", "1H"),
    "ffn_gate_shexp.weight": ("mlp.shared_expert.gate_proj.weight", "SH"),
    "ffn_up_shexp.weight": ("mlp.shared_expert.up_proj.weight", "SH"),
    "ffn_down_shexp.weight": ("mlp.shared_expert.down_proj.weight", "HS"),
}
_SECOND_NORM = {"post_attention_norm.weight": ("post_attention_layernorm.weight", "H")}
_FOUR_NORMS = {
    **_SECOND_NORM,
    "ffn_norm.weight": ("pre_feedforward_layernorm.weight", "H"),
    "post_ffw_norm.weight": ("post_feedforward_layernorm.weight", "H"),
}

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A `general.architecture`.

    Attributes:
        model_type: transformers' name.
        model_class: transformers' class of it.
        layer: of each tensor of a layer, the model's name and what its sizes are. A name with {}
            is that of one expert's matrix; those of all stand one after another.
        biases: tensors of a layer that all or no layers have.
        keys: that it has beside those of all.
        own: fields of the configuration that no other has.
        paired_heads: rows of queries and keys are permuted, and are to be in halves.
        shifted_norms: norms are stored as 1 + w.
        by_turns: gates and ups of experts are by turns in one parameter, whose inputs come first.
    """

    model_type: str
    model_class: str
    layer: Mapping[str, tuple[str, str]]
    own: "Callable[[GgufKeys, Fields], Fields]"
    biases: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    keys: frozenset[str] = frozenset()
    paired_heads: bool = False
    shifted_norms: bool = False
    by_turns: bool = False


class GgufKeys:
    """The metadata under an architecture's name."""

    def __init__(self, file: GgufFile, prefix: str) -> None:
        self.file = file
        self._prefix = f"{prefix}."
        self.names = {
            key.removeprefix(self._prefix) for key in file.metadata if key.startswith(self._prefix)
        }

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """A value; of a list of equal values, one for each layer, that value.

        Raises `InvalidRequestError` if there is none and no `default`, or it is of another type.
        """
        key = self._prefix + name
        value = self.file.metadata.get(key, default)
        if isinstance(value, list) and len({str(item) for item in value}) == 1:
            value = value[0]
        if isinstance(value, list):
            raise self.refused(f"{key} differs from layer to layer, which is not read")
        if value is None:
            raise self.refused(f"it does not say {key}")
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.refused(f"{key} is {quoted(str(value))}, not {kind.__name__}")
        if isinstance(value, float) and not 0 < value < inf:
            raise self.refused(f"{key} is {value}")
        if isinstance(value, float):
            # What was 1e-6 in double precision is that again, not 9.99999997e-07.
            return float(str(np.float32(value)))
        if isinstance(value, int) and not 0 < value < 1 << 32:
            raise self.refused(f"{key} is {value}")
        return value

    def refused(self, why: str) -> InvalidRequestError:
        """The error for a file that cannot be served, and why."""
        return InvalidRequestError(f"{self.file.path} cannot be served: {why}", param="model")


def _plain(keys: GgufKeys, config: Fields) -> Fields:
    return {"hidden_act": "silu"}


def _llama(keys: GgufKeys, config: Fields) -> Fields:
    has = "blk.0.attn_q.bias" in keys.file.tensors
    return {"hidden_act": "silu", "attention_bias": has, "mlp_bias": False}


def _gemma3(keys: GgufKeys, config: Fields) -> Fields:
    layers, rope = config["num_hidden_layers"], config["rope_parameters"]
    heads = config["hidden_size"] // config["num_attention_heads"]
    found: Fields = {
        "hidden_activation": "gelu_pytorch_tanh",
        **_windows(keys, layers, _GEMMA3_PATTERN),
        "rope_parameters": {
            "full_attention": rope,
            _WINDOWED: {"rope_type": "default", "rope_theta": _GEMMA3_LOCAL_THETA},
        },
        # That of 27B is not the size of its heads.
        "query_pre_attn_scalar": heads if layers == _GEMMA3_27B_LAYERS else config["head_dim"],
    }
    if "final_logit_softcapping" in keys.names:
        found["final_logit_softcapping"] = keys.get("final_logit_softcapping", float)
    return found


def _windows(keys: GgufKeys, layers: int, every: int) -> Fields:
    """Return the window, and which layers have it: all but every so many, unless a file says."""
    pattern = keys.get("attention.sliding_window_pattern", int, every)
    return {
        "sliding_window": keys.get("attention.sliding_window", int),
        "layer_types": [
            _WINDOWED if (index + 1) % pattern else "full_attention" for index in range(layers)
        ],
    }


def _experts(keys: GgufKeys) -> tuple[int, int]:
    """Return the number of experts of a layer, and of those that a position chooses."""
    count, used = keys.get("expert_count", int), keys.get("expert_used_count", int)
    if count > _MAX_EXPERTS or used > count:
        raise keys.refused(
            f"positions choose {used} of {count} experts, of which there may be {_MAX_EXPERTS}"
        )
    return count, used


def _mixtral(keys: GgufKeys, config: Fields) -> Fields:
    count, used = _experts(keys)
    return {"hidden_act": "silu", "num_local_experts": count, "num_experts_per_tok": used}


def _qwen_moe(keys: GgufKeys, config: Fields) -> Fields:
    count, used = _experts(keys)
    found: Fields = {
        "hidden_act": "silu",
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": keys.get("expert_feed_forward_length", int),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        # Not in files: Qwen3's weights of the chosen are made to sum to one, Qwen2's are not.
        "norm_topk_prob": config["model_type"] == "qwen3_moe",
    }
    if config["model_type"] == "qwen2_moe":
        size = keys.get("expert_shared_feed_forward_length", int)
        found |= {"shared_expert_intermediate_size": size, "qkv_bias": True}
    return found


def _gpt_oss(keys: GgufKeys, config: Fields) -> Fields:
    count, used = _experts(keys)
    # Not in files: the model's own ramp of frequencies is not rounded to whole ones.
    exact = {"truncate": False} if config["rope_parameters"]["rope_type"] == "yarn" else {}
    return {
        "hidden_act": "silu",
        "attention_bias": True,
        "num_local_experts": count,
        "num_experts_per_tok": used,
        "intermediate_size": keys.get("expert_feed_forward_length", int),
        "rope_parameters": config["rope_parameters"] | exact,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        **_windows(keys, config["num_hidden_layers"], _GPT_OSS_PATTERN),
    }


_EXPERT_KEYS = frozenset({"expert_count", "expert_used_count"})
_OWN_SIZE_KEYS = _EXPERT_KEYS | {"expert_feed_forward_length"}
_WINDOW_KEYS = frozenset({"attention.sliding_window", "attention.sliding_window_pattern"})

ARCHITECTURES = {
    "llama": Architecture(
        "llama", "LlamaForCausalLM", _LAYER, _llama, _QKV_BIAS | _OUTPUT_BIAS, paired_heads=True
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _LAYER | _QKV_BIAS, _plain),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _LAYER | _QK_NORM, _plain),
    "qwen2moe": Architecture(
        "qwen2_moe", "Qwen2MoeForCausalLM", _ATTENTION | _QKV_BIAS | _EXPERTS | _SHARED_EXPERT,
        _qwen_moe, keys=_OWN_SIZE_KEYS | {"expert_shared_feed_forward_length"},
    ),
    "qwen3moe": Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", _ATTENTION | _QK_NORM | _EXPERTS, _qwen_moe,
        keys=_OWN_SIZE_KEYS,
    ),
    "gemma3": Architecture(
        "gemma3_text", "Gemma3ForCausalLM", _LAYER | _QK_NORM | _FOUR_NORMS, _gemma3,
        keys=_WINDOW_KEYS | {"final_logit_softcapping"}, shifted_norms=True,
    ),
    "gpt-oss": Architecture(
        "gpt_oss", "GptOssForCausalLM",
        {
            **{name: of for name, of in _ATTENTION.items() if name != "ffn_norm.weight"},
            **_SECOND_NORM, **_QKV_BIAS, **_OUTPUT_BIAS, **_SINKS, **_GPT_OSS_EXPERTS,
        },
        _gpt_oss, keys=_OWN_SIZE_KEYS | _WINDOW_KEYS, by_turns=True,
    ),
}  # fmt: skip
"""Those that are read; `docs/models.md` has them for readers."""

_MIXTRAL = Architecture(
    "mixtral", "MixtralForCausalLM", _ATTENTION | _MIXTRAL_EXPERTS, _mixtral,
    keys=_EXPERT_KEYS, paired_heads=True,
)  # fmt: skip
"""The architecture of `llama` files with experts."""


def architecture_of(file: GgufFile) -> Architecture:
    """The architecture of the model in a file.

    Raises:
        InvalidRequestError: an unknown one.
    """
    name = file.metadata.get("general.architecture")
    found = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if found is None:
        raise InvalidRequestError(
            f"{file.path} holds a model of architecture {quoted(str(name))}; of GGUF files those "
            f"of {', '.join(ARCHITECTURES)} are served",
            param="model",
        )
    return _MIXTRAL if name == "llama" and file.metadata.get("llama.expert_count") else found
