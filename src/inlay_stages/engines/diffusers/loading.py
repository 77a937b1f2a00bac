"""Loading of a pipeline, or of the components of one of its parts."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import diffusers
import torch
from blake3 import blake3

from inlay.base.errors import EngineError, InvalidRequestError
from inlay.engine.extension_options import section_of
from inlay.engine.settings import EngineSettings
from inlay.engine.torch import threads
from inlay.engine.torch.weights.checkpoint import device_of, dtype_of
from inlay.engine.weights import directory_of, weights_id
from inlay.tensors.checkpoint import stored_tensors
from inlay.tensors.weight_files import find_weights
from inlay_stages.engines.diffusers.facts import Facts, read_configs, read_index
from inlay_stages.engines.diffusers.families import FAMILIES, DiffusionFamily
from inlay_stages.options import StageOptions

_logger = logging.getLogger(__name__)

Part: TypeAlias = Literal["pipeline", "text_encoder", "denoiser", "vae"]

FILES = ("*.json", "*.txt", "*.model", "*/*.json", "*/*.txt", "*/*.model", "*/*.safetensors")
"""Files of a pipeline, as patterns."""

_WEIGHTLESS = ("tokenizer", "tokenizer_2", "scheduler")
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPipeline:
    """A pipeline or a part of it, ready to run.

    Attributes:
        family: runs its models.
        facts: of the whole pipeline.
        part: what is loaded.
        pipeline: diffusers' own, with the components of the part.
        models: those of the part, by their names in the pipeline.
        path: directory of the pipeline.
        weights_id: 32 hex digits, of all that decides what the part makes.
        dtype: of the models.
        device: they run on.
    """

    family: DiffusionFamily
    facts: Facts
    part: Part
    pipeline: Any
    models: Mapping[str, torch.nn.Module]
    path: Path
    weights_id: str
    dtype: torch.dtype
    device: torch.device

    def has(self, part: Part) -> bool:
        """Return True if `part` is loaded, alone or with the others."""
        return self.part in (part, "pipeline")


def load(settings: EngineSettings) -> LoadedPipeline:
    """Load the part of the pipeline that `settings` names, and set the number of CPU threads.

    Weights are read from safetensors files alone, and code is diffusers' and transformers' own.

    Raises:
        InvalidRequestError: a family, component or dtype that is not served.
        EngineError: files that do not fit the models.
    """
    directory = directory_of(settings.model.model, settings.model.revision, FILES)
    name, components = read_index(directory)
    family = FAMILIES.get(name)
    if family is None:
        raise InvalidRequestError(
            f"{directory} is a {name}, which is not served; served: {', '.join(FAMILIES)}",
            param="model",
        )
    part = section_of(settings, StageOptions).part
    if part == "talker" or part == "token2wav":  # mypy narrows so
        raise InvalidRequestError(f"a pipeline of diffusers has no part {part!r}", param="part")
    wanted = _components(family, part)
    missing = sorted({*_components(family, "pipeline")} - {*components})
    if missing:
        raise InvalidRequestError(f"{directory} lacks {', '.join(missing)} of a {name}")
    if "safety_checker" in components:
        _logger.warning("the pipeline's safety checker is not run: images are not checked")
    try:
        facts = family.facts(read_configs(directory, components))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"the configuration files of {directory} do not describe a {name}: {error!r}"
        ) from error
    device = device_of(settings.model.device)
    if device.type == "cpu":
        torch.set_num_threads(threads.count(settings.devices.num_threads))
    stored = stored_dtype(directory / weighted(wanted)[-1])
    dtype = dtype_of(settings.model.dtype, {"dtype": stored}, device)
    pipeline = read(name, directory, components, wanted, dtype).to(device)
    return LoadedPipeline(
        family=family(pipeline, facts),
        facts=facts,
        part=part,
        pipeline=pipeline,
        models={each: getattr(pipeline, each) for each in weighted(wanted)},
        path=directory,
        weights_id=identity(directory, wanted),
        dtype=dtype,
        device=device,
    )


def _components(family: type[DiffusionFamily], part: Part) -> Sequence[str]:
    if part == "pipeline":
        return (*family.text_encoder, *family.denoiser, *family.vae)
    return cast("Sequence[str]", getattr(family, part))


def read(
    name: str,
    directory: Path,
    components: Iterable[str],
    wanted: Sequence[str],
    dtype: torch.dtype,
) -> Any:
    """Return diffusers' own pipeline with the `wanted` of its components alone.

    Raises `EngineError` if files do not fit the models.
    """
    left_out: dict[str, Any] = {each: None for each in components if each not in wanted}
    if name == "StableDiffusionPipeline":
        left_out |= {"safety_checker": None, "requires_safety_checker": False}
    diffusers.utils.logging.disable_progress_bar()
    try:
        pipeline = getattr(diffusers, name).from_pretrained(
            directory, dtype=dtype, use_safetensors=True, local_files_only=True, **left_out
        )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise EngineError(f"the pipeline in {directory} cannot be loaded: {error}") from error
    for each in weighted(wanted):
        _check_complete(directory / each, getattr(pipeline, each))
    return pipeline


def _check_complete(directory: Path, model: torch.nn.Module) -> None:
    """Raise `EngineError` if files hold less than the model: the libraries draw the rest."""
    # Older files have other names, so that only elements can be counted.
    stored = sum(prod(tensor.shape) for tensor in stored_tensors(directory))
    needed = sum(parameter.numel() for parameter in model.parameters())
    if stored < needed:
        raise EngineError(
            f"{directory} lacks weights: its files hold {stored} elements, the model has {needed}"
        )


def weighted(wanted: Sequence[str]) -> list[str]:
    """Return those of some components that have weights."""
    return [name for name in wanted if name not in _WEIGHTLESS]


def stored_dtype(directory: Path) -> str | None:
    """Return the dtype of a component's first stored tensor; None of one that is not served."""
    tensor = next(iter(stored_tensors(directory)))
    return _DTYPES.get(tensor.dtype)


def identity(directory: Path, components: Sequence[str]) -> str:
    """Return 32 hex digits of all that decides what `components` of a pipeline make."""
    hasher = blake3()
    for name in components:
        if find_weights(directory / name) is not None:
            hasher.update(f"{name} {weights_id(directory / name)}\n".encode())
        else:
            for file in sorted((directory / name).glob("*")):
                hasher.update(file.name.encode() + b"\n" + blake3(file.read_bytes()).digest())
    return hasher.digest(16).hex()
