"""Inputs of towers: those of transformers' processors over torchvision, to the bit."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoConfig

from inlay.base.errors import InvalidRequestError
from inlay.engine.decoding import sized_image
from inlay.engine.torch.media import patch_processing, pixels, processing, tile_processing
from inlay.engine.torch.media.readers import processor_of
from inlay.media.families import spec_of
from inlay.media.spec import layout, media_segments
from inlay.messages.prompt import Buffer, Media
from tests.engine.torch import vision_reference
from tests.engine.torch.vision_reference import Picture
from tests.vision_models import FAMILIES, vision


@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_are_those_of_transformers_to_the_bit(family: str) -> None:
    spec = spec_of(vision(family))
    assert spec is not None
    process = processor_of(vision(family), AutoConfig.from_pretrained(vision(family)), spec)
    for picture in (Picture(3, 50, 60), Picture(4, 33, 70), Picture(5, 20, 9)):
        found = process(picture.image, spec.processor_settings(None))
        truth = vision_reference.pixels(family, [picture])
        assert found.keys() == truth.keys()
        for name, value in truth.items():
            assert torch.equal(found[name], value.to(found[name].dtype)), name


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted by Linux")
def test_a_thread_that_makes_inputs_starts_no_others() -> None:
    spec = spec_of(vision("qwen2_5_vl"))
    assert spec is not None
    config = AutoConfig.from_pretrained(vision("qwen2_5_vl"))
    process = processor_of(vision("qwen2_5_vl"), config, spec)
    picture = Picture(3, 600, 600).image
    settings = {"size": {"shortest_edge": 256, "longest_edge": 1 << 20}}
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(int).result()
            threads = len(list(Path("/proc/self/task").iterdir()))
            found = pool.submit(process, picture, settings).result()
            assert len(list(Path("/proc/self/task").iterdir())) == threads
    finally:
        torch.set_num_threads(before)
    assert found["pixel_values"].shape == (150 * 150, 3 * 2 * 16)


def test_llama4s_tiles_are_those_of_its_processor_for_every_shape() -> None:
    spec = spec_of(vision("llama4"))
    assert spec is not None
    process = processor_of(vision("llama4"), AutoConfig.from_pretrained(vision("llama4")), spec)
    sizes = [(1, 1), (1, 200), (31, 33), (32, 32), (64, 96), (97, 64), (200, 30), (500, 400)]
    for number, (height, width) in enumerate(sizes):
        picture = Picture(number, height, width)
        (found,) = process(picture.image, spec.processor_settings(None)).values()
        assert torch.equal(
            found.float(), vision_reference.pixels("llama4", [picture])["pixel_values"]
        ), picture
    low = process(Picture(1, 64, 96).image, spec.processor_settings("low"))
    assert low["pixel_values"].shape == (1, 3, 32, 32)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_picture_grows_beyond_what_its_layout_says_while_it_is_resized(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(vision(family))
    assert spec is not None
    process = processor_of(vision(family), AutoConfig.from_pretrained(vision(family)), spec)
    seen: list[int] = []
    real = pixels.resized

    def watched(picture: torch.Tensor, size: tuple[int, int], mode: str) -> torch.Tensor:
        # All lines get their new width first.
        seen.append(max(picture.shape[1], size[0]) * size[1])
        return real(picture, size, mode)

    for module in (patch_processing, processing, tile_processing):
        monkeypatch.setattr(module, "resized", watched)
    sizes = [(1, 1), (3, 150), (150, 3), (40, 56), (300, 200), (2, 3000), (3000, 2)]
    grown = 0
    for height, width in sizes:
        with suppress(InvalidRequestError):  # a shape that the family does not see
            laid = layout(spec, height, width)
            process(Image.new("RGB", (width, height)), spec.processor_settings(None))
            assert max(seen, default=0) <= laid.resizing
            grown = max(grown, laid.resizing)
            seen.clear()
    assert grown > 30 * 30


def test_a_picture_that_is_stretched_may_be_of_any_shape_and_one_that_is_cropped_not() -> None:
    stretched, cropped = spec_of(vision("gemma3")), spec_of(vision("llava"))
    assert stretched is not None
    assert cropped is not None
    for height, width in ((1, 60_000), (60_000, 1)):
        laid = layout(stretched, height, width)
        assert laid.resizing == max(32, height) * 32
        with pytest.raises(InvalidRequestError, match="too thin: to resize it takes 61440000"):
            layout(cropped, height, width)


def test_memory_is_held_for_a_picture_while_it_is_resized() -> None:
    spec = spec_of(vision("gemma3"))
    assert spec is not None
    file = BytesIO()
    Image.new("RGB", (1, 60_000)).save(file, "PNG")
    laid = layout(spec, 60_000, 1)
    run = next(
        segment
        for segment in media_segments(laid, bytes(16), Buffer(file.getvalue()), atomic=True)
        if isinstance(segment, Media)
    )
    _, sized = sized_image(run, spec)
    # Its file has 60,000 pixels; a line of it has 32 before there are fewer lines.
    assert sized.bytes > 8 * 60_000 * 32


def test_an_image_processor_of_llama4_with_other_steps_is_refused(tmp_path: Path) -> None:
    spec = spec_of(vision("llama4"))
    assert spec is not None
    directory = Path(shutil.copytree(vision("llama4"), tmp_path / "model"))
    path = directory / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    for change, phrase in (({"resample": 0}, "resample 0"), ({"do_rescale": False}, "do_rescale")):
        path.write_text(json.dumps(settings | change))
        with pytest.raises(InvalidRequestError, match=phrase):
            processor_of(directory, AutoConfig.from_pretrained(directory), spec)
