"""GGUF files of the tiny models, as llama.cpp's converter makes them."""

import json
import re
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file

from tests import lifelike
from tests.models import make
from tests.tensors.gguf_files import Stored, gguf_bytes, stored

_ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "mixtral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen2_moe": MODEL_ARCH.QWEN2MOE,
    "qwen3": MODEL_ARCH.QWEN3,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "gemma3": MODEL_ARCH.GEMMA3,
    "gpt_oss": MODEL_ARCH.GPT_OSS,
}
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


_ROUTERS = ("gate", "router", "shared_expert_gate")

_SIZES = {
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}


def gguf_of(directory: Path, file: Path, kind: str = "F32", **changes: Any) -> Path:
    """Write the model in `directory` into `file`.

    Args:
        directory: of a tiny model.
        file: to write.
        kind: of the matrices; vectors are F32.
        changes: of the metadata, by key; None leaves one out.
    """
    config = json.loads((directory / "config.json").read_text())
    name = config["model_type"].removesuffix("_text")
    own = MODEL_ARCH_NAMES[_ARCHITECTURES[name]]
    keys = {f"{own}.{key}": value for key, value in _keys(name, config).items()}
    metadata = {"general.architecture": own, **keys, **_tokenizer(directory)}
    metadata |= {key.replace("__", "."): value for key, value in changes.items()}
    tensors = tensors_of(directory, kind)
    file.write_bytes(
        gguf_bytes({key: of for key, of in metadata.items() if of is not None}, tensors)
    )
    return file


def llama_in_blocks(directory: Path, kind: str = "Q8_0") -> tuple[Path, Path]:
    """Write a Llama whose rows are whole blocks of 32; return its directory and its file."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    plain = make("llama", directory / "plain", **sizes, num_key_value_heads=2)
    return plain, gguf_of(plain, directory / "m.gguf", kind)


def lifelike_in_blocks(family: str, directory: Path, kind: str = "Q8_0", **changes: Any) -> Path:
    """Write a model of `tests.lifelike`, with loud norms if it has them; return its file."""
    plain = directory / "plain"
    shutil.copytree(lifelike.text(family, loud=family in lifelike.LOUD), plain)
    weights = plain / "model.safetensors"
    save_file({name: values.float() for name, values in load_torch(weights).items()}, weights)
    return gguf_of(plain, directory / "m.gguf", kind, **changes)


def tensors_of(directory: Path, kind: str = "F32") -> dict[str, Stored]:
    """The model's tensors by llama.cpp's names, permuted and shifted as it has them."""
    config = json.loads((directory / "config.json").read_text())
    name = config["model_type"].removesuffix("_text")
    names = get_tensor_name_map(_ARCHITECTURES[name], config["num_hidden_layers"])
    found = {}
    weights = load_file(directory / "model.safetensors")
    for key, values in (_stacked(weights) if name != "gpt_oss" else _apart(weights)).items():
        stem, _, ending = key.rpartition(".")
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        part = stem.rpartition(".")[2]
        if name in ("llama", "mixtral") and part in heads:
            values = _in_pairs(values, config[heads[part]])
        if name == "gemma3" and part.endswith("norm"):
            values = values + np.float32(1)
        plain = values.ndim < 2 or ending == "bias" or part in _ROUTERS
        matrix = "F32" if plain else kind
        found[f"{names.get_name(stem)}.{ending}"] = stored(values, matrix)
    scaling = config["rope_parameters"]
    if scaling.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = stored(_divisors(scaling, config["head_dim"]))
    return found


def _stacked(weights: dict[str, npt.NDArray[np.float32]]) -> dict[str, npt.NDArray[np.float32]]:
    """With the matrices of all experts of a layer as one, by the name of one of them less its number."""
    found, experts = {}, defaultdict[str, dict[int, npt.NDArray[np.float32]]](dict)
    for key, values in weights.items():
        if one := _EXPERT.search(key):
            experts[_EXPERT.sub(".experts.", key)][int(one[1])] = values
        else:
            found[key] = values
    return found | {
        key: np.stack([of[number] for number in range(len(of))]) for key, of in experts.items()
    }


def _apart(weights: dict[str, npt.NDArray[np.float32]]) -> dict[str, npt.NDArray[np.float32]]:
    """As `modify_tensors` of the converter's GPT-OSS: gates and ups, and matrices [E, O, I]."""
    found = {}
    for key, values in weights.items():
        stem, _, joint = key.rpartition(".")
        if key.endswith("sinks"):
            found[f"{key}.weight"] = values
        elif ".experts." not in key:
            found[key] = values
        else:
            part, ending = joint.removesuffix("_bias"), "bias" if values.ndim < 3 else "weight"
            rows = np.ascontiguousarray(values.swapaxes(1, 2)) if values.ndim > 2 else values
            names = ["gate_proj", "up_proj"] if part == "gate_up_proj" else [part]
            for place, name in enumerate(names):
                turn = np.ascontiguousarray(rows[:, place :: len(names)])
                found[f"{stem}.{name}.{ending}"] = turn
    return found


def _in_pairs(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """As `permute` of convert_hf_to_gguf.py: from halves of each head to pairs."""
    split = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))


def _divisors(scaling: dict[str, Any], head_dim: int) -> npt.NDArray[np.float32]:
    """As `generate_extra_tensors` of the converter's Llama."""
    found = []
    low = scaling["original_max_position_embeddings"] / scaling["low_freq_factor"]
    high = scaling["original_max_position_embeddings"] / scaling["high_freq_factor"]
    for index in range(0, head_dim, 2):
        length = 2 * np.pi * scaling["rope_theta"] ** (index / head_dim)
        if length < high:
            found.append(1.0)
        elif length > low:
            found.append(scaling["factor"])
        else:
            original = scaling["original_max_position_embeddings"]
            smooth = (original / length - scaling["low_freq_factor"]) / (
                scaling["high_freq_factor"] - scaling["low_freq_factor"]
            )
            found.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(found, np.float32)


def _keys(name: str, config: dict[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope["rope_theta"]),
        "vocab_size": config["vocab_size"],
    }
    if config.get("head_dim"):
        keys |= {f"attention.{of}_length": config["head_dim"] for of in ("key", "value")}
    if rope["rope_type"] == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        length = rope["original_max_position_embeddings"]
        keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(rope["factor"])}
        keys["rope.scaling.original_context_length"] = length
    if name == "gpt_oss":
        keys["expert_feed_forward_length"] = config["intermediate_size"]
    if name in ("gemma3", "gpt_oss"):
        keys["attention.sliding_window"] = config["sliding_window"]
    if (experts := config.get("num_local_experts", config.get("num_experts"))) is not None:
        keys |= {"expert_count": experts, "expert_used_count": config["num_experts_per_tok"]}
    for theirs, ours in _SIZES.items():
        if theirs in config:
            keys[ours] = config[theirs]
    return keys


def _tokenizer(directory: Path) -> dict[str, Any]:
    """Byte-level BPE as all tiny models have it, which is GPT-2's."""
    config = json.loads((directory / "config.json").read_text())
    form = json.loads((directory / "tokenizer.json").read_text())
    tokens = [f"[PAD{index}]" for index in range(config["vocab_size"])]
    types = [5] * len(tokens)
    for token, index in form["model"]["vocab"].items():
        tokens[index], types[index] = token, 1
    for added in form["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], 3 if added["special"] else 4
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in form["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": (directory / "chat_template.jinja").read_text(),
    }
