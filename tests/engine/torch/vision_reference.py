"""What `transformers.generate` makes of prompts with media, and the same prompts as `Prompt`s.

A prompt is a list of token ids and items: `Picture`s, `Sound`s or `Clip`s. A case is a family of
`tests.vision_models` or `tests.audio_models`, `FAMILY+video`, or one of `OMNI_CASES`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from unittest.mock import patch

import numpy as np
import soundfile
import torch
import transformers
from PIL import Image
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    image_processing_backends,
)
from transformers.models.gemma4 import image_processing_pil_gemma4

from inlay.media.families import spec_of
from inlay.media.frames import pack_frames
from inlay.media.items import audio_item, video_item
from inlay.media.spec import MediaSpec, layout, media_segments
from inlay.messages.digest import Secret, media_digest
from inlay.messages.prompt import Buffer, Prompt, Segment, Tokens
from inlay.render import Renderer
from tests.audio_models import AUDIO_FAMILIES, RATE, audio, extractor
from tests.equality.reference import endless
from tests.media.processors import from_source, llama4_pixels
from tests.omni_models import AROUND, MEDIA, omni, whole
from tests.vision_models import (
    _NORM,
    IMAGE,
    PATCH,
    SIDE,
    VIDEO,
    VIDEO_FAMILIES,
    VIDEO_SETTINGS,
    vision,
)

OMNI_CASES = ("qwen2_5_omni", "qwen2_5_omni+mixed")
VIDEO_CASES = tuple(f"{family}+video" for family in VIDEO_FAMILIES)


def directory_of(case: str) -> Path:
    """The model of a case."""
    family = case.removesuffix("+video")
    if case in OMNI_CASES:
        return omni()
    return audio(family) if family in AUDIO_FAMILIES else vision(family)


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


@dataclass(frozen=True)
class Sound:
    """Two tones and noise, `samples` long, as a 16-bit WAV file."""

    seed: int
    samples: int

    @property
    def data(self) -> bytes:
        random = np.random.default_rng(self.seed)
        time = np.arange(self.samples) / RATE
        tones = sum(np.sin(2 * np.pi * hertz * time) for hertz in random.uniform(100, 6000, 2))
        file = BytesIO()
        sound = 0.3 * tones + 0.05 * random.standard_normal(self.samples)
        soundfile.write(file, sound, RATE, format="WAV", subtype="PCM_16")
        return file.getvalue()


@dataclass(frozen=True)
class Clip:
    """Frames of noise over gradients, each `height` x `width` pixels, as PNG files."""

    seed: int
    frames: int
    height: int
    width: int
    fps: float = 2.0

    @property
    def pictures(self) -> list[Picture]:
        first = 1000 * self.seed
        return [Picture(first + index, self.height, self.width) for index in range(self.frames)]

    @property
    def data(self) -> bytes:
        return pack_frames([picture.data for picture in self.pictures], self.fps)


Item: TypeAlias = Picture | Sound | Clip
Parts: TypeAlias = Sequence[list[int] | Item]


class Truth(NamedTuple):
    """What transformers generates: ids, and float32 logits [len(ids), vocabulary]."""

    ids: list[int]
    logits: Tensor


@cache
def model_of(directory: Path) -> Any:
    if directory == omni():
        return whole().thinker
    (name,) = AutoConfig.from_pretrained(directory).architectures
    return getattr(transformers, name).from_pretrained(directory, dtype=torch.float32).eval()


@cache
def processor_of(directory: Path) -> Any:
    return AutoImageProcessor.from_pretrained(directory, backend="pil")


_MODES = {1: "lanczos", 2: "bilinear", 3: "bicubic"}


def resize(image: Any, size: tuple[int, int], resample: int, **_: Any) -> Any:
    """torchvision's operation, for uint8 [3, height, width]."""
    pixels_ = torch.from_numpy(np.array(image))[None]
    return functional.interpolate(pixels_, size, mode=_MODES[resample], antialias=True)[0].numpy()


def rescale(image: Any, scale: float, **_: Any) -> Any:
    """torchvision's operation, for uint8 [3, height, width] that are not normalised."""
    return (torch.from_numpy(np.array(image)) * scale).numpy()


def normalize(image: Any, mean: Any, std: Any, **_: Any) -> Any:
    """torchvision's operation, for uint8 [3, height, width] that were not rescaled."""
    values = torch.from_numpy(np.array(image)).float()
    by = [(torch.tensor(each) * 255.0).view(3, 1, 1) for each in (mean, std)]
    return ((values - by[0]) / by[1]).numpy()


def as_torchvision(processor: Any, images: Any, **settings: Any) -> Any:
    """The output of a processor of Pillow's backend that takes torchvision's steps.

    `tests/engines/vllm/test_pixels.py` compares with torchvision where that is installed.
    """
    with ExitStack() as undo:
        for module in (image_processing_backends, image_processing_pil_gemma4):
            name = "np_resize" if hasattr(module, "np_resize") else "resize"
            undo.enter_context(patch.object(module, name, resize))
        kept = rescale if not processor.do_normalize else lambda image, **_: image
        undo.enter_context(patch.object(image_processing_backends, "np_rescale", kept))
        undo.enter_context(patch.object(image_processing_backends, "np_normalize", normalize))
        return processor(images=images, return_tensors="pt", **settings)


def pixels(family: str, pictures: Sequence[Picture], **settings: Any) -> dict[str, Tensor]:
    """The processor's output for some pictures together, with `settings` beside its own."""
    images = [picture.image for picture in pictures]
    if family == "llama4":
        found = llama4_pixels(images, SIDE, 6, [*_NORM.values()], **settings)
        return {"pixel_values": found.float()}
    nested = [images] if family in ("idefics3", "smolvlm") else images
    # What transformers' joint processors pass on.
    joint: dict[str, dict[str, Any]] = {
        "mistral3": {"patch_size": 2 * PATCH},
        "internvl": {"crop_to_patches": True},
    }
    found = as_torchvision(
        processor_of(directory_of(family)), nested, **{**joint.get(family, {}), **settings}
    )
    keys = (
        "pixel_values", "image_sizes", "image_grid_thw", "image_position_ids",
        "pixel_attention_mask",
    )  # fmt: skip
    return {key: torch.as_tensor(found[key]) for key in keys if key in found}


def spectra(case: str, sounds: Sequence[Sound]) -> dict[str, Tensor]:
    """The feature extractor's output for some sounds, as the family's processor asks for it."""
    made = [soundfile.read(BytesIO(sound.data), dtype="float32")[0] for sound in sounds]
    given = {"sampling_rate": RATE, "return_tensors": "pt"}
    if case == "qwen2_audio" or case in OMNI_CASES:
        found = extractor()(made, padding="max_length", return_attention_mask=True, **given)
        return {
            "input_features": found["input_features"],
            "feature_attention_mask": found["attention_mask"],
        }
    chunk = 2 * RATE
    chunks = []
    for sound in made:
        found = extractor()(
            sound, padding=True, truncation=False, pad_to_multiple_of=chunk, **given
        )
        chunks += found["input_features"][0].split(200, dim=1)
    return {"input_features": torch.stack(chunks)}


def patches(case: str, clips: Sequence[Clip]) -> dict[str, Any]:
    """Frames resized as by torchvision, cut into patches by transformers' own function."""
    module = "qwen2_vl" if case.startswith("qwen2") else "qwen3_vl"
    module = "glm4v" if case.startswith("glm") else module
    cut = from_source(f"{module}/video_processing_{module}.py", "patchify", torch=torch)["patchify"]
    found, grids, seconds = [], [], []
    mean, std = (VIDEO_SETTINGS[name] for name in ("image_mean", "image_std"))
    for clip in clips:
        laid, _ = _laid_video(case, clip)
        height, width = laid.size
        frames = [
            resize(np.asarray(picture.image).transpose(2, 0, 1), (height, width), 3)
            for picture in clip.pictures
        ]
        pixels_ = torch.from_numpy(np.stack([normalize(frame, mean, std) for frame in frames]))
        flat, *grid = cut(None, pixels_[None], 4, 2, 2)
        found.append(flat[0])
        grids.append(grid)
        seconds.append(2 / clip.fps)
    made: dict[str, Any] = {
        "pixel_values_videos": torch.cat(found),
        "video_grid_thw": torch.tensor(grids),
    }
    if case in OMNI_CASES:
        return made | {"video_second_per_grid": torch.tensor(seconds)}
    return made | ({"second_per_grid_ts": seconds} if case.startswith("qwen2_5") else {})


@cache
def encode_of(case: str) -> Callable[[str], tuple[int, ...]]:
    """Tokenizes the times of a video."""
    renderer = Renderer.load(directory_of(case))
    return lambda text: renderer.encode(text, add_special_tokens=False)


def _laid_video(case: str, clip: Clip) -> Any:
    video = spec(case).video
    assert video is not None
    times = [index / clip.fps for index in range(clip.frames)]
    return video.layout(clip.height, clip.width, times, clip.fps, encode_of(case))


@cache
def spec(case: str) -> MediaSpec:
    video = case.removesuffix("+video") in VIDEO_FAMILIES or case in OMNI_CASES
    found = spec_of(directory_of(case), video=video)
    assert found is not None
    return found


def segments_of(case: str, item: Item) -> list[Segment]:
    """The positions of an item, laid out as a frontend does."""
    secret, data = Secret(bytes(32)), Buffer(item.data)
    if isinstance(item, Sound):
        return list(audio_item(spec(case), data, secret).segments)
    if isinstance(item, Clip):
        return list(video_item(spec(case), data, secret, encode_of(case)).segments)
    digest = media_digest(item.data, secret, kind="image", encoder_id="tower")
    laid = layout(spec(case), item.height, item.width)
    return media_segments(laid, digest, data, atomic=spec(case).atomic)


def surrounded(parts: Parts) -> Parts:
    """`parts` with the tokens around each item by which transformers finds it in Qwen2.5-Omni."""
    found: list[list[int] | Item] = []
    for part in parts:
        if isinstance(part, list):
            found.append(part)
        else:
            before, after = AROUND["audio" if isinstance(part, Sound) else "image"]
            found += [[before], part, [after]]
    return found


def prompt_of(case: str, parts: Parts) -> Prompt:
    """The prompt as an engine takes it."""
    segments: list[Segment] = []
    for part in parts:
        segments += [Tokens(part)] if isinstance(part, list) else segments_of(case, part)
    return Prompt.of(*segments)


def ids_of(prompt: Prompt, row: int = IMAGE, rows: Mapping[str, int] | None = None) -> list[int]:
    """Ids of a prompt, with `row` for rows of media, or an id for those of each kind."""
    return [
        id_
        for segment in prompt.segments
        for id_ in (
            segment.ids
            if isinstance(segment, Tokens)
            else [(rows or {}).get(getattr(segment, "kind", ""), row)] * len(segment)
        )
    ]


@torch.no_grad()
def states_of(case: str, parts: Parts) -> Tensor:
    """The last hidden states of all positions of a prompt by transformers: float32 [T, C]."""
    model = model_of(directory_of(case))
    if case == "llama4":  # it has no body without a head
        whole = model(**inputs_of(case, parts), output_hidden_states=True)
        last: Tensor = whole.hidden_states[-1][0]
        return last
    body = getattr(model, model.base_model_prefix)
    states: Tensor = body(**inputs_of(case, parts)).last_hidden_state[0]
    return states


@cache
def _generated(case: str, parts: tuple[tuple[int, ...] | Item, ...], count: int) -> Truth:
    return _by(model_of(directory_of(case)), case, parts, count)


def inputs_of(case: str, parts: Sequence[list[int] | Item]) -> dict[str, Any]:
    """What the family's processor gives to the model."""
    prompt = prompt_of(case, parts)
    # Rows of GLM's videos have the id of images.
    row = VIDEO if case.endswith("+video") and case.startswith("qwen") else IMAGE
    ids = torch.tensor([ids_of(prompt, row, MEDIA if case in OMNI_CASES else None)])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    items = [part for part in parts if not isinstance(part, list)]
    if not items:
        return inputs
    if case in OMNI_CASES:
        return inputs | omni_inputs(case, items)
    kinds = (ids == row).long()
    if case.endswith("+video"):
        clips = [item for item in items if isinstance(item, Clip)]
        return inputs | patches(case, clips) | {"mm_token_type_ids": 2 * kinds}
    if case in AUDIO_FAMILIES:
        return inputs | spectra(case, [item for item in items if isinstance(item, Sound)])
    inputs |= pixels(case, [item for item in items if isinstance(item, Picture)])
    if case.startswith(("qwen", "glm", "gemma4")):
        inputs["mm_token_type_ids"] = kinds
    if case == "gemma3":
        inputs["token_type_ids"] = kinds
    return inputs


def omni_inputs(case: str, items: Sequence[Item]) -> dict[str, Any]:
    """What the processor of Qwen2.5-Omni makes of items of all kinds."""
    pictures = [item for item in items if isinstance(item, Picture)]
    sounds = [item for item in items if isinstance(item, Sound)]
    clips = [item for item in items if isinstance(item, Clip)]
    return {
        **(pixels(case, pictures) if pictures else {}),
        **(spectra(case, sounds) if sounds else {}),
        **(patches(case, clips) if clips else {}),
    }


def _by(model: Any, case: str, parts: tuple[tuple[int, ...] | Item, ...], count: int) -> Truth:
    inputs = inputs_of(case, [list(part) if isinstance(part, tuple) else part for part in parts])
    start = inputs["input_ids"].shape[1]
    found = endless(model, count, **inputs, return_dict_in_generate=True, output_logits=True)
    return Truth(found.sequences[0, start:].tolist(), torch.cat(found.logits).float())


def generated(case: str, parts: Parts, count: int, model: Any = None) -> Truth:
    """`count` greedy tokens of transformers for a prompt, and their logits; by another `model`."""
    fixed = tuple(tuple(part) if isinstance(part, list) else part for part in parts)
    if model is not None:
        return _by(model, case, fixed, count)
    return _generated(case, fixed, count)
