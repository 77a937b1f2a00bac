"""Inputs of towers: those of transformers' processors over torchvision, to the bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoImageProcessor

from inlay.engine.torch.media.patch_processing import PatchProcessor
from inlay.engine.torch.media.readers import processor_of
from inlay.media.families import spec_of
from inlay.media.geometry import PatchGrid
from tests.engine.torch.vision_reference import Picture
from tests.engines.images import _JOINT
from tests.vision_models import FAMILIES, vision


def torchvision_of(directory: Path, family: str) -> Any:
    # They import torchvision, which only this environment has.
    if family == "llama4":
        from transformers.models.llama4.image_processing_llama4 import Llama4ImageProcessor

        return Llama4ImageProcessor.from_pretrained(directory)
    return AutoImageProcessor.from_pretrained(directory, backend="torchvision")


@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_are_those_that_torchvision_makes(family: str) -> None:
    directory = vision(family)
    spec = spec_of(directory)
    assert spec is not None
    process = processor_of(directory, AutoConfig.from_pretrained(directory), spec)
    theirs = torchvision_of(directory, family)
    for size in ((1, 1), (9, 180), (32, 32), (50, 60), (97, 64), (500, 400)):
        picture = Picture(3, *size).image
        found = process(picture, spec.processor_settings(None))
        images = [[picture]] if family in ("idefics3", "smolvlm") else [picture]
        truth = theirs(images, return_tensors="pt", **_JOINT.get(family, {}))
        assert "pixel_values" in found
        for name, value in found.items():
            assert torch.equal(value, torch.as_tensor(truth[name])), (name, size)


def test_patches_of_a_video_are_those_that_torchvision_makes() -> None:
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    directory = vision("qwen2_5_vl")
    spec = spec_of(directory)
    assert spec is not None
    assert isinstance(spec.image, PatchGrid)
    norm = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]}
    pictures = [Picture(seed, 50, 60).image for seed in range(5)]
    frames = torch.from_numpy(np.stack([np.array(each) for each in pictures])).permute(0, 3, 1, 2)
    theirs = Qwen2VLVideoProcessor(
        patch_size=4, merge_size=2, size={"shortest_edge": 256, "longest_edge": 1 << 14}, **norm
    )(frames, do_sample_frames=False, return_tensors="pt")
    (grid,) = theirs["video_grid_thw"].tolist()
    found = PatchProcessor(directory, spec.image, norm).patches(pictures, tuple(grid))
    assert torch.equal(found, theirs["pixel_values_videos"])
