"""Inputs of towers: those of transformers' processors, to the bit."""

import pytest
import torch
from transformers import AutoConfig

from inlay.engine.torch.media.processing import ImageProcessor
from inlay.media.families import spec_of
from tests.engine.torch.vision_reference import Picture, pixels
from tests.vision_models import FAMILIES, vision


@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_are_those_of_transformers_to_the_bit(family: str) -> None:
    spec = spec_of(vision(family))
    assert spec is not None
    process = ImageProcessor(vision(family), AutoConfig.from_pretrained(vision(family)))
    for picture in (Picture(3, 50, 60), Picture(4, 33, 70)):
        found = process(picture.image, spec.processor_settings(None))
        truth = pixels(family, [picture])
        assert found.keys() == truth.keys()
        for name, value in truth.items():
            assert torch.equal(found[name], value), name
