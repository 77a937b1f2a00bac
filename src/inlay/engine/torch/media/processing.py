"""Inputs of a tower from a picture, by transformers' image processors over torch's operations.

transformers' faster backend of them needs torchvision, whose operations on pixels are torch's. Here
they take the place of Pillow's in the other backend. The two differ by up to two levels of 255 in a
pixel, so that what resizes is part of the encoder's identity.
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
from transformers.image_transforms import get_resize_output_image_size, get_size_with_aspect_ratio
from transformers.image_utils import ChannelDimension, SizeDict
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

from inlay.base.errors import EngineError, InvalidRequestError
from inlay.engine.pictures import rgb_array
from inlay.engine.torch.media.pixels import Normalization, mode_of, resized
from inlay.media.model_files import ModelFiles
from inlay.tensors.tidy_directory import tidied

_Array = npt.NDArray[Any]

BACKEND = "torch"
"""Operations on pixels, for the identity of an encoder."""

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

        Raises:
            InvalidRequestError: there is none, or it cannot be loaded.
        """
        try:
            with tidied(directory) as tidy:
                self._process = AutoImageProcessor.from_pretrained(
                    tidy, backend="pil", local_files_only=True, trust_remote_code=False
                )
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise InvalidRequestError(
                f"{directory} has no image processor that can be loaded: {error}"
            ) from error
        if not isinstance(self._process, PilBackend):
            raise InvalidRequestError(
                f"{directory} has an image processor without a pil backend "
                f"({type(self._process).__name__})"
            )
        self._nested = config.model_type in _IN_SAMPLES
        self._settings = _family_settings(directory, config)
        _over_torch(self._process)

    def __call__(self, image: Image.Image, settings: dict[str, Any]) -> dict[str, Tensor]:
        """Return the inputs of the tower for one RGB image, with one image's first dimension.

        Args:
            image: the image.
            settings: arguments of the processor beside the model's own.
        """
        pixels = rgb_array(image)  # transformers would copy them three times
        found = self._process(
            [[pixels]] if self._nested else [pixels],
            return_tensors="pt",
            input_data_format=ChannelDimension.LAST,
            **{**self._settings, **settings},
        )
        return {name: torch.as_tensor(found[name]) for name in _INPUTS if name in found}


class _TorchSteps(PilBackend):  # type: ignore[misc]  # transformers has no types
    """Steps of torch in place of Pillow's and numpy's, behind a family's own.

    Pixels stay 8-bit until they are normalised.
    """

    def resize(self, image: _Array, size: SizeDict, resample: Any = None, **_: Any) -> _Array:
        """Resize [3, H, W]."""
        if size.height is not None and size.width is not None:
            sides = (size.height, size.width)
        elif size.longest_edge:
            sides = get_size_with_aspect_ratio(
                image.shape[1:], size.shortest_edge, size.longest_edge
            )
        else:
            sides = get_resize_output_image_size(
                image,
                size=size.shortest_edge,
                default_to_square=False,
                input_data_format=ChannelDimension.FIRST,
            )
        mode = mode_of(Image.Resampling.BILINEAR if resample is None else resample)
        return resized(torch.from_numpy(image), sides, mode).numpy()

    def rescale(self, image: _Array, scale: float, **_: Any) -> _Array:
        """Rescale, unless normalising will."""
        return image if self.do_normalize else image * np.float32(scale)

    def normalize(self, image: _Array, mean: Any, std: Any, **_: Any) -> _Array:
        """Normalise [3, H, W], and rescale it first where the processor does."""
        factor = self.rescale_factor if self.do_rescale else 1.0
        return Normalization(factor, mean, std)(image)


class _KeepsShape:
    """Resizing of Gemma 4's processor, which calls Pillow by itself."""

    def aspect_ratio_preserving_resize(
        self,
        image: _Array,
        patch_size: int,
        max_patches: int,
        pooling_kernel_size: int,
        resample: int,
    ) -> _Array:
        """Resize [3, H, W]."""
        size = get_aspect_ratio_preserving_size(
            *image.shape[1:], patch_size, max_patches, pooling_kernel_size
        )
        return resized(torch.from_numpy(image), size, mode_of(resample)).numpy()


def _over_torch(process: PilBackend) -> None:
    """Have a processor work by torch's operations."""
    family = type(process)
    before = (_KeepsShape,) if hasattr(family, "aspect_ratio_preserving_resize") else ()
    # The steps come after the family's class, whose own ones call the next.
    process.__class__ = type(family.__name__, (*before, family, _TorchSteps), {})


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
