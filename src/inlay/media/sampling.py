"""The frames of a video that are seen: indices as transformers' video processors choose them."""

import math
import struct
from typing import Literal, TypeAlias

Sampling: TypeAlias = Literal["spread", "steps", "seconds"]
"""A way of sampling: "spread" from first to last, as Qwen3-VL; in "steps" from the first on, as
Qwen2-VL; one at each half of "seconds", as GLM-4V."""

FPS = 2.0
"""Frames a second that videos are sampled at, and that ready-made frames are taken to have."""

_MIN_FRAMES = 4
_MAX_SECONDS = 300
"""Length that GLM-4V samples at its full rate."""

_PAIR = 2
"""Frames that become one patch; "steps" and "seconds" give whole pairs."""


def sampled(total: int, fps: float, way: Sampling, max_frames: int) -> tuple[int, ...]:
    """Indices of the frames that are seen, ascending; one may come twice to fill a pair.

    Args:
        total: frames of the video, from 1.
        fps: its frames a second.
        way: of sampling.
        max_frames: most of them.
    """
    seconds = total / fps
    if way == "spread":
        count = min(max(int(seconds * FPS), _MIN_FRAMES), max_frames, total)
        step = (total - 1) / max(count - 1, 1)
        return tuple(round(index * step) for index in range(count))
    if way == "steps":
        most = min(max_frames, total) // _PAIR * _PAIR
        count = int(min(max(seconds * FPS, _MIN_FRAMES), most)) // _PAIR * _PAIR
        step = total / max(count, 1)
        return tuple(int(_single(index * step)) for index in range(max(count, 1)))
    if seconds <= _MAX_SECONDS:
        found = [math.ceil(index * fps / FPS) for index in range(max(int(seconds * FPS), 1))]
    elif total <= _MAX_SECONDS * FPS:
        found = list(range(total))
    else:
        count = int(_MAX_SECONDS * FPS)
        step = seconds / (count - 1)
        found = [math.ceil(index * step * fps) for index in range(count)]
    seen = sorted({min(total - 1, index) for index in found})[:max_frames]
    return (*seen, *seen[-1:] * (len(seen) % _PAIR))


def _single(number: float) -> float:
    found: float = struct.unpack("<f", struct.pack("<f", number))[0]
    return found
