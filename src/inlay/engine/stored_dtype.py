"""The dtype a checkpoint is stored in, for engines with another meaning of "auto"."""

from pathlib import Path

from inlay.engine.settings import EngineSettings
from inlay.tensors.table import config_of


def dtype_name(settings: EngineSettings, directory: Path) -> str:
    """Return the requested dtype; for "auto", the checkpoint's own.

    vLLM's and SGLang's "auto" would turn float32 into half precision. Returns "auto" if the
    checkpoint names no single dtype.
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
