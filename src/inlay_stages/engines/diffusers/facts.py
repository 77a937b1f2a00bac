"""Facts from a pipeline's configuration files, whatever part of it is loaded. No torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from inlay.base.errors import InvalidRequestError

Configs: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Configuration of each component by its name in `model_index.json`."""

INDEX = "model_index.json"
_LIBRARIES = ("diffusers", "transformers")
_FILES = ("config.json", "scheduler_config.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Sizes and defaults of a pipeline.

    Attributes:
        width: of an image unless a request says otherwise; then its height, in pixels.
        multiple: width and height are multiples of it.
        latent_channels: as the denoiser's latents have them.
        scale: pixels of a side of one latent position.
        steps: unless a request says otherwise.
        guidance: unless a request says otherwise; None: the model takes no scale.
        negative: it takes a negative prompt.
        empty_negative: guidance leads away from the empty prompt where a request has no other.
        max_steps: the scheduler's timesteps.
        packed: latents are positions with 2 x 2 of them, not planes.
        embeds: shape of each tensor that stands for a prompt; -1: any length up to `max_length`.
        max_length: positions of a prompt.
        padded: a text encoder makes `max_length` positions of any text, and a prompt has as many
            as its negative prompt.
        distilled: the denoiser is told the scale of guidance, and runs once a step.
    """

    width: int
    height: int
    multiple: int
    latent_channels: int
    scale: int
    steps: int
    guidance: float | None
    negative: bool
    max_steps: int
    packed: bool
    embeds: Mapping[str, tuple[int, ...]]
    max_length: int
    empty_negative: bool = False
    padded: bool = False
    distilled: bool = False

    def guides(self, guidance: float, *, negative: bool) -> bool:
        """Return True if a negative prompt takes part; `negative`: the request has one."""
        takes = self.negative and not self.distilled
        return takes and guidance > 1 and (negative or self.empty_negative)

    def positions(self, width: int, height: int) -> int:
        """Positions that the denoiser computes for an image of `width` x `height` pixels."""
        return (width // self.scale) * (height // self.scale)

    def latent_shape(self, width: int, height: int) -> tuple[int, ...]:
        """Shape of the latents of one image."""
        if self.packed:
            return self.positions(width, height), 4 * self.latent_channels
        return self.latent_channels, height // self.scale, width // self.scale


def is_pipeline(directory: Path) -> bool:
    """Return True for a directory in diffusers' format."""
    return (directory / INDEX).is_file()


def read_index(directory: Path) -> tuple[str, dict[str, str]]:
    """Return the pipeline's class, and the class of each component it has.

    Raises:
        InvalidRequestError: no pipeline's directory, or a component whose code is not diffusers'
            or transformers' own.
    """
    index = _read(directory / INDEX)
    if not isinstance(index.get("_class_name"), str):
        raise InvalidRequestError(f"{directory / INDEX} does not name the class of its pipeline")
    components = {}
    for name, entry in index.items():
        if name.startswith("_") or not isinstance(entry, list):
            continue
        if len(entry) != 2 or not all(part is None or isinstance(part, str) for part in entry):
            raise InvalidRequestError(
                f"{directory / INDEX}: {name} is {entry}; a component is a library and a class"
            )
        library, class_name = entry
        if class_name is None:
            continue
        if library not in _LIBRARIES:
            raise InvalidRequestError(
                f"{directory / INDEX}: {name} is code of {library!r}; allowed: "
                f"{', '.join(_LIBRARIES)}"
            )
        components[name] = class_name
    return index["_class_name"], components


def read_configs(directory: Path, components: Mapping[str, str]) -> Configs:
    """Read the configuration of each component.

    Raises `InvalidRequestError` for unreadable ones.
    """
    configs: dict[str, Mapping[str, Any]] = {}
    for name in components:
        files = [directory / name / file for file in _FILES]
        found = [file for file in files if file.is_file()]
        configs[name] = _read(found[0]) if found else {}
    return configs


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{path} cannot be read: {error}", param="model") from error
    if not isinstance(found, dict):
        raise InvalidRequestError(f"{path} holds {type(found).__name__}, not an object")
    return found
