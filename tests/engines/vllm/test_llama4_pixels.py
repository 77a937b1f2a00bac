"""Pixels of Llama 4's tiles, compared with transformers' processor over torchvision itself."""

import pytest
import torch
from transformers import AutoConfig

from inlay.engine.torch.media.readers import processor_of
from inlay.media.families import spec_of
from tests.engine.torch.vision_reference import Picture
from tests.vision_models import vision


@pytest.mark.parametrize("size", [(1, 1), (1, 200), (32, 32), (50, 60), (97, 64), (500, 400)])
def test_tiles_are_those_that_torchvision_makes(size: tuple[int, int]) -> None:
    # It imports torchvision, which only this environment has.
    from transformers.models.llama4.image_processing_llama4 import Llama4ImageProcessor

    directory = vision("llama4")
    spec = spec_of(directory)
    assert spec is not None
    picture = Picture(3, *size)
    process = processor_of(directory, AutoConfig.from_pretrained(directory), spec)
    found = process(picture.image, spec.processor_settings(None))["pixel_values"]
    theirs = Llama4ImageProcessor.from_pretrained(directory)(picture.image, return_tensors="pt")
    assert torch.equal(found, theirs["pixel_values"])
