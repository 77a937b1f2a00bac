"""The models this engine serves, and what a configuration may ask of it.

Rows alone would be silently wrong for some models (per-layer inputs from token ids, features added at inner layers), and
some attention options would be silently dropped. Hence an allow-list: what is not on it is refused before it is loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inlay.errors import InvalidRequestError

_STATIC_ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles depend on the position alone. The others look at the longest position in the call,
which in a packed batch belongs to somebody else."""

_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class Family:
    """Facts about one kind of model.

    Attributes:
        model_type: as `config.json` names it.
        architecture: the causal language model's class in transformers.
        fused: projections of one parent module that take the same input, so that one product serves them all.
        float32_scores: attention scores reach hundreds, where bfloat16 no longer tells neighbours apart.
        refuses_rows: why embeddings cannot be prompts of it, or None.
    """

    model_type: str
    architecture: str
    fused: tuple[tuple[str, ...], ...] = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
    float32_scores: bool = False
    refuses_rows: str | None = None


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("llama", "LlamaForCausalLM"),
        Family("mistral", "MistralForCausalLM"),
        Family("qwen2", "Qwen2ForCausalLM", float32_scores=True),
        Family("qwen3", "Qwen3ForCausalLM"),
    )
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a model's `config.json`.

    Raises:
        InvalidRequestError: the model, or something its configuration asks for, is not served; says what is.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise InvalidRequestError(
            f"the torch engine does not serve models of type {model_type!r}; it serves {', '.join(sorted(FAMILIES))}"
        )
    architectures = config.get("architectures") or [family.architecture]
    if family.architecture not in architectures:
        raise InvalidRequestError(
            f"the checkpoint holds {', '.join(map(str, architectures))}; the torch engine generates with {family.architecture}"
        )
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise InvalidRequestError(
            f"the checkpoint is quantised ({method}); the torch engine serves float32, bfloat16 and float16 weights"
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in _STATIC_ROPES:
        raise InvalidRequestError(
            f"rotary embeddings of type {rope_type!r} depend on the batch; allowed: {', '.join(_STATIC_ROPES)}"
        )
    unknown = set(config.get("layer_types") or ()) - set(_LAYER_TYPES)
    if unknown:
        raise InvalidRequestError(
            f"layers of type {', '.join(sorted(map(str, unknown)))} are not served; allowed: {', '.join(_LAYER_TYPES)}"
        )
    return family
