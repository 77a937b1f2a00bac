"""Sampled frames against those that transformers' video processors choose."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.video_utils import VideoMetadata

from inlay.media.sampling import Sampling, sampled
from tests.media.processors import from_source

WAYS: dict[str, Sampling] = {"qwen2_vl": "steps", "qwen3_vl": "spread", "glm4v": "seconds"}
RATES = [1.0, 2.0, 10.0, 12.5, 15.0, 24.0, 24000 / 1001, 25.0, 29.97, 30.0, 30000 / 1001, 60.0]


def theirs(family: str, total: int, fps: float, max_frames: int) -> list[int]:
    found = from_source(f"{family}/video_processing_{family}.py", "sample_frames")
    bare = SimpleNamespace(
        fps=2, num_frames=None, min_frames=4, max_frames=max_frames,
        temporal_patch_size=2, max_duration=300,
    )  # fmt: skip
    metadata = VideoMetadata(total_num_frames=total, fps=fps, duration=total / fps)
    indices: Any = found["sample_frames"](bare, metadata)
    return [int(index) for index in indices]


@pytest.mark.thorough
@pytest.mark.parametrize("family", WAYS)
@settings(deadline=None, max_examples=150)
@given(st.integers(2, 36_000), st.sampled_from(RATES) | st.floats(0.5, 240), st.just(768))
@example(36_000, 30.0, 768)
@example(500, 1.0, 768)
@example(7, 30.0, 768)
@example(90, 30.0, 16)
@example(34_630, 84.4, 768)
def test_frames_are_those_that_transformers_samples(
    family: str, total: int, fps: float, max_frames: int
) -> None:
    wanted = theirs(family, total, fps, max_frames)
    found = list(sampled(total, fps, WAYS[family], max_frames))
    if family == "qwen2_vl":  # its steps are rounded, and now and then there is one too many
        wanted = wanted[: len(wanted) // 2 * 2]
        step = total / len(wanted)
        for place, index in enumerate(found):
            # torch.arange adds within a vector of the CPU in float32: just below a whole number.
            if wanted[place] != index and abs(place * step - round(place * step)) < 0.005:
                assert abs(wanted[place] - index) == 1
                wanted[place] = index
    if family == "glm4v":  # it knows no such number
        wanted = wanted[:max_frames]
    assert found == wanted


@pytest.mark.parametrize("way", WAYS.values())
@given(st.integers(1, 36_000), st.floats(0.01, 240), st.integers(1, 768))
def test_frames_are_of_the_video_and_no_more_than_allowed(
    way: Sampling, total: int, fps: float, most: int
) -> None:
    found = sampled(total, fps, way, most)
    assert 1 <= len(found) <= most + 1
    assert list(found) == sorted(found)
    assert found[0] == 0
    assert found[-1] < total
    assert np.all(np.diff(found) > 0) or (way == "seconds" and found[-1] == found[-2])
