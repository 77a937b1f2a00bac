"""Configuration and names of the models in GGUF files: ggml's keys and names to transformers'.

The keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; what is in no file (layers with
windows, scales) stands in llama.cpp's `llama-model.cpp`. An architecture, a key or a tensor that is
not known here is refused: it would change numbers without a word.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf, log
from typing import Any

import numpy as np
import numpy.typing as npt

from inlay.base.errors import InvalidRequestError
from inlay.tensors.gguf import GgufFile, GgufTensor
from inlay.tensors.tensor import quoted

ROPE_FREQS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, [head_dim / 2]."""

_ROPE_THETA = 10000.0
_GEMMA3_LOCAL_THETA = 10000.0
_GEMMA3_PATTERN = 6
"""Every sixth layer of Gemma 3 sees everything."""
_GEMMA3_27B_LAYERS = 62
_WINDOWED = "sliding_attention"

_OUTER = {
    "token_embd.weight": ("model.embed_tokens.weight", "VH"),
    "output_norm.weight": ("model.norm.weight", "H"),
}
_HEAD = {"output.weight": ("lm_head.weight", "VH")}
_LAYER = {
    "attn_norm.weight": ("input_layernorm.weight", "H"),
    "attn_q.weight": ("self_attn.q_proj.weight", "QH"),
    "attn_k.weight": ("self_attn.k_proj.weight", "KH"),
    "attn_v.weight": ("self_attn.v_proj.weight", "KH"),
    "attn_output.weight": ("self_attn.o_proj.weight", "HQ"),
    "ffn_norm.weight": ("post_attention_layernorm.weight", "H"),
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
_QK_NORM = {
    "attn_q_norm.weight": ("self_attn.q_norm.weight", "D"),
    "attn_k_norm.weight": ("self_attn.k_norm.weight", "D"),
}
_FOUR_NORMS = {
    "post_attention_norm.weight": ("post_attention_layernorm.weight", "H"),
    "ffn_norm.weight": ("pre_feedforward_layernorm.weight", "H"),
    "post_ffw_norm.weight": ("post_feedforward_layernorm.weight", "H"),
}

_KEYS = frozenset(
    {
        "attention.head_count", "attention.head_count_kv", "attention.key_length",
        "attention.layer_norm_rms_epsilon", "attention.value_length", "block_count",
        "context_length", "embedding_length", "feed_forward_length", "rope.dimension_count",
        "rope.freq_base", "rope.scaling.attn_factor", "rope.scaling.factor",
        "rope.scaling.finetuned", "rope.scaling.original_context_length", "rope.scaling.type",
        "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "vocab_size",
    }
)  # fmt: skip
_MUST_BE_ZERO = frozenset({"expert_count", "expert_used_count", "nextn_predict_layers"})
"""Keys that some writers give models that have no such thing."""

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A `general.architecture`.

    Attributes:
        model_type: transformers' name.
        model_class: transformers' class of it.
        layer: of each tensor of a layer, the model's name and what its sizes are.
        biases: tensors of a layer that all or no layers have.
        keys: that it has beside those of all.
        own: fields of the configuration that no other has.
        paired_heads: rows of queries and keys are permuted, and are to be in halves.
        shifted_norms: norms are stored as 1 + w.
    """

    model_type: str
    model_class: str
    layer: Mapping[str, tuple[str, str]]
    own: "Callable[[GgufKeys, Fields], Fields]"
    biases: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    keys: frozenset[str] = frozenset()
    paired_heads: bool = False
    shifted_norms: bool = False


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
    pattern = keys.get("attention.sliding_window_pattern", int, _GEMMA3_PATTERN)
    heads = config["hidden_size"] // config["num_attention_heads"]
    found: Fields = {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": keys.get("attention.sliding_window", int),
        "layer_types": [
            _WINDOWED if (index + 1) % pattern else "full_attention" for index in range(layers)
        ],
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


ARCHITECTURES = {
    "llama": Architecture(
        "llama", "LlamaForCausalLM", _LAYER, _llama, _QKV_BIAS | _OUTPUT_BIAS, paired_heads=True
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _LAYER | _QKV_BIAS, _plain),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _LAYER | _QK_NORM, _plain),
    "gemma3": Architecture(
        "gemma3_text", "Gemma3ForCausalLM", _LAYER | _QK_NORM | _FOUR_NORMS, _gemma3,
        keys=frozenset(
            {
                "attention.sliding_window", "attention.sliding_window_pattern",
                "final_logit_softcapping",
            }
        ),
        shifted_norms=True,
    ),
}  # fmt: skip
"""Those that are read; `docs/models.md` has them for readers."""


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
    return found


def config_of(file: GgufFile, end_tokens: list[int]) -> Fields:
    """The model's configuration, as config.json would have it.

    Args:
        file: of the model.
        end_tokens: ids of its tokenizer.

    Raises:
        InvalidRequestError: an architecture or a key that is not known, one that is missing, or
            values that are not served.
    """
    kind = architecture_of(file)
    keys = GgufKeys(file, file.metadata["general.architecture"])
    _check_known(keys, kind)
    hidden, heads = keys.get("embedding_length", int), keys.get("attention.head_count", int)
    head_dim = keys.get("attention.key_length", int, max(1, hidden // heads))
    for name in ("attention.value_length", "rope.dimension_count"):
        if (other := keys.get(name, int, head_dim)) != head_dim:
            raise keys.refused(f"its heads are of {head_dim}, and {name} is {other}")
    vocabulary = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(vocabulary, list):
        raise keys.refused("it has no tokens: tokenizer.ggml.tokens")
    config: Fields = {
        "architectures": [kind.model_class],
        "model_type": kind.model_type,
        "dtype": _dtype_of(file),
        "vocab_size": len(vocabulary),
        "hidden_size": hidden,
        "intermediate_size": keys.get("feed_forward_length", int),
        "num_hidden_layers": keys.get("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.get("context_length", int),
        "rms_norm_eps": keys.get("attention.layer_norm_rms_epsilon", float),
        "rope_parameters": _rope(keys, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": end_tokens,
    }
    if config["num_hidden_layers"] > len(file.tensors):
        raise keys.refused(
            f"it has {len(file.tensors)} tensors for {config['num_hidden_layers']} layers"
        )
    for name in ("bos", "padding"):
        if (token := file.metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            config[f"{name[:3]}_token_id"] = token
    return config | kind.own(keys, config)


def _check_known(keys: GgufKeys, kind: Architecture) -> None:
    zero = {
        name for name in keys.names & _MUST_BE_ZERO if not keys.file.metadata[keys._prefix + name]
    }
    unknown = sorted(keys.names - _KEYS - kind.keys - zero)
    if unknown:
        raise keys.refused(
            f"its metadata has {', '.join(map(quoted, unknown[:4]))}, which this version does not "
            f"know for {kind.model_type} and which may change what the model computes"
        )


def _dtype_of(file: GgufFile) -> str:
    """Return the dtype a model is computed in unless another is asked for."""
    kinds = {tensor.type for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}.get(
        frozenset(kinds), "bfloat16"
    )


def _rope(keys: GgufKeys, head_dim: int) -> Fields:
    theta = keys.get("rope.freq_base", float, _ROPE_THETA)
    kind = keys.get("rope.scaling.type", str, "none")
    rope: Fields = {"rope_type": "default", "rope_theta": theta}
    freqs = keys.file.tensors.get(ROPE_FREQS)
    if freqs is not None:
        if kind != "none":
            raise keys.refused(f"its positions are scaled twice: by {kind} and {ROPE_FREQS}")
        return rope | _llama3(keys, freqs, theta, head_dim)
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise keys.refused(f"rope.scaling.type is {quoted(kind)}; read are none, linear and yarn")
    factor = keys.get("rope.scaling.factor", float)
    if kind == "linear":
        return rope | {"rope_type": kind, "factor": factor}
    return rope | {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": keys.get("rope.scaling.original_context_length", int),
        "attention_factor": keys.get("rope.scaling.attn_factor", float, 1.0)
        * (0.1 * log(factor) + 1.0),
        "beta_fast": keys.get("rope.scaling.yarn_beta_fast", float, 32.0),
        "beta_slow": keys.get("rope.scaling.yarn_beta_slow", float, 1.0),
    }


def _llama3(keys: GgufKeys, tensor: GgufTensor, theta: float, head_dim: int) -> Fields:
    """Return the scaling of Llama 3.1 that the divisors of the frequencies came of.

    The converter computes them from four numbers and keeps the divisors alone. Between the two
    wavelengths the inverse is linear in the frequency, which gives the numbers back.
    """
    if tensor.type != "F32" or tensor.shape != (head_dim // 2,):
        raise keys.refused(f"{ROPE_FREQS} is {tensor.type} of shape {tensor.shape}")
    divisors = tensor.read().astype(np.float64)
    turns = theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)
    factor = float(divisors.max())
    between = (divisors > 1 + 1e-4) & (divisors < factor * (1 - 1e-4))
    if 1 < factor < inf and between.sum() >= 2:
        smooth = (1 / divisors[between] - 1 / factor) / (1 - 1 / factor)
        slope, offset = np.polyfit(turns[between], smooth, 1)
        # The low factor is 1 in every model: smooth = (length x turns - 1) / (high - 1).
        high = round(1 - 1 / min(offset, -1e-6), 3)
        found: Fields = {
            "rope_type": "llama3",
            "factor": round(factor, 3),
            "low_freq_factor": 1.0,
            "high_freq_factor": high,
            "original_max_position_embeddings": round(slope * (high - 1)),
        }
        if np.allclose(_llama3_divisors(found, turns), divisors, rtol=1e-4):
            return found
    raise keys.refused(f"{ROPE_FREQS} is of no scaling that is known (Llama 3's is)")


def _llama3_divisors(scaling: Fields, turns: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Divisors of frequencies, in turns per position, as transformers' `llama3` has them."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = (scaling["original_max_position_embeddings"] * turns - low) / (high - low)
    inverse: npt.NDArray[np.float64] = 1 / scaling["factor"] + np.clip(smooth, 0, 1) * (
        1 - 1 / scaling["factor"]
    )
    return 1 / inverse


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor of a file, and the model's name of it."""

    name: str
    tensor: GgufTensor


def named_tensors(file: GgufFile, config: Fields) -> Iterator[Named]:
    """The tensors of a file by the names that the model has for them.

    Raises:
        InvalidRequestError: one that the architecture does not have, one that is missing, or one
            of another shape than the configuration says.
    """
    expected = dict(_expected(file, config))
    unknown = sorted(file.tensors.keys() - expected.keys() - {ROPE_FREQS})
    missing = sorted(expected.keys() - file.tensors.keys())
    kind = file.metadata["general.architecture"]
    if unknown or missing:
        what = "has" if unknown else "lacks"
        names = ", ".join(map(quoted, (unknown or missing)[:4]))
        more = f" and {len(unknown or missing) - 4} more" if len(unknown or missing) > 4 else ""
        of = f"which a model of {kind} does not have" if unknown else f"of a model of {kind}"
        raise InvalidRequestError(
            f"{file.path} cannot be served: it {what} {names}{more}, {of}", param="model"
        )
    for key, tensor in file.tensors.items():
        if key == ROPE_FREQS:
            continue
        name, shape = expected[key]
        if tensor.shape != shape:
            raise InvalidRequestError(
                f"{file.path} cannot be served: tensor {quoted(key)} has shape {tensor.shape}, and "
                f"its metadata say {shape}",
                param="model",
            )
        yield Named(name, tensor)


def _expected(file: GgufFile, config: Fields) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Yield each tensor's name in the file, and its name and shape in the model."""
    kind = architecture_of(file)
    sizes = {
        "V": config["vocab_size"],
        "H": config["hidden_size"],
        "I": config["intermediate_size"],
        "D": config["head_dim"],
        "Q": config["num_attention_heads"] * config["head_dim"],
        "K": config["num_key_value_heads"] * config["head_dim"],
    }

    def placed(name: str, of: str) -> tuple[str, tuple[int, ...]]:
        return name, tuple(sizes[letter] for letter in of)

    outer = _OUTER | ({} if config["tie_word_embeddings"] else _HEAD)
    for key, (name, of) in outer.items():
        yield key, placed(name, of)
    layer = {**kind.layer, **(kind.biases if config.get("attention_bias") else {})}
    for index in range(config["num_hidden_layers"]):
        for key, (name, of) in layer.items():
            yield f"blk.{index}.{key}", placed(f"model.layers.{index}.{name}", of)
