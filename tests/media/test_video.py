"""Layouts of videos against transformers' arithmetic, texts and positions."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from inlay.base.errors import InvalidRequestError
from inlay.media.families import spec_of
from inlay.media.positions import rope_positions
from inlay.media.spec import MediaSpec, media_segments
from inlay.messages.prompt import Prompt, Tokens
from tests.media.processors import from_source, tokenizer
from tests.media.test_families import write
from tests.media.test_positions import theirs
from tests.scratch import scratch

NAMES = (
    *("vision_start", "vision_end", "image_pad", "video_pad", "image", "video"),
    *("IMAGE", "VIDEO", "AUDIO"),
)
TOKENS = tokenizer([f"<|{name}|>" for name in (*NAMES, "begin_of_image", "end_of_image")])
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {},
    "qwen2_5_omni": {},
    "qwen2_5_vl": {"size": {"shortest_edge": 3136, "longest_edge": 602112}},
    "qwen3_vl": {},
    "qwen3_5": {"size": {"shortest_edge": 4096, "longest_edge": 25165824}, "max_frames": 300},
    "glm4v": {"size": {"shortest_edge": 12544, "longest_edge": 47040000}},
}
DEFAULTS = {
    "qwen2_vl": (100352, 602112),
    "qwen2_5_omni": tuple(Qwen2_5OmniProcessor.videos_kwargs["size"].values()),
    "qwen3_vl": (131072, 786432),
}


def described(family: str, **more: Any) -> MediaSpec:
    directory = scratch("video")
    TOKENS.save_pretrained(directory)
    vision = {"tokens_per_second": 2} if family == "qwen2_5_vl" else {}
    write(
        directory,
        config={"model_type": family, "vision_config": vision},
        video_preprocessor_config={**SETTINGS[family], **more},
    )
    without = spec_of(directory)
    assert without is not None
    assert without.video is None
    spec = spec_of(directory, video=True)
    assert spec is not None
    return spec


SPECS = {family: described(family) for family in SETTINGS}


def encode(text: str) -> list[int]:
    return list(TOKENS(text, add_special_tokens=False).input_ids)


def patches(family: str, frames: int, height: int, width: int) -> int:
    """transformers' number of patches."""
    module = "qwen2_vl" if family.startswith("qwen2") else family
    module = {"qwen3_5": "qwen3_vl"}.get(module, module)
    found = from_source(
        f"{module}/video_processing_{module}.py", "smart_resize", "get_num_of_video_patches"
    )
    video = SPECS[family].video
    assert video is not None
    least, most = DEFAULTS.get(family) or tuple(SETTINGS[family]["size"].values())
    bare = SimpleNamespace(
        size={"shortest_edge": least, "longest_edge": most},
        patch_size=16 if family in ("qwen3_vl", "qwen3_5") else 14,
        merge_size=2,
        temporal_patch_size=2,
        cap_pixels_per_frame=None,
    )
    return int(found["get_num_of_video_patches"](bare, frames, height, width, {}))


@pytest.mark.parametrize("family", SPECS)
@settings(deadline=None, max_examples=60)
@given(st.integers(1, 300), st.integers(1, 3000), st.integers(1, 3000))
def test_a_video_has_as_many_rows_as_for_transformers(
    family: str, frames: int, height: int, width: int
) -> None:
    video = SPECS[family].video
    assert video is not None
    seconds = [index / 2 for index in range(frames)]
    try:
        laid, _ = video.layout(height, width, seconds, 2.0, encode)
    except InvalidRequestError:
        with pytest.raises(ValueError, match=r"aspect ratio|must be larger"):
            patches(family, frames, height, width)
        return
    assert laid.rows == patches(family, frames, height, width) // 4
    assert laid.grid is not None
    assert laid.grid[0] == -(-frames // 2)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "glm4v"])
@settings(deadline=None, max_examples=40)
@given(st.integers(2, 40), st.sampled_from([24, 29.97, 30, 12.5]), st.integers(1, 20))
def test_times_stand_between_the_frames_as_transformers_writes_them(
    family: str, frames: int, fps: float, step: int
) -> None:
    spec = SPECS[family]
    assert spec.video is not None
    indices = [index * step for index in range(frames)]
    laid, interval = spec.video.layout(
        100, 130, [index / fps for index in indices], fps / step, encode
    )
    assert interval == 1.0
    kind, pad = (
        (Glm4vProcessor, "<|image|>") if family == "glm4v" else (Qwen3VLProcessor, "<|video_pad|>")
    )
    processor: Any = object.__new__(kind)
    processor.image_token = processor.video_token = pad
    processor.vision_start_token = "<|vision_start|>"
    processor.vision_end_token = "<|vision_end|>"
    processor.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    metadata = VideoMetadata(
        total_num_frames=frames * step, fps=fps, frames_indices=np.array(indices)
    )
    wanted = processor.replace_video_token(
        {"video_grid_thw": np.array([laid.grid]), "video_metadata": [metadata]}, 0
    )
    row = TOKENS.convert_tokens_to_ids(pad)
    found = [
        id_ for part in laid.parts for id_ in ([row] * part if isinstance(part, int) else part.ids)
    ]
    assert found == encode(wanted)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.sampled_from([1.0, 2.0, 3.0, 24.0, 29.97 / 7]))
def test_positions_of_qwen2_5_follow_the_seconds(frames: int, fps: float) -> None:
    spec = SPECS["qwen2_5_vl"]
    assert spec.video is not None
    assert spec.video.tokens_per_second == 2
    laid, interval = spec.video.layout(60, 80, [0.0] * frames, fps, encode)
    segments = media_segments(laid, bytes(16), kind="video", interval=interval)
    prompt = Prompt.of(Tokens([1, 2, 3]), *segments, Tokens([4]))
    wanted, delta = theirs(
        Qwen2_5_VLModel,
        tokens_per_second=2,
        input_ids=torch.zeros((1, len(prompt)), dtype=torch.long),
        mm_token_type_ids=torch.tensor([[0] * 3 + [2] * laid.rows + [0]]),
        video_grid_thw=torch.tensor([laid.grid]),
        second_per_grid_ts=torch.tensor([2 / fps]),
    )
    found, our_delta = rope_positions(prompt)
    assert found.tolist() == wanted.tolist()
    assert our_delta == delta


def test_too_many_frames_and_capped_videos_are_refused() -> None:
    video = SPECS["qwen3_5"].video
    assert video is not None
    for frames in (0, 1, 301):
        with pytest.raises(InvalidRequestError, match=f"{frames} frames .* allowed: 2 to 300"):
            video.layout(100, 100, [0.0] * frames, 2.0, encode)
    with pytest.raises(InvalidRequestError, match="cap_pixels_per_frame"):
        described("qwen3_vl", cap_pixels_per_frame=True)
