"""Supported embedding and scoring models, and the properties of each family.

All other models are refused with the reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from inlay.base.errors import InvalidRequestError
from inlay.engine.torch.weights.media_families import MEDIA_FAMILIES

_LLAMA = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingFamily:
    """Properties of one kind of model.

    Attributes:
        causal: a position sees only itself and earlier ones; the last one has then seen the whole
            text.
        position_offset: id of the first position; None for the padding token's id plus one.
        token_types: True if the two texts of a pair have different token types.
        fused: projections of one parent module with the same input.
        native: True if its `encoder` is BERT-like, so that `NativeEncoder` can compute it.
        gelu: module and attribute of a GELU, and the attribute of the linear before it, into which
            it can be fused.
        scores: True if its sequence classification head is supported; those of decoders read
            the last state.
        language: attribute of the model that is its language model; None if it has no tower.
        own_head: the language model inside is a causal one, around its layers.
        rope_axes: numbers of a position: 3 with M-RoPE (time, height, width), else 1.
        biased: scores have a bias for each distance of two positions, as MPNet's.
        whole: transformers' class of a model around this one, and its attribute that is this one.
    """

    causal: bool = False
    position_offset: int | None = 0
    token_types: bool = False
    fused: tuple[tuple[str, ...], ...] = (("query", "key", "value"),)
    native: bool = False
    gelu: tuple[str, str, str] | None = None
    scores: bool = True
    language: str | None = None
    own_head: bool = False
    rope_axes: int = 1
    biased: bool = False
    whole: tuple[str, str] | None = None


_BERT_GELU = ("Intermediate", "intermediate_act_fn", "dense")
_DECODER = PoolingFamily(causal=True, fused=_LLAMA)

FAMILIES: dict[str, PoolingFamily] = {
    "bert": PoolingFamily(token_types=True, native=True, gelu=_BERT_GELU),
    "camembert": PoolingFamily(position_offset=None, native=True, gelu=_BERT_GELU),
    "distilbert": PoolingFamily(
        fused=(("q_lin", "k_lin", "v_lin"),), gelu=("FFN", "activation", "lin1")
    ),
    "electra": PoolingFamily(token_types=True, native=True, gelu=_BERT_GELU, scores=False),
    "gemma3_text": _DECODER,
    "llama": _DECODER,
    "mistral": _DECODER,
    "modernbert": PoolingFamily(fused=()),
    # Its code has the padding token's id as a constant.
    "mpnet": PoolingFamily(
        position_offset=2, fused=(("q", "k", "v"),), native=True, gelu=_BERT_GELU, biased=True
    ),
    "qwen2": _DECODER,
    "qwen3": _DECODER,
    "roberta": PoolingFamily(position_offset=None, native=True, gelu=_BERT_GELU),
    "xlm-roberta": PoolingFamily(position_offset=None, native=True, gelu=_BERT_GELU),
}

REFUSED: dict[str, str] = {
    "gemma4": (
        "attention inside an image is bidirectional in some layers, and layers may have inputs of "
        "their own, which is not supported here"
    ),
    "deberta-v2": "its attention adds terms for each distance, which is not supported",
    "t5": "its attention adds a bias for each distance, which is not supported",
    "qwen3_5": "recurrent layers are not supported here",
    "qwen3_5_moe": "recurrent layers are not supported here",
    "qwen2_5_omni": "its thinker's vectors were not compared with any",
}

FAMILIES |= {
    name: replace(
        _DECODER,
        scores=False,
        language=family.language,
        own_head=family.own_head,
        rope_axes=family.rope_axes,
    )
    for name, family in MEDIA_FAMILIES.items()
    if name not in REFUSED
}
FAMILIES["colqwen2"] = replace(FAMILIES["qwen2_vl"], whole=("ColQwen2ForRetrieval", "vlm"))


def family_of(config: Mapping[str, Any]) -> PoolingFamily:
    """Return the family of a model's `config.json`.

    Raises:
        InvalidRequestError: unsupported model; the message lists the supported ones.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        reason = f": {REFUSED[model_type]}" if model_type in REFUSED else ""
        raise InvalidRequestError(
            f"the torch engine makes no vectors with models of type {model_type!r}{reason}; it "
            f"does with {', '.join(sorted(FAMILIES))}"
        )
    if config.get("quantization_config"):
        raise InvalidRequestError(
            "the checkpoint is quantised; the torch engine serves float32, bfloat16 and float16 "
            "weights"
        )
    if family.language is not None and family.whole is None:
        _check_language_model(str(model_type), config)
    kind = config.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise InvalidRequestError(
            f"position embeddings of type {kind!r} are not served; allowed: absolute"
        )
    return family


def _check_language_model(model_type: str, config: Mapping[str, Any]) -> None:
    """Raise `InvalidRequestError` unless the language model inside is supported."""
    text = config.get("text_config")
    inside = text.get("model_type") if isinstance(text, Mapping) else None
    if not isinstance(inside, str) or inside.startswith(model_type):
        return
    allowed = [name for name, it in FAMILIES.items() if it.causal and it.language is None]
    if inside not in allowed:
        raise InvalidRequestError(
            f"the language model of this {model_type!r} is of type {inside!r}, with which the "
            f"torch engine makes no vectors; it does with {', '.join(sorted(allowed))}"
        )
