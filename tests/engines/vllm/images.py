"""Prompts with images for vLLM, and what transformers makes of them.

Pictures are made into a tower's inputs by transformers' processors with the torchvision backend, as
vLLM does; the other backend's pixels differ by up to 0.03.
"""

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
    GenerationConfig,
)

from inlay.digest import media_digest
from inlay.media.spec import Detail, MediaSpec, layout, media_segments
from inlay.prompt import Buffer, Prompt, Segment, Tokens
from inlay.tensors.table import config_of
from tests.engine.torch.vision_reference import Picture, ids_of
from tests.engines.starting import SECRET
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


@cache
def directory_of(family: str) -> Path:
    """A tiny model, its weights named as in published checkpoints of its family.

    transformers reads a tower of CLIP's or SigLIP's by that name and writes it by another, which
    vLLM does not know.
    """
    directory = vision(family, HEAD_DIM)
    weights = load_file(directory / "model.safetensors")
    named = {_published(name): values for name, values in weights.items()}
    if named.keys() != weights.keys():
        save_file(named, directory / "model.safetensors", {"format": "pt"})
    if family in TEMPLATES:
        (directory / "chat_template.jinja").write_text(TEMPLATES[family], encoding="utf-8")
    return directory


def _published(name: str) -> str:
    tower, _, rest = name.partition("vision_tower.")
    plain = rest.startswith(("embeddings.", "encoder.", "post_layernorm.", "pre_layrnorm."))
    return f"{tower}vision_tower.vision_model.{rest}" if plain else name


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
    with torch.no_grad():
        found = model_of(directory).generate(
            **inputs,
            generation_config=GenerationConfig(
                max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
            ),
        )
    return [int(id_) for id_ in found[0, ids.shape[1] :]]


def rows_of(directory: Path, picture: Picture) -> tuple[torch.Tensor, tuple[int, ...] | None]:
    """The rows of a picture as a client's encoder makes them, and its grid where there is one."""
    inputs = _inputs(directory, [picture])
    with torch.no_grad():
        found = model_of(directory).model.get_image_features(**inputs, return_dict=True)
    grid = inputs.get("image_grid_thw")
    rows = torch.cat([part.flatten(0, -2) for part in found.pooler_output])
    return rows, None if grid is None else tuple(grid[0].tolist())


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
