"""The self-check of towers, on a picture and a sound that are made here.

Both go through the readers, as files of requests do.
"""

from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from math import isqrt

import numpy as np
import soundfile
from PIL import Image
from torch import Tensor

from inlay.engine.torch.media.readers import Readers
from inlay.engine.torch.media.tower import Tower
from inlay.engine.torch.self_check.parts import CheckedPart
from inlay.media.items import Item, audio_item, image_item
from inlay.media.spec import MediaSpec
from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer, Media

_SIDE = 336
"""Pixels of a side of the picture, as published towers take."""

_SECONDS, _RATE = 2, 16_000


def tower_parts(tower: Tower, readers: Readers, spec: MediaSpec) -> dict[str, CheckedPart]:
    """Return the parts of a tower that are compared with float32, by the kind of media.

    A video goes through the modules that pictures go through.
    """
    secret = Secret(bytes(32))
    made: dict[str, Callable[[], Item]] = {
        "image": lambda: image_item(spec, _picture(min(_SIDE, isqrt(spec.max_pixels))), secret),
        "audio": lambda: audio_item(spec, _sound(), secret),
    }
    return {
        kind: CheckedPart([tower.body], partial(_rows, tower, readers, item))
        for kind, item in made.items()
        if kind in readers
    }


def _rows(tower: Tower, readers: Readers, item: Callable[[], Item]) -> Sequence[Tensor]:
    run = next(segment for segment in item().segments if isinstance(segment, Media))
    return list(tower.features([readers[run.kind].plan(run).read()]).values())


def _picture(side: int) -> Buffer:
    """Return a file of soft colours, edges and some grain, as photographs have."""
    across = np.linspace(0, 3 * np.pi, side)
    waves = np.sin(across)[:, None] * np.cos(0.6 * across)[None, :, None] * [1.0, 0.7, -0.8]
    edges = np.indices((side, side)).sum(0)[..., None] // 48 % 2
    grain = np.random.default_rng(6).normal(0, 6, (side, side, 3))
    pixels = (128 + 70 * waves + 40 * edges + grain).clip(0, 255).astype(np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return Buffer(file.getvalue())


def _sound() -> Buffer:
    """Return a file of a rising tone that swells, with some noise, as speech has."""
    times = np.arange(_SECONDS * _RATE) / _RATE
    tone = np.sin(2 * np.pi * (120 * times + 200 * times**2)) * np.sin(3 * np.pi * times) ** 2
    noise = np.random.default_rng(7).normal(0, 0.02, len(times))
    file = BytesIO()
    soundfile.write(file, (0.4 * tone + noise).astype(np.float32), _RATE, format="WAV")
    return Buffer(file.getvalue())
