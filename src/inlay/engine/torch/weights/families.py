"""Supported generation models, and the configurations they may have.

Some models would silently give wrong results with embedding vectors (per-layer inputs from token
ids, features added at inner layers) or with ignored attention options. Hence an allow-list: all
other models are refused before they are loaded. `docs/models.md` is its table for readers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from inlay.base.errors import InvalidRequestError
from inlay.engine.embed.families import FAMILIES as EMBEDDING_FAMILIES
from inlay.engine.torch.weights.media_families import DELTA, MEDIA_FAMILIES, ImageFamily

if TYPE_CHECKING:
    # Imports torch, which the checks before loading must not need.
    from inlay.engine.torch.attention.shape import LayerShape

_STATIC_ROPES = ("default", "linear", "llama3", "proportional", "yarn")
"""Rotary embeddings whose angles depend on the position only.

The others depend on the longest position in the call, which in a packed batch belongs to another
sequence.
"""

_LOCAL = ("sliding_attention", "chunked_attention")
_LAYER_TYPES = ("full_attention", *_LOCAL)

_LATENT = (
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("q_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
)
"""Projections of multi-head latent attention, whose queries may also be compressed."""

FAMILIES: dict[str, ImageFamily] = {
    family.model_type: family
    for family in (
        ImageFamily("deepseek_v2", "DeepseekV2ForCausalLM", fused=_LATENT),
        ImageFamily("deepseek_v3", "DeepseekV3ForCausalLM", fused=_LATENT),
        ImageFamily("gemma", "GemmaForCausalLM"),
        ImageFamily("gemma2", "Gemma2ForCausalLM"),
        ImageFamily("gemma3_text", "Gemma3ForCausalLM"),
        ImageFamily("gemma4_text", "Gemma4ForCausalLM"),
        ImageFamily("gpt_oss", "GptOssForCausalLM"),
        ImageFamily("llama", "LlamaForCausalLM"),
        ImageFamily("llama4_text", "Llama4ForCausalLM"),
        ImageFamily("mistral", "MistralForCausalLM"),
        ImageFamily("mixtral", "MixtralForCausalLM"),
        ImageFamily("phi", "PhiForCausalLM"),
        ImageFamily("phi3", "Phi3ForCausalLM"),
        ImageFamily("qwen2", "Qwen2ForCausalLM", float32_scores=True),
        ImageFamily("qwen2_moe", "Qwen2MoeForCausalLM", float32_scores=True),
        ImageFamily("qwen3", "Qwen3ForCausalLM"),
        ImageFamily("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", fused=DELTA, recurrent=True),
        ImageFamily("qwen3_5_text", "Qwen3_5ForCausalLM", fused=DELTA, recurrent=True),
        ImageFamily("qwen3_moe", "Qwen3MoeForCausalLM"),
        ImageFamily("qwen3_next", "Qwen3NextForCausalLM", fused=DELTA, recurrent=True),
    )
}

PER_LAYER = "its layers need further embeddings of the token ids, which prompt embeddings lack"
_AUDIO = "its positions interleave audio and video, which are not supported"
_MAMBA = "its Mamba layers are not supported"
_SPARSE = "its sparse attention is not supported"

REFUSED: dict[str, str] = {
    "aya_vision": "its language model (cohere2) is not supported",
    "deepseek_v32": _SPARSE,
    "deepseek_v4": _SPARSE,
    "falcon_mamba": _MAMBA,
    "gemma3n": PER_LAYER,
    "gemma3n_text": PER_LAYER,
    "glm_moe_dsa": _SPARSE,
    "jamba": _MAMBA,
    "mamba": _MAMBA,
    "mamba2": _MAMBA,
    "mllama": "its layers have cross-attention to an image",
    "nemotron_h": _MAMBA,
    "paligemma": "its attention is bidirectional in the whole prompt",
    "phi4_multimodal": "its language model takes ids and pixels, not rows",
    "qwen3_omni_moe": _AUDIO,
}
"""Models that would silently be wrong here, or cannot run, with the reason."""


def family_of(config: Mapping[str, Any]) -> ImageFamily:
    """Return the family of a model's `config.json`.

    Raises:
        InvalidRequestError: unsupported model or architecture; the message lists the supported
            ones.
    """
    model_type = config.get("model_type")
    known = FAMILIES | MEDIA_FAMILIES
    family = known.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        served = f"it serves {', '.join(sorted(known))}"
        if isinstance(model_type, str) and model_type in REFUSED:
            raise InvalidRequestError(
                f"the torch engine does not serve models of type {model_type!r}: "
                f"{REFUSED[model_type]}; {served}"
            )
        if model_type in EMBEDDING_FAMILIES:
            raise InvalidRequestError(
                f"models of type {model_type!r} do not generate text; "
                "--task embed serves their embeddings, --task score their classification heads"
            )
        raise InvalidRequestError(
            f"the torch engine does not serve models of type {model_type!r}; {served}"
        )
    architectures = config.get("architectures") or [family.architecture]
    if family.architecture not in architectures:
        raise InvalidRequestError(
            f"the checkpoint holds {', '.join(map(str, architectures))}; the torch engine "
            f"generates with {family.architecture}"
        )
    return _with_language_model(family, config)


def _with_language_model(family: ImageFamily, config: Mapping[str, Any]) -> ImageFamily:
    """Return `family` with the properties of the language model inside.

    Raises `InvalidRequestError` if that is not supported.
    """
    text = config.get("text_config")
    inside = text.get("model_type") if isinstance(text, Mapping) else None
    if family.language is None or inside is None or inside.startswith(family.model_type):
        return family
    language = FAMILIES.get(inside)
    if language is None:
        raise InvalidRequestError(
            f"the language model of this {family.model_type!r} is of type {inside!r}, which the "
            f"torch engine does not serve; it serves {', '.join(sorted(FAMILIES))}"
        )
    return replace(family, fused=language.fused, float32_scores=language.float32_scores)


def next_token_layers(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the weight name prefixes of multi-token prediction layers, which no model has."""
    count, last = config.get("num_nextn_predict_layers"), config.get("num_hidden_layers")
    if not isinstance(count, int) or not isinstance(last, int):
        return ()
    return tuple(f"model.layers.{last + index}." for index in range(count))


def context_length(asked: int | None, config: Mapping[str, Any]) -> int:
    """Return the maximum length of a sequence, in positions: as requested, or the model's own.

    Raises:
        InvalidRequestError: more than the model's own, or the model's own is not known.
    """
    own = (config.get("text_config") or config).get("max_position_embeddings")
    if not isinstance(own, int):
        raise InvalidRequestError("config.json does not say max_position_embeddings")
    if asked is not None and asked > own:
        raise InvalidRequestError(
            f"max_model_len is {asked}; the model's maximum context length is {own}"
        )
    return own if asked is None else asked


def check_positions(config: Any, max_model_len: int, *, recurrent: bool = False) -> None:
    """Refuse a configuration whose positions cannot be computed for each sequence separately.

    Raises:
        InvalidRequestError: rotary embeddings that depend on the rest of the batch, or layers of an
            unknown type.
    """
    for rope in _ropes(config.rope_parameters or {}):
        kind = rope.get("rope_type", "default")
        if kind == "longrope":
            original = int(rope["original_max_position_embeddings"])
            if max_model_len > original:
                raise InvalidRequestError(
                    "rotary embeddings of type 'longrope' change for a whole sequence when it "
                    f"grows beyond {original} positions; got max_model_len {max_model_len}, "
                    f"allowed: at most {original}",
                    param="max_model_len",
                )
        elif kind not in _STATIC_ROPES:
            raise InvalidRequestError(
                f"rotary embeddings of type {kind!r} depend on the batch; allowed: "
                f"{', '.join(_STATIC_ROPES)}, and longrope within the original context length"
            )
    kinds = set(getattr(config, "layer_types", None) or ())
    unknown = kinds - set(_LAYER_TYPES) - ({"linear_attention"} if recurrent else set())
    if unknown:
        raise InvalidRequestError(
            f"layers of type {', '.join(sorted(map(str, unknown)))} are not served; allowed: "
            f"{', '.join(_LAYER_TYPES)}"
        )
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise InvalidRequestError(
            "the model sees later positions too: it embeds texts and does not generate; start it "
            "with --task embed"
        )


def check_windows(config: Any, layers: "Sequence[LayerShape]") -> None:
    """Refuse a model whose sliding windows in the configuration and in its layers differ.

    Raises:
        InvalidRequestError: names the first such layer.
    """
    for index, (kind, layer) in enumerate(
        zip(getattr(config, "layer_types", None) or (), layers, strict=False)
    ):
        if (kind in _LOCAL) != (layer.window is not None) and not layer.state_size:
            raise InvalidRequestError(
                f"layer {index} is of type {kind} and asks for a window of {layer.window}: "
                "its mask would not be what transformers makes of it"
            )


def _ropes(parameters: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the rope parameters: one set, or one for each type of layer."""
    if any(isinstance(value, Mapping) for value in parameters.values()):
        yield from (value for value in parameters.values() if value is not None)
    else:
        yield parameters
