"""Settings of a small vLLM-Omni on a CPU."""

from typing import Any

from inlay.engine.settings import EngineSettings
from tests.engine.test_diffusers import model

FLAGS: dict[str, Any] = {
    "engine": "vllm-omni",
    "dtype": "float32",
    "enforce_eager": True,
    "num_threads": 1,
}
START_SECONDS = 280.0


def settings(family: str, **more: Any) -> EngineSettings:
    """Settings for a tiny pipeline of `family`."""
    return EngineSettings.of(**{"model": str(model(family))} | FLAGS | more)
