"""Layouts of videos: the rows, marker tokens and times that sampled frames become.

Frames are sampled by whoever reads the video; their number, size and times are all that is needed.
Nothing here reads a container.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from inlay.base.errors import InvalidRequestError
from inlay.media.geometry import Layout, Part, fit, layout_of
from inlay.media.sampling import Sampling
from inlay.messages.prompt import Tokens

Encode: TypeAlias = Callable[[str], Sequence[int]]
"""Token ids of a text that stands between special tokens."""

_single = struct.Struct("<f")


class VideoLayout(NamedTuple):
    """The positions of a video.

    Attributes:
        layout: as of an image; its grid counts pairs of frames in time.
        interval: from one pair of frames to the next, as `Media.interval`.
    """

    layout: Layout
    interval: float


class FrameGrid(msgspec.Struct, frozen=True, kw_only=True, tag="frame_grid"):
    """Frames become patches, `temporal` frames at a time.

    Families: Qwen2-VL and later, Qwen2.5-Omni, GLM-4V.

    Attributes:
        patch: side of a patch, in pixels.
        merge: patches along a side of what becomes one row.
        temporal: frames in a patch.
        min_pixels: smallest area, of a frame or of all.
        max_pixels: largest.
        max_frames: of a video, after sampling.
        together: the area is that of all frames.
        tokens_per_second: positions of one second; 0 where frames are numbered by one.
        by_clock: what follows a video is numbered from its last time on.
        stamps: "seconds": each pair has its time with one decimal before it; "after": whole seconds
            after it; "none": all rows are one run.
        start: token before the rows of a pair with a stamp.
        end: token after them.
        sampling: of MP4 and WebM.
        containers: workers of the model decode MP4 and WebM.
    """

    patch: int
    merge: int
    temporal: int
    min_pixels: int
    max_pixels: int
    max_frames: int
    together: bool = False
    tokens_per_second: float = 0
    by_clock: bool = False
    stamps: Literal["none", "seconds", "after"] = "none"
    start: int = -1
    end: int = -1
    sampling: Sampling = "spread"
    containers: bool = False

    @property
    def rate(self) -> float:
        return self.tokens_per_second if self.by_clock else 0.0

    def layout(
        self, height: int, width: int, seconds: Sequence[float], fps: float, encode: Encode
    ) -> VideoLayout:
        """The layout of a video.

        Args:
            height: of a frame, in pixels.
            width: likewise.
            seconds: time of each sampled frame.
            fps: sampled frames a second.
            encode: tokenizes times.

        Raises:
            InvalidRequestError: no frames, too many, or of a shape that the model cannot see.
        """
        frames = len(seconds)
        least = self.temporal if self.together else 1
        if not least <= frames <= self.max_frames or not fps > 0:
            raise InvalidRequestError(
                f"a video has {frames} frames at {fps:g} a second; allowed: {least} to "
                f"{self.max_frames} frames"
            )
        size = fit(
            height,
            width,
            self.patch * self.merge,
            (self.min_pixels, self.max_pixels),
            frames=frames if self.together else 1,
            counted=round(frames / self.temporal) * self.temporal if self.together else 1,
            enlarge=self.together,
        )
        times = -(-frames // self.temporal)
        grid = (times, size[0] // self.patch, size[1] // self.patch)
        rows = grid[1] * grid[2] // self.merge**2
        parts: list[Part] = [times * rows]
        if self.stamps != "none":
            parts = self._stamped(rows, times, seconds, encode)
        interval = 1.0
        if self.tokens_per_second:
            # In float32, as the model multiplies.
            interval = _rounded(self.temporal / fps)
            if not self.by_clock:
                interval = _rounded(self.tokens_per_second * interval)
        return VideoLayout(layout_of(parts, size, grid), interval)

    def _stamped(
        self, rows: int, times: int, seconds: Sequence[float], encode: Encode
    ) -> list[Part]:
        parts: list[Part] = []
        last = len(seconds) - 1
        for pair in range(times):
            first = seconds[min(pair * self.temporal, last)]
            frame: list[Part] = [Tokens((self.start,)), rows, Tokens((self.end,))]
            if self.stamps == "seconds":
                final = seconds[min(pair * self.temporal + self.temporal - 1, last)]
                parts += [Tokens(encode(f"<{(first + final) / 2:.1f} seconds>")), *frame]
            else:
                parts += [*frame, Tokens(encode(str(int(first))))]
        return parts


def _rounded(number: float) -> float:
    return float(_single.unpack(_single.pack(number))[0])
