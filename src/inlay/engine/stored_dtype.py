"""Which dtype a checkpoint is stored in, for engines whose own "auto" means something else."""

from pathlib import Path

from inlay.engine.settings import EngineSettings
from inlay.tensors.table import config_of


def dtype_name(settings: EngineSettings, directory: Path) -> str:
    """What is asked for, and for "auto" the checkpoint's own.

    VLLM's and SGLang's would halve float32. "auto" where it says nothing simple.
    """
    if settings.dtype != "auto":
        return settings.dtype
    config = config_of(directory)
    text = config.get("text_config") or config
    if config.get("quantization_config"):
        return "auto"
    stored = str(text.get("dtype") or text.get("torch_dtype") or "float32")
    return stored if stored in ("float32", "bfloat16", "float16") else "auto"


__all__ = ["dtype_name"]
