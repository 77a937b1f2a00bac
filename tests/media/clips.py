"""Files of video, made by PyAV."""

import io
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import av
import numpy as np
import numpy.typing as npt

Frame = npt.NDArray[np.uint8]
P = ParamSpec("P")
R = TypeVar("R")

LOSSLESS = {"qp": "0", "preset": "ultrafast"}
"""Options of `libx264rgb`, whose frames come back as they were."""


def drawn(count: int, height: int = 48, width: int = 64, seed: int = 0) -> list[Frame]:
    """Pictures of large squares, no two alike: [height, width, 3] each."""
    random = np.random.default_rng(seed)
    side = -(-max(height, width) // 8)
    blocks = random.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    whole = blocks.repeat(side, 1).repeat(side, 2)
    return [np.ascontiguousarray(each[:height, :width]) for each in whole]


def _in_a_thread_of_its_own(function: Callable[P, R]) -> Callable[P, R]:
    """Leave the caller's thread as it is.

    SVT-AV1 gives the thread that calls it real-time priority 99, where that is allowed, as to root.
    All processes that it then starts have it too, and keep every core from those without.
    """

    @wraps(function)
    def apart(*args: P.args, **kwargs: P.kwargs) -> R:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(function, *args, **kwargs).result()

    return apart


@_in_a_thread_of_its_own
def video(
    frames: Sequence[Frame],
    codec: str = "libx264rgb",
    pixels: str = "rgb24",
    *,
    kind: str = "mp4",
    fps: int | Fraction = 25,
    times: Sequence[int] | None = None,
    options: dict[str, str] | None = None,
    container: dict[str, str] | None = None,
    sound: bool = False,
) -> bytes:
    """A file of `frames`.

    Args:
        frames: pictures of one size.
        codec: FFmpeg's encoder.
        pixels: its format of pixels.
        kind: of the container.
        fps: frames a second.
        times: of each frame, in milliseconds, in place of `fps`.
        options: of the encoder.
        container: options of the container.
        sound: with a track of sound before it.
    """
    out = io.BytesIO()
    with av.open(out, "w", format=kind, options=container or {}) as file:
        if sound:
            heard: Any = file.add_stream("libopus" if kind == "webm" else "aac", rate=48000)
            heard.layout = "mono"
        height, width = frames[0].shape[:2]
        seen: Any = file.add_stream(codec, rate=fps)
        seen.height, seen.width, seen.pix_fmt = height, width, pixels
        seen.thread_count = 1
        seen.options = LOSSLESS if options is None else options
        if times is not None:
            seen.codec_context.time_base = Fraction(1, 1000)
        if sound:
            noise = av.AudioFrame.from_ndarray(np.zeros((1, 960), np.float32), "fltp", "mono")
            noise.sample_rate = 48000
            file.mux(heard.encode(noise))
            file.mux(heard.encode(None))
        for index, frame in enumerate(frames):
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            if times is not None:
                picture.pts, picture.time_base = times[index], Fraction(1, 1000)
            file.mux(seen.encode(picture))
        file.mux(seen.encode(None))
    return out.getvalue()
