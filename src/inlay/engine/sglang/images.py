"""Which models' images SGLang is given, and how they are laid out. No SGLang."""

from pathlib import Path
from typing import Any

from inlay.base.errors import InvalidRequestError
from inlay.engine.model_files import image_layout
from inlay.engine.settings import EngineSettings
from inlay.engine.sglang import capabilities
from inlay.media.spec import MediaSpec
from inlay.tensors.checkpoint import config_of

_BACKEND = ("sglang", "transformers", "torchvision", "pillow")
"""Packages that decide the pixels that a tower sees."""

_PATCH = 1176
"""Numbers of a patch of Qwen2.5-VL. SGLang takes patches of any other size for finished rows."""


def image_spec(settings: EngineSettings, directory: Path) -> MediaSpec | None:
    """Return the layout of a model's images; None if it takes none.

    Raises:
        InvalidRequestError: SGLang was not compared with it, would compute it otherwise, or does
            one phase alone.
    """
    config = config_of(directory)
    if not config.get("vision_config"):
        return None
    model_type = config.get("model_type")
    if model_type not in capabilities.IMAGES_OF:
        compared = ", ".join(sorted(capabilities.IMAGES_OF))
        raise InvalidRequestError(
            capabilities.NOT_COMPARED.format(model_type=model_type, compared=compared)
        )
    if settings.kv.role != "both":
        raise InvalidRequestError(capabilities.HALVES)
    _check_patches(config)
    return image_layout(settings.media, directory, _BACKEND)


def _check_patches(config: dict[str, Any]) -> None:
    tower = config["vision_config"]
    sides = int(tower.get("patch_size", 14)) ** 2 * int(tower.get("temporal_patch_size", 2))
    numbers = sides * int(tower.get("in_channels", tower.get("in_chans", 3)))
    if config["model_type"] == "qwen2_5_vl" and numbers != _PATCH:
        raise InvalidRequestError(
            f"patches of this model have {numbers} numbers, and SGLang takes all that have not "
            f"{_PATCH} for finished rows"
        )
