"""Decoding by graphs after a prompt with images: positions of three axes are inputs of a graph."""

import pytest

from inlay.engine.settings import EngineSettings
from inlay.engine.torch.model import CausalModel
from tests.engine.torch import test_vision
from tests.engine.torch.test_decode_graphs import Capturing, as_on_cuda
from tests.engine.torch.test_vision import Engine, check, prompts
from tests.vision_models import vision

__all__ = ["as_on_cuda"]


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("family", ["llava", "gemma3", "qwen2_vl", "qwen3_vl", "glm4v"])
def test_graphs_decode_after_images_as_transformers_does(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = EngineSettings.of(model=str(vision(family)), device="cpu", num_threads=1)
    model = CausalModel.load(settings)
    monkeypatch.setattr(test_vision, "load", lambda _: model)
    capture = Capturing()
    engine = Engine(family, capture=capture, max_num_seqs=4)
    check(family, engine.run(*prompts(family)))
    assert capture.replayed
