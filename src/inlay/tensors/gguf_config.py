"""Configuration and tensors of the models in GGUF files, as transformers has them.

The keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. An architecture, a key or a
tensor that is not known here is refused: it would change numbers without a word.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf, log

import numpy as np
import numpy.typing as npt

from inlay.base.errors import InvalidRequestError
from inlay.tensors.gguf import GgufFile, GgufTensor
from inlay.tensors.gguf_architectures import Architecture, Fields, GgufKeys, architecture_of
from inlay.tensors.tensor import quoted

ROPE_FREQS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, [head_dim / 2]."""

_ROPE_THETA = 10000.0

_OUTER = {
    "token_embd.weight": ("model.embed_tokens.weight", "VH"),
    "output_norm.weight": ("model.norm.weight", "H"),
}
_HEAD = {"output.weight": ("lm_head.weight", "VH")}

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
    length = keys.get("rope.scaling.original_context_length", int)
    found = rope | {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": length,
        "beta_fast": keys.get("rope.scaling.yarn_beta_fast", float, 32.0),
        "beta_slow": keys.get("rope.scaling.yarn_beta_slow", float, 1.0),
    }
    if "rope.scaling.attn_factor" in keys.names:
        own = keys.get("rope.scaling.attn_factor", float)
        found["attention_factor"] = own * (0.1 * log(factor) + 1.0)
    return found


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
        if (1, *tensor.shape) == shape:
            # Some writers leave the size of one out.
            tensor = replace(tensor, shape=shape)
        if tensor.shape != shape:
            raise InvalidRequestError(
                f"{file.path} cannot be served: tensor {quoted(key)} has shape {tensor.shape}, and "
                f"its metadata say {shape}",
                param="model",
            )
        yield from _experts(name, tensor) if "{}" in name else (Named(name, tensor),)


def _experts(name: str, tensor: GgufTensor) -> Iterator[Named]:
    """Yield the matrices or biases of experts that stand one after another in a tensor."""
    count, *shape = tensor.shape
    nbytes = tensor.nbytes // count
    for expert in range(count):
        offset = tensor.offset + expert * nbytes
        one = replace(tensor, shape=tuple(shape), offset=offset, nbytes=nbytes)
        yield Named(name.format(expert), one)


def _expected(file: GgufFile, config: Fields) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Yield each tensor's name in the file, and its name and shape in the model."""
    kind = architecture_of(file)
    sizes = {
        "V": config["vocab_size"],
        "H": config["hidden_size"],
        "I": config["intermediate_size"],
        "D": config["head_dim"],
        "A": config["num_attention_heads"],
        "Q": config["num_attention_heads"] * config["head_dim"],
        "K": config["num_key_value_heads"] * config["head_dim"],
        "E": config.get("num_experts", config.get("num_local_experts", 0)),
        "F": config.get("moe_intermediate_size", 0),
        "S": config.get("shared_expert_intermediate_size", 0),
        "1": 1,
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
