"""Inputs of a tower from a picture, by transformers' image processors with their `pil` backend.

The backends of a processor differ by up to 0.03 in a pixel, so one of them alone is used, and it is
part of the encoder's identity.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoImageProcessor, PreTrainedConfig
from transformers.image_processing_backends import PilBackend

from inlay.errors import EngineError, InvalidRequestError
from inlay.media.model_files import ModelFiles

_Array = npt.NDArray[Any]

BACKEND = "pil"
"""Backend of the image processors."""

_INPUTS = (
    "pixel_values", "image_grid_thw", "image_sizes", "image_position_ids", "pixel_attention_mask",
)  # fmt: skip
"""Outputs of a processor that towers take."""

_IN_SAMPLES = frozenset({"idefics3", "smolvlm"})
"""Families whose processors take a list of images for each sample."""


class ImageProcessor:
    """The image processor of a model."""

    def __init__(self, directory: Path, config: PreTrainedConfig) -> None:
        """Load it.

        Args:
            directory: of the model.
            config: of the model.

        Raises:
            InvalidRequestError: there is none, or it cannot be loaded.
        """
        try:
            self._process = AutoImageProcessor.from_pretrained(
                directory, backend=BACKEND, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise InvalidRequestError(
                f"{directory} has no image processor that can be loaded: {error}"
            ) from error
        if not isinstance(self._process, PilBackend):
            raise InvalidRequestError(
                f"{directory} has an image processor without a {BACKEND} backend "
                f"({type(self._process).__name__})"
            )
        self._nested = config.model_type in _IN_SAMPLES
        self._settings = _family_settings(directory, config)
        _look_values_up(self._process)

    def __call__(self, image: Image.Image, settings: dict[str, Any]) -> dict[str, Tensor]:
        """Return the inputs of the tower for one RGB image, with one image's first dimension.

        Args:
            image: the image.
            settings: arguments of the processor beside the model's own.
        """
        images = [[image]] if self._nested else [image]
        found = self._process(images, return_tensors="pt", **{**self._settings, **settings})
        return {name: torch.as_tensor(found[name]) for name in _INPUTS if name in found}


def _look_values_up(process: PilBackend) -> None:
    """Have a processor normalise a picture of 8 bits by a table of its 256 values.

    The values are those that the processor computes itself, to the bit, at a fifth of the cost.
    """
    if not (process.do_rescale and process.do_normalize):
        return
    rescale, normalize, factor = process.rescale, process.normalize, process.rescale_factor
    every = np.tile(np.arange(256, dtype=np.uint8)[:, None], (3, 1, 1))
    scaled = rescale(every, factor)
    table = normalize(scaled, process.image_mean, process.image_std)[..., 0].astype(np.float32)

    def kept(image: _Array, scale: float, **more: Any) -> _Array:
        if image.dtype == np.uint8 and image.shape[0] == len(table) and scale == factor:
            return image
        scaled: _Array = rescale(image, scale, **more)
        return scaled

    def looked_up(image: _Array, mean: Any, std: Any, **more: Any) -> _Array:
        if image.dtype != np.uint8:
            other: _Array = normalize(image, mean, std, **more)
            return other
        found = np.empty(image.shape, np.float32)
        for channel, values in enumerate(table):
            np.take(values, image[channel], out=found[channel], mode="clip")
        return found

    process.rescale, process.normalize = kept, looked_up


def _family_settings(directory: Path, config: PreTrainedConfig) -> dict[str, Any]:
    """Return the settings that transformers' joint processors give to an image processor."""
    if config.model_type == "internvl":
        return {"crop_to_patches": True}
    if config.vision_config.model_type == "pixtral":
        joint = ModelFiles(directory).processor
        patch = joint.integer("patch_size", config.vision_config.patch_size)
        merge = joint.integer("spatial_merge_size", getattr(config, "spatial_merge_size", 1))
        return {"patch_size": patch * merge}
    return {}


def collate(inputs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join the inputs of several images, padded with zeros at the end of each dimension.

    Towers tell padding by sizes, grids or masks, or drop tiles of zeros.

    Raises:
        EngineError: images with different inputs.
    """
    names = inputs[0].keys()
    if any(one.keys() != names for one in inputs):
        raise EngineError("images of one model have different inputs")
    return {name: _joined([one[name] for one in inputs]) for name in names}


def _joined(parts: list[Tensor]) -> Tensor:
    shape = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    padded = []
    for part in parts:
        room = [
            edge
            for size, wanted in zip(reversed(part.shape[1:]), reversed(shape), strict=True)
            for edge in (0, wanted - size)
        ]
        padded.append(F.pad(part, room) if any(room) else part)
    return torch.cat(padded)


__all__ = ["BACKEND", "ImageProcessor", "collate"]
