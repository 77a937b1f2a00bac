"""Inputs of towers that see a grid of patches: those of Qwen2-VL and later, and GLM-4V.

The steps are those of `Qwen2VLImageProcessor` and `Glm4vImageProcessor` in transformers 5.23, and
of their video processors; sizes are those of the layout.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from inlay.engine.torch.media.pixels import (
    Normalization,
    mode_of,
    pixels_of,
    refuse_left_out_steps,
    resized,
)
from inlay.media.geometry import PatchGrid
from inlay.media.model_files import ModelFiles

_BAND = 1 << 17
"""Pixels of a channel that are normalised and cut at a time, so that they stay in a CPU's cache."""


class PatchProcessor:
    """Resizes pictures, and cuts them into patches in the order of a tower.

    Called with a picture and the settings of its layout, as `ImageProcessor`.
    """

    def __init__(
        self, directory: Path, geometry: PatchGrid, more: Mapping[str, Any] | None = None
    ) -> None:
        """Read the settings.

        Args:
            directory: of the model.
            geometry: layout of the model's images.
            more: settings in place of the image processor's own.

        Raises:
            InvalidRequestError: another interpolation, or a step that is left out.
        """
        settings = ModelFiles(directory).image.over(
            {
                "resample": int(Image.Resampling.BICUBIC),
                "rescale_factor": 1 / 255,
                "image_mean": OPENAI_CLIP_MEAN,
                "image_std": OPENAI_CLIP_STD,
                "temporal_patch_size": 2,
            }
        )
        refuse_left_out_steps(settings)
        norm = {name: settings.get(name) for name in ("image_mean", "image_std")}
        norm |= dict(more or {})
        self._mode = mode_of(settings.get("resample"))
        self._normalized = Normalization(
            settings.number("rescale_factor", 1 / 255), norm["image_mean"], norm["image_std"]
        )
        self._geometry = geometry
        self._temporal = settings.integer("temporal_patch_size")

    def __call__(self, image: Image.Image, settings: dict[str, Any]) -> dict[str, Tensor]:
        """Return `pixel_values`, float32 [patches, 3 * temporal * patch ** 2], and the grid."""
        area = settings["size"]
        geometry = msgspec.structs.replace(
            self._geometry, min_pixels=area["shortest_edge"], max_pixels=area["longest_edge"]
        )
        grid = geometry.layout(image.height, image.width).grid
        assert grid is not None
        return {
            "pixel_values": self.patches([image], grid),
            "image_grid_thw": torch.tensor([grid]),
        }

    def patches(self, frames: Iterable[Image.Image], grid: tuple[int, int, int]) -> Tensor:
        """Return the patches of frames, float32 [patches, 3 * temporal * patch ** 2].

        Args:
            frames: RGB. The last one fills up its patches.
            grid: (time, height, width) in patches.
        """
        side, merge = self._geometry.patch, self._geometry.merge
        time, height, width = grid
        lines, columns = height // merge, width // merge
        found = np.empty(
            (time, lines, columns, merge, merge, 3, self._temporal, side, side), np.float32
        )
        step = max(1, _BAND // (merge * side * width * side))
        for index, frame in enumerate(frames):
            small = resized(pixels_of(frame), (height * side, width * side), self._mode).numpy()
            group, after = divmod(index, self._temporal)
            for line in range(0, lines, step):
                top = line * merge * side
                band = self._normalized(small[:, top : top + step * merge * side])
                cut = band.reshape(3, -1, merge, side, columns, merge, side)
                ordered = cut.transpose(1, 4, 2, 5, 0, 3, 6)
                found[group, line : line + step, ..., after:, :, :] = ordered[..., None, :, :]
        return torch.from_numpy(found.reshape(time * height * width, -1))
