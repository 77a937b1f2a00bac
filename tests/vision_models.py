"""Tiny vision-language models with random weights, one of each family the torch engine serves.

    vision("llava")        a cached directory: weights, configuration, image processor, tokenizer

Towers see tiles of 32 pixels in patches of 8, or patches of 4. Weights are drawn wide, so that
logits have a scale at which a wrong position or row shows.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken
from transformers import GenerationConfig, PreTrainedConfig

from tests.model_configs import DELTA, EOS_ID, VOCAB_SIZE
from tests.models import models_root, tokenizer

IMAGE, VISION_START, VISION_END, VIDEO = 380, 381, 382, 383
"""Ids of the tokens that stand for an image's rows, and around and beside them."""

SIDE, PATCH = 32, 8
"""Of a tile that a tower sees, in pixels."""

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": PATCH,
}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_PINPOINTS = [[32, 64], [64, 32], [64, 64]]
_NORM = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}

_Parts = tuple[PreTrainedConfig, Any]


def _made(name: str, **values: Any) -> Any:
    return getattr(transformers, name)(**values)


def _model_config(name: str, text: PreTrainedConfig, vision: PreTrainedConfig, **more: Any) -> Any:
    tied = {"tie_word_embeddings": False, "image_token_id": IMAGE}
    return _made(f"{name}Config", text_config=text, vision_config=vision, **{**tied, **more})


def _llava() -> _Parts:
    config = _model_config(
        "Llava", _made("LlamaConfig", **_TEXT), _made("CLIPVisionConfig", **_TOWER)
    )
    size = {"height": SIDE, "width": SIDE}
    return config, _made(
        "CLIPImageProcessorPil", size={"shortest_edge": SIDE}, crop_size=size, **_NORM
    )


def _llava_next() -> _Parts:
    config = _model_config(
        "LlavaNext",
        _made("MistralConfig", sliding_window=None, **_TEXT),
        _made("CLIPVisionConfig", **_TOWER),
        image_grid_pinpoints=_PINPOINTS,
    )
    size = {"height": SIDE, "width": SIDE}
    return config, _made(
        "LlavaNextImageProcessorPil",
        size={"shortest_edge": SIDE},
        crop_size=size,
        image_grid_pinpoints=_PINPOINTS,
        **_NORM,
    )


def _llava_onevision() -> _Parts:
    config = _model_config(
        "LlavaOnevision",
        _made("Qwen2Config", **_TEXT),
        _made("SiglipVisionConfig", vision_use_head=False, **_TOWER),
        image_grid_pinpoints=_PINPOINTS,
        vision_aspect_ratio="anyres_max_2",
        vision_feature_select_strategy="full",
    )
    return config, _made(
        "LlavaOnevisionImageProcessorPil",
        size={"height": SIDE, "width": SIDE},
        image_grid_pinpoints=_PINPOINTS,
        **_NORM,
    )


def _internvl() -> _Parts:
    size = {"height": SIDE, "width": SIDE}
    tower = {**_TOWER, "image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH]}
    config = _model_config(
        "InternVL",
        _made("Qwen2Config", **_TEXT),
        _made("InternVLVisionConfig", **tower),
        image_seq_length=4,
    )
    return config, _made(
        "GotOcr2ImageProcessorPil", size=size, crop_to_patches=True, max_patches=4, **_NORM
    )


def _mistral3() -> _Parts:
    text = _made("MistralConfig", sliding_window=None, head_dim=16, **_TEXT)
    tower = {**_TOWER, "image_size": 64, "head_dim": 8}
    config = _model_config(
        "Mistral3", text, _made("PixtralVisionConfig", **tower), spatial_merge_size=2
    )
    return config, _made(
        "PixtralImageProcessorPil", size={"longest_edge": 64}, patch_size=PATCH, **_NORM
    )


def _pixtral() -> _Parts:
    text = _made("MistralConfig", sliding_window=None, head_dim=16, **_TEXT)
    config = _model_config(
        "Llava",
        text,
        _made("PixtralVisionConfig", **{**_TOWER, "image_size": 64, "head_dim": 8}),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return config, _made(
        "PixtralImageProcessorPil", size={"longest_edge": 48}, patch_size=PATCH, **_NORM
    )


def _idefics(name: str) -> _Parts:
    config = _model_config(
        name,
        _made("LlamaConfig", **_TEXT),
        _made(f"{name}VisionConfig", **_TOWER),
        scale_factor=2,
    )
    return config, _made(
        f"{name}ImageProcessorPil",
        size={"longest_edge": 2 * SIDE},
        max_image_size={"longest_edge": SIDE},
        **_NORM,
    )


def _gemma3() -> _Parts:
    text = {
        **_TEXT,
        "head_dim": 24,
        "query_pre_attn_scalar": 10,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }
    config = _model_config(
        "Gemma3",
        _made("Gemma3TextConfig", **text),
        _made("SiglipVisionConfig", vision_use_head=False, **_TOWER),
        mm_tokens_per_image=16,
        boi_token_index=VISION_START,
        eoi_token_index=VISION_END,
    )
    return config, _made("Gemma3ImageProcessorPil", size={"height": SIDE, "width": SIDE}, **_NORM)


def _gemma4() -> _Parts:
    text = {
        **_TEXT,
        "head_dim": 16,
        "global_head_dim": 24,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "use_bidirectional_attention": "vision",
    }
    tower = {**_TOWER, "num_key_value_heads": 4, "head_dim": 8, "patch_size": 4}
    del tower["image_size"]
    config = _model_config(
        "Gemma4",
        _made("Gemma4TextConfig", **text),
        _made("Gemma4VisionConfig", position_embedding_size=640, **tower),
        audio_config=None,
        boi_token_id=VISION_START,
        eoi_token_id=VISION_END,
        video_token_id=VIDEO,
        audio_token_id=None,
    )
    return config, _made("Gemma4ImageProcessorPil", patch_size=4, max_soft_tokens=70)


def _qwen(name: str, processor: str = "Qwen2VL", **tower: Any) -> _Parts:
    # As published: transformers interleaves the axes of Qwen3-VL in any case, vLLM if it is told.
    interleaved = name.startswith(("Qwen3VL", "Qwen3_5"))
    rope = {**_MROPE, "mrope_interleaved": True} if interleaved else _MROPE
    text = {**_TEXT, "rope_parameters": rope, "head_dim": 16, **_MORE.get(name, {})}
    if name in ("Qwen2VL", "Qwen2_5_VL"):
        del text["head_dim"]
    config = _model_config(
        name,
        _made(f"{name}TextConfig", **text),
        _made(f"{name}VisionConfig", patch_size=4, spatial_merge_size=2, **tower),
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    return config, _made(
        f"{processor}ImageProcessorPil",
        size={"shortest_edge": 16 * 16, "longest_edge": 48 * 48},
        patch_size=4,
        merge_size=2,
        **_NORM,
    )


class _Llama4Settings:
    """Settings of the image processor, which transformers has with torchvision alone."""

    def save_pretrained(self, directory: Path) -> None:
        settings = {
            "image_processor_type": "Llama4ImageProcessor",
            "size": {"height": SIDE, "width": SIDE},
            "max_patches": 6,
            **_NORM,
        }
        (directory / "preprocessor_config.json").write_text(json.dumps(settings))
        joint = {"processor_class": "Llama4Processor", "patch_size": PATCH}
        (directory / "processor_config.json").write_text(json.dumps(joint))


def _llama4() -> _Parts:
    text = {
        **_TEXT,
        "vocab_size": VOCAB_SIZE + 8,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 40,
        "floor_scale": 32,
        "no_rope_layer_interval": 4,
    }
    tower = {**_TOWER, "intermediate_size": 128, "vision_output_dim": 32}
    projector = {"projector_input_dim": 32, "projector_output_dim": 32}
    config = _model_config(
        "Llama4",
        _made("Llama4TextConfig", **text),
        _made("Llama4VisionConfig", **tower, **projector),
    )
    return config, _Llama4Settings()


_QWEN3: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "depth": 3,
    "num_heads": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}
_QWEN3_5 = {key: value for key, value in _QWEN3.items() if key != "deepstack_visual_indexes"}
_GLM: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "depth": 2,
    "num_heads": 4,
    "out_hidden_size": 64,
    "image_size": 32,
}
_HALF_ROTATED = {**_MROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
_HALF_INTERLEAVED = {**_HALF_ROTATED, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
_MORE: dict[str, dict[str, Any]] = {
    # As published: transformers does without the second, vLLM does not.
    "Glm4v": {"rope_parameters": _HALF_ROTATED, "attention_bias": True},
    "Qwen3VLMoe": {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2},
    "Qwen3_5": {**DELTA, "rope_parameters": _HALF_INTERLEAVED},
    "Qwen3_5Moe": {
        **DELTA,
        "rope_parameters": _HALF_INTERLEAVED,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "num_experts": 6,
        "num_experts_per_tok": 2,
    },
    "Glm4vMoe": {
        "moe_intermediate_size": 24,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "rope_parameters": _HALF_ROTATED,
    },
}

_FAMILIES: dict[str, Callable[[], _Parts]] = {
    "llava": _llava,
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "internvl": _internvl,
    "mistral3": _mistral3,
    "pixtral": _pixtral,
    "idefics3": lambda: _idefics("Idefics3"),
    "smolvlm": lambda: _idefics("SmolVLM"),
    "llama4": _llama4,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "qwen2_vl": lambda: _qwen(
        "Qwen2VL",
        embed_dim=32,
        depth=2,
        num_heads=4,
        hidden_size=64,
        in_chans=3,  # as published, beside in_channels
    ),
    "qwen2_5_vl": lambda: _qwen(
        "Qwen2_5_VL",
        hidden_size=32,
        intermediate_size=48,
        depth=2,
        num_heads=4,
        out_hidden_size=64,
        window_size=16,
        fullatt_block_indexes=[1],
    ),
    "qwen3_vl": lambda: _qwen("Qwen3VL", **_QWEN3),
    "qwen3_vl_moe": lambda: _qwen("Qwen3VLMoe", **_QWEN3),
    "qwen3_5": lambda: _qwen("Qwen3_5", **_QWEN3_5),
    "qwen3_5_moe": lambda: _qwen("Qwen3_5Moe", **_QWEN3_5),
    "glm4v": lambda: _qwen("Glm4v", "Glm4v", **_GLM),
    "glm4v_moe": lambda: _qwen("Glm4vMoe", "Glm4v", **_GLM),
}

FAMILIES = tuple(_FAMILIES)

VIDEO_FAMILIES = tuple(name for name in FAMILIES if name.startswith(("qwen", "glm")))

VIDEO_SETTINGS = {
    "size": {"shortest_edge": 16 * 16 * 4, "longest_edge": 32 * 32 * 4},
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "max_frames": 8,
    **_NORM,
}
"""Of the video processors."""

_GLM_TOKENS = ("<|image|>", "<|begin_of_image|>", "<|end_of_image|>", "<|video|>")

_TOKENS: dict[str, tuple[str, ...]] = {
    "internvl": ("<IMG_CONTEXT>", "<img>", "</img>"),
    "mistral3": ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    "idefics3": ("<image>", "<fake_token_around_image>", "<global-img>"),
    "smolvlm": ("<image>", "<fake_token_around_image>", "<global-img>"),
    "llama4": (
        "<|patch|>",
        "<|image|>",
        "<|image_start|>",
        "<|image_end|>",
        "<|tile_x_separator|>",
        "<|tile_y_separator|>",
    ),
    "gemma3": ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
    "gemma4": ("<|image|>", "<|image>", "<image|>"),
    "glm4v": _GLM_TOKENS,
    "glm4v_moe": _GLM_TOKENS,
    "pixtral": ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    "qwen": ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"),
}
"""Special tokens from id `IMAGE` on; of other families `<image>` alone."""


def _enlarge(config: Any, processor: Any, patch: int) -> None:
    """Patches of `patch` pixels a side in place of 4, of as many to an image."""
    larger = (patch / config.vision_config.patch_size) ** 2
    processor.size = {name: int(larger * area) for name, area in dict(processor.size).items()}
    tower = config.vision_config
    if hasattr(tower, "window_size"):
        tower.window_size = tower.window_size * patch // tower.patch_size
    tower.patch_size = processor.patch_size = patch


@cache
def vision(family: str, head_dim: int | None = None, patch: int | None = None) -> Path:
    """The directory of a tiny model of `family`, made once and shared; treat it as read-only.

    `head_dim` is of the language model's heads, and `patch` the side of a patch of 4 pixels, for
    engines that do not run all sizes.
    """
    config, processor = _FAMILIES[family]()
    directory = models_root() / f"{family}-vision"
    if head_dim is not None:
        directory = directory.with_name(f"{family}-vision-{head_dim}")
        _widen(config, head_dim)
    if patch is not None:
        directory = directory.with_name(f"{directory.name}-{patch}")
        _enlarge(config, processor, patch)
    state = torch.random.get_rng_state()
    torch.manual_seed(20261123)
    try:
        model = transformers.AutoModelForImageTextToText.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _draw(name, parameter, centred=family.startswith("qwen3_5"))
    finally:
        torch.random.set_rng_state(state)
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=0)
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    if family in VIDEO_FAMILIES:
        (directory / "video_preprocessor_config.json").write_text(json.dumps(VIDEO_SETTINGS))
    if family in ("idefics3", "smolvlm"):
        joint = {"processor_class": "Idefics3Processor", "image_seq_len": 4}
        (directory / "processor_config.json").write_text(json.dumps(joint))
    _save_tokenizer(directory, _TOKENS.get("qwen" if family.startswith("qwen") else family))
    return directory


def _widen(config: Any, head_dim: int) -> None:
    """Give the heads of a model's language model `head_dim` elements."""
    text, vision = config.text_config, config.vision_config
    scale = head_dim * text.num_attention_heads / text.hidden_size
    text.hidden_size = head_dim * text.num_attention_heads
    if hasattr(text, "head_dim"):
        text.head_dim = head_dim
    rope = getattr(text, "rope_parameters", None)
    if rope is not None and "mrope_section" in rope:
        sections = [int(scale * size) for size in rope["mrope_section"]]
        text.rope_parameters = {**rope, "mrope_section": sections}
    if hasattr(vision, "out_hidden_size"):
        vision.out_hidden_size = text.hidden_size
    if config.model_type == "qwen2_vl":
        vision.hidden_size = text.hidden_size


def _save_tokenizer(directory: Path, names: tuple[str, ...] | None, first: int = IMAGE) -> None:
    """Write the common tokenizer with special tokens from id `first` on."""
    tokenizer().save_pretrained(directory)
    made = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    texts = [f"<unused{index}>" for index in range(len(made), first)]
    texts += names or ("<image>",)
    made.add_tokens([AddedToken(text, special=True, normalized=False) for text in texts])
    made.save_pretrained(directory)


def _draw(name: str, parameter: torch.Tensor, *, centred: bool = False) -> None:
    """Draw the values of one parameter; norms multiply by one plus theirs if `centred`."""
    noise = torch.randn_like(parameter)
    if name.endswith("A_log"):
        # States last for some twenty positions.
        parameter.copy_(noise - 3)
    elif parameter.ndim == 1 and centred and name.endswith("norm.weight"):
        parameter.copy_(0.2 * noise)
    elif parameter.ndim == 1:
        parameter.copy_(1 + 0.2 * noise if name.endswith("weight") else 0.3 * noise)
    elif name.endswith("embed_tokens.weight"):
        parameter.copy_(0.5 * noise)
    elif parameter.ndim == 2 and "embed" not in name:
        scale = 4.0 if name.endswith("lm_head.weight") else 1.5
        parameter.copy_(noise * (scale / parameter.shape[-1] ** 0.5))
    else:
        parameter.copy_(noise * 0.3)
