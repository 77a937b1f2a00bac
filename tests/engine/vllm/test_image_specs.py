"""Models whose images vLLM is not given."""

import json
import shutil
from pathlib import Path

import pytest

from inlay.engine.settings import EngineSettings
from inlay.engine.vllm.images import image_spec
from inlay.errors import InvalidRequestError
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
    settings = EngineSettings(model=str(directory))
    path.write_text(json.dumps(config), encoding="utf-8")
    assert image_spec(settings, directory) is not None
    for without in (False, None):
        text[key]["mrope_interleaved"] = without
        path.write_text(json.dumps(config), encoding="utf-8")
        with pytest.raises(InvalidRequestError, match="lacks mrope_interleaved"):
            image_spec(settings, directory)
