"""What `transformers.generate` makes of prompts with images, and the same prompts as `Prompt`s.

A prompt is a list of token ids and `Picture`s.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForImageTextToText, GenerationConfig

from inlay.digest import Secret, media_digest
from inlay.media.families import spec_of
from inlay.media.spec import MediaSpec, layout, media_segments
from inlay.prompt import Buffer, Prompt, Segment, Tokens
from tests.vision_models import IMAGE, PATCH, vision


@dataclass(frozen=True)
class Picture:
    """A picture of noise over a gradient, `height` x `width` pixels, as a PNG file."""

    seed: int
    height: int
    width: int

    @property
    def image(self) -> Image.Image:
        noise = np.random.default_rng(self.seed).integers(0, 96, (self.height, self.width, 3))
        slope = np.linspace(0, 159, self.width)[None, :, None]
        return Image.fromarray((noise + slope).astype(np.uint8))

    @property
    def data(self) -> bytes:
        file = BytesIO()
        self.image.save(file, "PNG")
        return file.getvalue()


Parts: TypeAlias = Sequence[list[int] | Picture]


class Truth(NamedTuple):
    """What transformers generates: ids, and float32 logits [len(ids), vocabulary]."""

    ids: list[int]
    logits: Tensor


@cache
def model_of(directory: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()


@cache
def processor_of(directory: Path) -> Any:
    return AutoImageProcessor.from_pretrained(directory, backend="pil")


def pixels(family: str, pictures: Sequence[Picture], **settings: Any) -> dict[str, Tensor]:
    """The processor's output for some pictures together, with `settings` beside its own."""
    images = [picture.image for picture in pictures]
    nested = [images] if family in ("idefics3", "smolvlm") else images
    # What transformers' joint processors pass on.
    joint: dict[str, dict[str, Any]] = {
        "mistral3": {"patch_size": 2 * PATCH},
        "internvl": {"crop_to_patches": True},
    }
    found = processor_of(vision(family))(
        images=nested, return_tensors="pt", **{**joint.get(family, {}), **settings}
    )
    keys = (
        "pixel_values", "image_sizes", "image_grid_thw", "image_position_ids",
        "pixel_attention_mask",
    )  # fmt: skip
    return {key: torch.as_tensor(found[key]) for key in keys if key in found}


@cache
def spec(family: str) -> MediaSpec:
    found = spec_of(vision(family))
    assert found is not None
    return found


def prompt_of(family: str, parts: Parts) -> Prompt:
    """The prompt as an engine takes it, laid out as a frontend does."""
    segments: list[Segment] = []
    for part in parts:
        if isinstance(part, Picture):
            digest = media_digest(part.data, Secret(bytes(32)), kind="image", encoder_id="tower")
            laid = layout(spec(family), part.height, part.width)
            data = Buffer(part.data)
            segments += media_segments(laid, digest, data, atomic=spec(family).atomic)
        else:
            segments.append(Tokens(part))
    return Prompt.of(*segments)


def ids_of(prompt: Prompt) -> list[int]:
    return [
        id_
        for segment in prompt.segments
        for id_ in (segment.ids if isinstance(segment, Tokens) else [IMAGE] * len(segment))
    ]


@cache
def _generated(family: str, parts: tuple[tuple[int, ...] | Picture, ...], count: int) -> Truth:
    return _by(model_of(vision(family)), family, parts, count)


def _by(model: Any, family: str, parts: tuple[tuple[int, ...] | Picture, ...], count: int) -> Truth:
    listed = [part if isinstance(part, Picture) else list(part) for part in parts]
    ids = torch.tensor([ids_of(prompt_of(family, listed))])
    pictures = [part for part in parts if isinstance(part, Picture)]
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if pictures:
        inputs |= pixels(family, pictures)
        kinds = (ids == IMAGE).long()
        if family.startswith(("qwen", "glm", "gemma4")):
            inputs["mm_token_type_ids"] = kinds
        if family == "gemma3":
            inputs["token_type_ids"] = kinds
    own, model.generation_config = model.generation_config, GenerationConfig(pad_token_id=0)
    try:
        with torch.no_grad():
            found = model.generate(
                **inputs,
                generation_config=GenerationConfig(
                    max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
                ),
                return_dict_in_generate=True,
                output_logits=True,
            )
    finally:
        model.generation_config = own
    return Truth(found.sequences[0, ids.shape[1] :].tolist(), torch.cat(found.logits).float())


def generated(family: str, parts: Parts, count: int, model: Any = None) -> Truth:
    """`count` greedy tokens of transformers for a prompt, and their logits; by another `model`."""
    fixed = tuple(part if isinstance(part, Picture) else tuple(part) for part in parts)
    if model is not None:
        return _by(model, family, fixed, count)
    return _generated(family, fixed, count)
