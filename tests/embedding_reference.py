"""What plain transformers says, one text at a time, and pooling as its definition reads.

The truth the engine is held against.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

Array = npt.NDArray[np.float32]


@cache
def model_of(directory: Path, dtype: torch.dtype = torch.float32, attention: str = "eager") -> Any:
    return AutoModel.from_pretrained(directory, dtype=dtype, attn_implementation=attention).eval()


@cache
def tokenizer_of(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory)


@torch.no_grad()
def embedded(directory: Path, ids: Sequence[int]) -> Array:
    """The model's own embeddings of `ids`: [T, C]."""
    found: Array = model_of(directory).get_input_embeddings()(torch.tensor(ids)).numpy()
    return found


@torch.no_grad()
def vector(directory: Path, ids: Sequence[int] | Array, model: Any = None) -> Array:
    """The vector of one prompt, ids or rows [T, C], before it gets length 1.

    States are those of `model`, unless given in float32; all after them is in float32.
    """
    if isinstance(ids, np.ndarray):
        inputs = {"inputs_embeds": torch.from_numpy(ids)[None]}
    else:
        inputs = {"input_ids": torch.tensor([ids])}
    states = (model or model_of(directory))(**inputs).last_hidden_state[0].float()
    pooling = json.loads((directory / "1_Pooling" / "config.json").read_text())
    found = torch.cat(_pooled(states, pooling))
    for layer in sorted(directory.glob("*_Dense")):
        config = json.loads((layer / "config.json").read_text())
        weights = load_file(layer / "model.safetensors")
        found = weights["linear.weight"] @ found + weights.get("linear.bias", 0)
        if config["activation_function"].endswith("Tanh"):
            found = found.tanh()
    result: Array = found.numpy()
    return result


def _pooled(states: torch.Tensor, config: dict[str, Any]) -> list[torch.Tensor]:
    named = config.get("pooling_mode", [])
    modes = [named] if isinstance(named, str) else named
    found = []
    if config.get("pooling_mode_cls_token"):
        found.append(states[0])
    if config.get("pooling_mode_max_tokens"):
        found.append(torch.stack([states[:, column].max() for column in range(states.shape[1])]))
    if config.get("pooling_mode_mean_tokens"):
        found.append(states.sum(0) / len(states))
    for mode in modes:
        if mode == "lasttoken":
            found.append(states[-1])
        elif mode == "weightedmean":
            weights = [n + 1 for n in range(len(states))]
            found.append(sum(w * s for w, s in zip(weights, states, strict=True)) / sum(weights))
        elif mode == "mean_sqrt_len_tokens":
            found.append(states.sum(0) / len(states) ** 0.5)
    return found


@torch.no_grad()
def logits(
    directory: Path, first: str, second: str | None = None, dtype: torch.dtype = torch.float32
) -> Array:
    """What a classification head says of a text or of a pair."""
    model = AutoModelForSequenceClassification.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager"
    ).eval()
    inputs = tokenizer_of(directory)(first, second, return_tensors="pt")
    found: Array = model(**inputs).logits[0].float().numpy()
    return found


def cosine(one: Array, other: Array) -> float:
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))
