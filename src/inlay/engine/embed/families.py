"""Supported embedding and scoring models, and the properties of each family.

All other models are refused with the reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inlay.errors import InvalidRequestError

_LLAMA = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Properties of one kind of model.

    Attributes:
        causal: a position sees only itself and earlier ones; the last one has then seen the whole
            text.
        position_offset: id of the first position; None for the padding token's id plus one.
        token_types: True if the two texts of a pair have different token types.
        fused: projections of one parent module with the same input.
        tiled: True if its `encoder` is BERT-like, so that `TiledEncoder` can compute it.
        gelu: module and attribute of a GELU, and the attribute of the linear before it, into which
            it can be fused.
        scores: True if its sequence classification head is supported.
    """

    causal: bool = False
    position_offset: int | None = 0
    token_types: bool = False
    fused: tuple[tuple[str, ...], ...] = (("query", "key", "value"),)
    tiled: bool = False
    gelu: tuple[str, str, str] | None = None
    scores: bool = True


_BERT_GELU = ("Intermediate", "intermediate_act_fn", "dense")
_DECODER = Family(causal=True, fused=_LLAMA, scores=False)

FAMILIES: dict[str, Family] = {
    "bert": Family(token_types=True, tiled=True, gelu=_BERT_GELU),
    "camembert": Family(position_offset=None, tiled=True, gelu=_BERT_GELU),
    "distilbert": Family(fused=(("q_lin", "k_lin", "v_lin"),), gelu=("FFN", "activation", "lin1")),
    "electra": Family(token_types=True, tiled=True, gelu=_BERT_GELU, scores=False),
    "gemma3_text": _DECODER,
    "llama": _DECODER,
    "mistral": _DECODER,
    "modernbert": Family(fused=()),
    "qwen2": _DECODER,
    "qwen3": _DECODER,
    "roberta": Family(position_offset=None, tiled=True, gelu=_BERT_GELU),
    "xlm-roberta": Family(position_offset=None, tiled=True, gelu=_BERT_GELU),
}

REFUSED: dict[str, str] = {
    "mpnet": "its attention adds a bias for each pair of positions, which is not supported",
    "deberta-v2": "its attention adds terms for each distance, which is not supported",
    "t5": "its attention adds a bias for each distance, which is not supported",
}


def family_of(config: Mapping[str, Any]) -> Family:
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
    kind = config.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise InvalidRequestError(
            f"position embeddings of type {kind!r} are not served; allowed: absolute"
        )
    return family
