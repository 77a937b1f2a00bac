"""Models whose images vLLM is not given."""

import json
import shutil
from pathlib import Path

import pytest

from inlay.base.errors import InvalidRequestError
from inlay.engine.settings import EngineSettings
from inlay.engine.vllm.images import image_spec
from tests.models import tiny
from tests.vision_models import vision


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_qwen3_vl_is_refused_if_vllm_would_not_interleave_its_positions(
    tmp_path: Path, key: str
) -> None:
    """transformers does so by the model's type, vLLM by this setting alone."""
    directory = Path(shutil.copytree(vision("qwen3_vl"), tmp_path / "model"))
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    text = config["text_config"]
    text[key] = text.pop("rope_parameters")
    settings = EngineSettings.of(model=str(directory))
    path.write_text(json.dumps(config), encoding="utf-8")
    assert image_spec(settings, directory) is not None
    for without in (False, None):
        text[key]["mrope_interleaved"] = without
        path.write_text(json.dumps(config), encoding="utf-8")
        with pytest.raises(InvalidRequestError, match="lacks mrope_interleaved"):
            image_spec(settings, directory)


def test_glm4v_is_refused_if_vllm_would_leave_its_biases_out(tmp_path: Path) -> None:
    """transformers has them by the model's type, vLLM by this setting alone."""
    directory = Path(shutil.copytree(vision("glm4v"), tmp_path / "model"))
    settings = EngineSettings.of(model=str(directory))
    assert image_spec(settings, directory) is not None
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    del config["text_config"]["attention_bias"]
    path.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(InvalidRequestError, match="lacks attention_bias: true"):
        image_spec(settings, directory)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gemma3", "attention inside an image of this model is bidirectional"),
        ("gemma4", "over 128 positions are others, texts too"),
        ("llava_onevision", "vLLM knows anyres_max_9 alone"),
        ("qwen3_vl_moe", "images of 'qwen3_vl_moe' models were not compared; compared: glm4v, "),
    ],
)
def test_a_model_that_vllm_was_not_compared_with_is_refused_with_the_reason(
    family: str, reason: str
) -> None:
    directory = vision(family)
    with pytest.raises(InvalidRequestError, match=reason):
        image_spec(EngineSettings.of(model=str(directory)), directory)


def test_a_model_of_text_has_no_images_and_nothing_to_say() -> None:
    directory = tiny("llama")
    assert image_spec(EngineSettings.of(model=str(directory)), directory) is None
