"""Steps of image processors on 8-bit pixels: resizing and normalising.

They are those of transformers' processors over torchvision, to the bit: torchvision resizes by the
same function of torch, which works on integers, and both rescale and normalise in one step.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from inlay.base.errors import InvalidRequestError
from inlay.engine.pictures import rgb_array
from inlay.media.model_files import Section

_MODES = {
    int(Image.Resampling.LANCZOS): "lanczos",
    int(Image.Resampling.BILINEAR): "bilinear",
    int(Image.Resampling.BICUBIC): "bicubic",
}
"""Interpolations of torch by Pillow's numbers."""


def pixels_of(image: Image.Image) -> Tensor:
    """Return the pixels of an RGB image: uint8 [3, height, width], interleaved in memory."""
    return torch.from_numpy(rgb_array(image)).permute(2, 0, 1)


def mode_of(resample: object) -> str:
    """Return torch's interpolation for a processor's `resample`.

    Raises:
        InvalidRequestError: another than Lanczos, bilinear and bicubic.
    """
    found = _MODES.get(resample) if isinstance(resample, int) else None
    if found is None:
        known = ", ".join(f"{number} ({name})" for number, name in _MODES.items())
        raise InvalidRequestError(
            f"the image processor has resample {resample!r}; supported: {known}"
        )
    return found


def resized(pixels: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    """Resize uint8 [3, H, W] to `size`, (height, width), with a filter as wide as a new pixel.

    Layouts bound the pixels that it goes through (`Layout.resizing`).
    """
    if pixels.shape[1:] == size:
        return pixels
    return F.interpolate(pixels[None], list(size), mode=mode, antialias=True)[0]


class Normalization:
    """Maps 8-bit pixels to what a tower expects: (pixel * factor - mean) / std.

    By numpy: torch would start its threads for each of those that decode.
    """

    def __init__(self, factor: float, mean: Sequence[float], std: Sequence[float]) -> None:
        """Fold `factor` into mean and deviation, one of each for a channel."""
        self._mean, self._std = (
            (torch.tensor(values) * (1.0 / factor)).view(3, 1, 1).numpy() for values in (mean, std)
        )

    def __call__(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """Return float32 [3, H, W], contiguous, of uint8 [3, H, W]."""
        found = pixels.astype(np.float32, order="C")
        found -= self._mean
        found /= self._std
        return found


def refuse_left_out_steps(settings: Section) -> None:
    """Refuse a processor that leaves a step out.

    Raises:
        InvalidRequestError: it does not resize, rescale or normalise.
    """
    steps = ("do_resize", "do_rescale", "do_normalize")
    skipped = [name for name in steps if settings.get(name) is False]
    if skipped:
        raise InvalidRequestError(
            f"the image processor leaves out {', '.join(skipped)}; supported: all of "
            f"{', '.join(steps)}"
        )
