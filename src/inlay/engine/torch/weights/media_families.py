"""`Family`, and the families of generation models with a tower of images or audio."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of one kind of model.

    Attributes:
        model_type: name in `config.json`.
        architecture: class of the causal language model in transformers.
        fused: projections of one parent module with the same input, which one product can compute.
        float32_scores: attention scores reach hundreds, where bfloat16 is too coarse.
        refuses_rows: why embedding vectors cannot be prompts, or None.
        language: attribute of the model's body that is its language model; None if it has no tower.
        own_head: the language model inside is a causal one with its head.
        rope_axes: numbers of a position: 3 with M-RoPE (time, height, width), else 1.
        bidirectional: layers in which the positions of an atomic segment see all of it: none,
            those with a sliding window, or all.
        recurrent: some of its layers keep a state in place of keys and values.
    """

    model_type: str
    architecture: str
    fused: tuple[tuple[str, ...], ...] = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
    float32_scores: bool = False
    refuses_rows: str | None = None
    language: str | None = None
    own_head: bool = False
    rope_axes: int = 1
    bidirectional: Literal["none", "sliding", "all"] = "none"
    recurrent: bool = False


_LANGUAGE = "language_model"

DELTA = (
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
)
"""Projections of layers of the gated delta rule, and of those between them."""

MEDIA_FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("gemma3", "Gemma3ForConditionalGeneration", language=_LANGUAGE, bidirectional="all"),
        Family(
            "gemma4", "Gemma4ForConditionalGeneration", language=_LANGUAGE, bidirectional="sliding"
        ),
        Family("glm4v", "Glm4vForConditionalGeneration", language=_LANGUAGE, rope_axes=3),
        Family("glm4v_moe", "Glm4vMoeForConditionalGeneration", language=_LANGUAGE, rope_axes=3),
        Family("idefics3", "Idefics3ForConditionalGeneration", language="text_model"),
        Family("internvl", "InternVLForConditionalGeneration", language=_LANGUAGE),
        Family("llama4", "Llama4ForConditionalGeneration", language=_LANGUAGE, own_head=True),
        Family("llava", "LlavaForConditionalGeneration", language=_LANGUAGE),
        Family("llava_next", "LlavaNextForConditionalGeneration", language=_LANGUAGE),
        Family("llava_onevision", "LlavaOnevisionForConditionalGeneration", language=_LANGUAGE),
        Family("mistral3", "Mistral3ForConditionalGeneration", language=_LANGUAGE),
        Family(
            "qwen2_vl",
            "Qwen2VLForConditionalGeneration",
            float32_scores=True,
            language=_LANGUAGE,
            rope_axes=3,
        ),
        Family(
            "qwen2_5_vl",
            "Qwen2_5_VLForConditionalGeneration",
            float32_scores=True,
            language=_LANGUAGE,
            rope_axes=3,
        ),
        Family(
            "qwen2_5_omni",
            "Qwen2_5OmniThinkerForConditionalGeneration",
            float32_scores=True,
            language=_LANGUAGE,
            rope_axes=3,
        ),
        Family(
            "qwen2_audio",
            "Qwen2AudioForConditionalGeneration",
            float32_scores=True,
            language=_LANGUAGE,
        ),
        Family(
            "qwen3_5",
            "Qwen3_5ForConditionalGeneration",
            fused=DELTA,
            recurrent=True,
            language=_LANGUAGE,
            rope_axes=3,
        ),
        Family(
            "qwen3_5_moe",
            "Qwen3_5MoeForConditionalGeneration",
            fused=DELTA,
            recurrent=True,
            language=_LANGUAGE,
            rope_axes=3,
        ),
        Family("qwen3_vl", "Qwen3VLForConditionalGeneration", language=_LANGUAGE, rope_axes=3),
        Family(
            "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", language=_LANGUAGE, rope_axes=3
        ),
        Family("smolvlm", "SmolVLMForConditionalGeneration", language="text_model"),
        Family("voxtral", "VoxtralForConditionalGeneration", language=_LANGUAGE),
    )
}
"""Models with a tower of images or audio. Most have a language model of another family inside."""
