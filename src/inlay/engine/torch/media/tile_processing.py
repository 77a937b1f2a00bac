"""Inputs of Llama 4's tower, whose image processor transformers has with torchvision alone.

The steps are those of `Llama4ImageProcessor` in transformers 5.23, in torch: as torchvision does it
on CPUs with AVX2, 8-bit pictures are resized as integers.
"""

import math
from pathlib import Path
from typing import Any

import msgspec
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from inlay.engine.torch.media.pixels import mode_of, pixels_of, refuse_left_out_steps, resized
from inlay.media.model_files import ModelFiles
from inlay.media.tiles import ChunkTiles


class TileProcessor:
    """Cuts a picture into the tiles of its canvas, and adds a small view of it.

    Called with a picture and the settings of its layout, as `ImageProcessor`.
    """

    def __init__(self, directory: Path, geometry: ChunkTiles) -> None:
        """Read the settings.

        Raises:
            InvalidRequestError: another interpolation, or a step that is left out.
        """
        settings = ModelFiles(directory).image.over(
            {
                "resample": int(Image.Resampling.BILINEAR),
                "rescale_factor": 1 / 255,
                "image_mean": [0.5] * 3,
                "image_std": [0.5] * 3,
            }
        )
        refuse_left_out_steps(settings)
        self._mode = mode_of(settings.get("resample"))
        self._geometry = geometry
        self._factor = settings.number("rescale_factor", 1 / 255)
        self._mean, self._std = (
            torch.tensor(settings.get(name), dtype=torch.bfloat16).view(3, 1, 1)
            for name in ("image_mean", "image_std")
        )

    def __call__(self, image: Image.Image, settings: dict[str, Any]) -> dict[str, Tensor]:
        """Return `pixel_values`, bfloat16 [tiles, 3, side, side]: line by line, the view last."""
        geometry = msgspec.structs.replace(self._geometry, max_tiles=settings["max_patches"])
        tile = geometry.tile
        height, width = image.height, image.width
        canvas = geometry.layout(height, width).size
        room = canvas
        if not geometry.largest:
            # A picture is enlarged up to one tile only.
            room = (min(max(height, tile), canvas[0]), min(max(width, tile), canvas[1]))
        pixels = pixels_of(image)
        inside = resized(pixels, _fitted((height, width), room), self._mode)
        padding = (0, canvas[1] - inside.shape[2], 0, canvas[0] - inside.shape[1])
        whole = self._normalized(F.pad(inside, padding))
        lines, columns = canvas[0] // tile, canvas[1] // tile
        cut = whole.view(3, lines, tile, columns, tile).permute(1, 3, 0, 2, 4)
        tiles = cut.reshape(-1, 3, tile, tile)
        if len(tiles) > 1:
            view = self._normalized(resized(pixels, (tile, tile), self._mode))
            tiles = torch.cat([tiles, view[None]])
        return {"pixel_values": tiles}

    def _normalized(self, pixels: Tensor) -> Tensor:
        scaled = pixels.to(torch.bfloat16) * self._factor
        return scaled.sub(self._mean).div_(self._std)


def _fitted(size: tuple[int, int], room: tuple[int, int]) -> tuple[int, int]:
    """Return the largest size of the same shape within `room`; (height, width) each."""
    (height, width), (most_height, most_width) = size, room
    by_height, by_width = most_height / height, most_width / width
    if by_width < by_height:
        return max(1, min(math.floor(height * by_width), most_height)), most_width
    return most_height, max(1, min(math.floor(width * by_height), most_width))
