"""Prompts with images for engines with towers of their own, and what transformers makes of them.

Pictures are made into a tower's inputs by transformers' processors with the torchvision backend,
as these engines do.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from inlay.media.spec import Detail, MediaSpec, layout, media_segments
from inlay.messages.digest import media_digest
from inlay.messages.prompt import Buffer, Prompt, Segment, Tokens
from inlay.tensors.checkpoint import config_of
from tests.engine.torch.vision_reference import Picture, ids_of
from tests.engines.starting import SECRET
from tests.equality.reference import endless
from tests.equality.test_images_over_http import TEMPLATES
from tests.vision_models import IMAGE, PATCH, vision

Parts: TypeAlias = Sequence[list[int] | Picture]
"""A prompt: token ids and pictures."""

HEAD_DIM = 32
"""Elements of the language models' heads: vLLM's attention on a CPU takes no fewer."""

_JOINT: dict[str, dict[str, Any]] = {
    "mistral3": {"patch_size": 2 * PATCH},
    "internvl": {"crop_to_patches": True},
}
"""Arguments that transformers' joint processors pass on."""


_NAMED: dict[str, dict[str, str]] = {
    "internvl": {
        "context_image_token": "<IMG_CONTEXT>",
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "video_token": "<video>",
    },
    "glm4v": {"start": "<|begin_of_video|>", "end": "<|end_of_video|>"},
    "llava_onevision": {"video_token": "<video>"},
}
"""Special tokens by the names under which published tokenizers have them."""

_FILES: dict[str, dict[str, dict[str, Any]]] = {
    "internvl": {"processor_config.json": {"image_seq_length": 4}},
    "glm4v": {"config.json": {"video_start_token_id": IMAGE + 4, "video_end_token_id": IMAGE + 5}},
    # As published: the largest picture is as large as the tower's.
    "pixtral": {
        "preprocessor_config.json": {"size": {"longest_edge": 8 * PATCH}},
        "processor_config.json": {"patch_size": PATCH},
    },
    "llava_onevision": {
        "config.json": {"video_token_index": IMAGE + 1, "vision_aspect_ratio": "anyres_max_9"},
        "processor_config.json": {
            "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_9",
        },
    },
}
"""Further settings in the files of a model."""


@cache
def directory_of(family: str, patch: int | None = None) -> Path:
    """A tiny model, its weights named as in published checkpoints of its family.

    transformers reads a tower of CLIP's or SigLIP's by that name and writes it by another, which
    vLLM does not know.
    """
    directory = vision(family, HEAD_DIM, patch)
    weights = load_file(directory / "model.safetensors")
    named = {_published(name): values for name, values in weights.items()}
    tower = config_of(directory)["vision_config"]["model_type"]
    if tower in ("clip_vision_model", "siglip_vision_model"):
        save_file(named, directory / "model.safetensors", {"format": "pt"})
    if family in TEMPLATES:
        (directory / "chat_template.jinja").write_text(TEMPLATES[family], encoding="utf-8")
    if family in _NAMED:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            directory, extra_special_tokens=_NAMED[family]
        )
        tokenizer.save_pretrained(directory)
    for name, values in _FILES.get(family, {}).items():
        file = directory / name
        known = json.loads(file.read_bytes()) if file.exists() else {}
        file.write_text(json.dumps({**known, **values}), encoding="utf-8")
    return directory


def _published(name: str) -> str:
    tower, _, rest = name.partition("vision_tower.")
    return f"{tower}vision_tower.vision_model.{rest}" if rest else name


def prompt_of(spec: MediaSpec, parts: Parts, detail: Detail | None = None) -> Prompt:
    """The prompt as a frontend lays it out."""
    segments: list[Segment] = []
    for part in parts:
        if not isinstance(part, Picture):
            segments.append(Tokens(part))
            continue
        settings = "low" if detail == "low" else ""
        digest = media_digest(
            part.data, SECRET, kind="image", encoder_id=spec.encoder_id, settings=settings
        )
        laid = layout(spec, part.height, part.width, detail)
        segments += media_segments(laid, digest, Buffer(part.data), detail=detail)
    return Prompt.of(*segments)


@cache
def model_of(directory: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()


@cache
def _processor(directory: Path) -> Any:
    return AutoImageProcessor.from_pretrained(directory, backend="torchvision")


def _inputs(
    directory: Path, pictures: Sequence[Picture], processing: Mapping[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    family = str(config_of(directory)["model_type"])
    images = [picture.image for picture in pictures]
    nested = [images] if family in ("idefics3", "smolvlm") else images
    given = {**_JOINT.get(family, {}), **(processing or {})}
    found = _processor(directory)(images=nested, return_tensors="pt", **given)
    keys = ("pixel_values", "image_sizes", "image_grid_thw", "pixel_attention_mask")
    return {key: torch.as_tensor(found[key]) for key in keys if key in found}


def greedy(
    directory: Path,
    spec: MediaSpec,
    parts: Parts,
    count: int,
    processing: Mapping[str, Any] | None = None,
) -> list[int]:
    """`count` tokens of transformers' `generate` in float32, whatever they are."""
    ids = torch.tensor([ids_of(prompt_of(spec, parts))])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    pictures = [part for part in parts if isinstance(part, Picture)]
    if pictures:
        inputs |= _inputs(directory, pictures, processing)
        if spec.mrope:
            inputs["mm_token_type_ids"] = (ids == IMAGE).long()
    found = endless(model_of(directory), count, **inputs)
    return [int(id_) for id_ in found[0, ids.shape[1] :]]


def rows_of(
    directory: Path, picture: Picture, processing: Mapping[str, Any] | None = None
) -> tuple[torch.Tensor, tuple[int, ...] | None]:
    """The rows of a picture as a client's encoder makes them, and its grid where there is one."""
    inputs = _inputs(directory, [picture], processing)
    with torch.no_grad():
        found = model_of(directory).model.get_image_features(**inputs, return_dict=True)
    grid = inputs.get("image_grid_thw")
    levels = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
    flat = [torch.cat([part.flatten(0, -2) for part in _by_image(level)]) for level in levels]
    return torch.cat(flat, dim=-1), None if grid is None else tuple(grid[0].tolist())


def _by_image(rows: Any) -> Any:
    """Rows of each image; of some families they come as those of all in one tensor."""
    return [rows] if isinstance(rows, torch.Tensor) and rows.ndim == 2 else rows


def looked_up(directory: Path, ids: Sequence[int]) -> torch.Tensor:
    """The rows of the embedding table for `ids`."""
    rows: torch.Tensor = model_of(directory).get_input_embeddings()(torch.tensor(ids)).detach()
    return rows


def chat_parts(directory: Path, *content: str | Picture) -> Parts:
    """The ids and pictures of one user's message, by the model's chat template."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    parts = [
        {"type": "text", "text": each} if isinstance(each, str) else {"type": "image"}
        for each in content
    ]
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=True, return_dict=False
    )
    pictures = iter([each for each in content if isinstance(each, Picture)])
    split: list[list[int] | Picture] = []
    for id_ in ids:
        if id_ == IMAGE:
            split.append(next(pictures))
        elif split and isinstance(split[-1], list):
            split[-1].append(id_)
        else:
            split.append([id_])
    return split
