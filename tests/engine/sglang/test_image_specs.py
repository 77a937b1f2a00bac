"""Models whose images SGLang is given, and those that it is not."""

import pytest

from inlay.base.errors import InvalidRequestError
from inlay.engine.settings import EngineSettings
from inlay.engine.sglang.images import image_spec
from tests.models import tiny
from tests.vision_models import vision


def test_images_of_compared_models_are_laid_out_and_videos_are_not_taken() -> None:
    directory = vision("qwen2_5_vl", patch=14)
    spec = image_spec(EngineSettings.of(model=str(directory), enable_mm_embeds=True), directory)
    assert spec is not None
    assert (spec.mrope, spec.embeds, spec.video, set(spec.placeholders)) == (
        True, True, None, {"image"},
    )  # fmt: skip
    assert image_spec(EngineSettings.of(model=str(tiny("llama"))), tiny("llama")) is None


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("llava", {}, "images of 'llava' models were not compared; compared: qwen2_5_vl, qwen2_vl"),
        ("qwen2_5_vl", {}, "patches of this model have 96 numbers, and SGLang takes all that have"),
        ("qwen2_vl", {"role": "decode", "engine": "sglang"}, "that does one phase alone"),
    ],
)
def test_a_model_that_sglang_is_not_given_images_of_is_refused_with_the_reason(
    family: str, settings: dict[str, str], reason: str
) -> None:
    directory = vision(family)
    with pytest.raises(InvalidRequestError, match=reason):
        image_spec(EngineSettings.of(model=str(directory), **settings), directory)
