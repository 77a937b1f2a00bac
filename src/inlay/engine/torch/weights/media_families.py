"""`ImageFamily`, and the families of generation models with a tower of images or audio."""

from dataclasses import dataclass
from functools import partial
from typing import Literal


@dataclass(frozen=True, slots=True)
class ImageFamily:
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


DELTA = (
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
)
"""Projections of layers of the gated delta rule, and of those between them."""

_with_tower = partial(ImageFamily, language="language_model")
_with_mrope = partial(_with_tower, rope_axes=3)

MEDIA_FAMILIES: dict[str, ImageFamily] = {
    family.model_type: family
    for family in (
        _with_tower("gemma3", "Gemma3ForConditionalGeneration", bidirectional="all"),
        _with_tower("gemma4", "Gemma4ForConditionalGeneration", bidirectional="sliding"),
        _with_mrope("glm4v", "Glm4vForConditionalGeneration"),
        _with_mrope("glm4v_moe", "Glm4vMoeForConditionalGeneration"),
        ImageFamily("idefics3", "Idefics3ForConditionalGeneration", language="text_model"),
        _with_tower("internvl", "InternVLForConditionalGeneration"),
        _with_tower("llama4", "Llama4ForConditionalGeneration", own_head=True),
        _with_tower("llava", "LlavaForConditionalGeneration"),
        _with_tower("llava_next", "LlavaNextForConditionalGeneration"),
        _with_tower("llava_onevision", "LlavaOnevisionForConditionalGeneration"),
        _with_tower("mistral3", "Mistral3ForConditionalGeneration"),
        _with_mrope("qwen2_vl", "Qwen2VLForConditionalGeneration", float32_scores=True),
        _with_mrope("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", float32_scores=True),
        _with_mrope(
            "qwen2_5_omni", "Qwen2_5OmniThinkerForConditionalGeneration", float32_scores=True
        ),
        _with_tower("qwen2_audio", "Qwen2AudioForConditionalGeneration", float32_scores=True),
        _with_mrope("qwen3_5", "Qwen3_5ForConditionalGeneration", fused=DELTA, recurrent=True),
        _with_mrope(
            "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", fused=DELTA, recurrent=True
        ),
        _with_mrope("qwen3_vl", "Qwen3VLForConditionalGeneration"),
        _with_mrope("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),
        ImageFamily("smolvlm", "SmolVLMForConditionalGeneration", language="text_model"),
        _with_tower("voxtral", "VoxtralForConditionalGeneration"),
    )
}
"""Models with a tower of images or audio. Most have a language model of another family inside."""
