"""Starting vLLM-Omni for a pipeline, and what is known of it."""

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm_omni import AsyncOmni
from vllm_omni.diffusion.data import uses_diffusers_adapter

from inlay.base.errors import EngineError, InlayError, InvalidRequestError
from inlay.engine.settings import EngineSettings
from inlay.engine.weights import directory_of
from inlay.messages.card import ModelCard, SelfCheck
from inlay.messages.digest import Secret
from inlay.tensors.weight_files import convertible, find_weights
from inlay_stages.engines.diffusers.checks import ImageBounds
from inlay_stages.engines.diffusers.facts import Facts, read_configs, read_index
from inlay_stages.engines.diffusers.families import FAMILIES, DiffusionFamily
from inlay_stages.engines.diffusers.loading import FILES, identity, read, stored_dtype
from inlay_stages.engines.diffusers.model_card import DescribedPipeline, bounds_of, card_of
from inlay_stages.engines.vllm_omni.arguments import omni_arguments

log = logging.getLogger(__name__)

_TAKES_EMBEDS = ("FluxPipeline", "QwenImagePipeline")
"""Pipelines of vLLM-Omni that read tensors in a prompt's place, of shapes that are known here."""

_MULTIPLE = 32
"""Pixels that sides are multiples of, where the family is not known: enough for every VAE."""

_NOT_COMPARED = (
    "vLLM-Omni gives images alone, and nothing that its models' own code could be compared with; "
    "the engine diffusers is compared"
)

_DENOISERS = ("transformer", "unet")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedOmni:
    """A running vLLM-Omni.

    Attributes:
        omni: its `AsyncOmni`.
        bounds: of a request.
        card: of the pipeline.
        pipeline: name of its class.
        family: counts tokens of prompts; None where it is not known.
        default: parameters of its deployment.
        places: requests that its scheduler runs at once.
        dtype: of embeddings, as the models take them.
        sleeps: it was started with sleep mode.
    """

    omni: Any
    bounds: ImageBounds
    card: ModelCard
    pipeline: str
    family: DiffusionFamily | None
    default: Any
    places: int
    dtype: torch.dtype
    sleeps: bool


def load(settings: EngineSettings, secret: Secret) -> LoadedOmni:
    """Start vLLM-Omni for `settings`; blocks until the models are loaded.

    Raises:
        InvalidRequestError: what vLLM-Omni or inlay refuses.
        EngineError: vLLM-Omni did not start.
    """
    directory = directory_of(settings.model.model, settings.model.revision, FILES)
    name, components = read_index(directory)
    weighted = [each for each in components if _is_weighted(directory / each)]
    denoiser = next((each for each in (*_DENOISERS, *weighted) if each in weighted), None)
    if denoiser is None:
        raise InvalidRequestError(f"{directory} has no safetensors files", param="model")
    stored = stored_dtype(directory / denoiser) or "bfloat16"
    arguments = omni_arguments(
        settings, stored if settings.model.dtype == "auto" else settings.model.dtype
    )
    omni = _started(directory, arguments)
    try:
        _check_stages(omni, name, arguments)
        config = omni.get_diffusion_od_config()
        default = omni.default_sampling_params_list[0]
        facts = _facts(name, directory, components, default)
        if name not in _TAKES_EMBEDS or uses_diffusers_adapter(config) or config.step_execution:
            facts = dataclasses.replace(facts, embeds={})
        bounds = bounds_of(settings, facts, "pipeline")
        places = max(1, int(config.max_num_seqs))
        described = DescribedPipeline(
            "vllm-omni",
            str(directory),
            identity(directory, [*components]),
            str(config.dtype).removeprefix("torch."),
            previews=False,
            self_check=None if settings.health.self_check == "off" else _unchecked(name),
        )
        given = settings.replace(max_num_seqs=places)
        return LoadedOmni(
            omni=omni,
            bounds=bounds,
            card=card_of(given, bounds, secret, described),
            pipeline=name,
            family=_family(name, directory, components, facts),
            default=default,
            places=places,
            dtype=config.dtype,
            sleeps=bool(arguments.get("enable_sleep_mode")),
        )
    except BaseException:
        omni.shutdown()
        raise


def _unchecked(name: str) -> SelfCheck:
    log.warning("self-check: %s was not compared: %s", name, _NOT_COMPARED)
    return SelfCheck(result="unchecked", reference="", note=_NOT_COMPARED)


def _is_weighted(component: Path) -> bool:
    """Return True for a component with weights. Raises `InvalidRequestError` for pickled ones."""
    if find_weights(component) is not None:
        return True
    if convertible(component) is not None:
        raise InvalidRequestError(
            f"{component} has weights that are not safetensors, which are not read", param="model"
        )
    return False


def _started(directory: Path, arguments: dict[str, Any]) -> Any:
    try:
        return AsyncOmni(model=str(directory), **arguments)
    except InlayError:
        raise
    except (ValueError, TypeError, NotImplementedError) as error:
        raise InvalidRequestError(
            f"vLLM-Omni refuses the model or its settings: {_said(error)}"
        ) from error
    except Exception as error:
        raise EngineError(
            "vLLM-Omni did not start; its own output above says why: "
            f"{type(error).__name__}: {_said(error)}"
        ) from error


def _check_stages(omni: Any, name: str, arguments: Mapping[str, Any]) -> None:
    stages = [omni.engine.get_stage_metadata(number) for number in range(omni.num_stages)]
    kinds = [f"{stage.stage_type} to {stage.final_output_type}" for stage in stages]
    if kinds != ["diffusion to image"]:
        raise InvalidRequestError(
            f"{name} is run by vLLM-Omni in stages of {', '.join(kinds)}; served: one diffusion "
            "stage that makes images",
            param="model",
        )
    if "deploy_config" in arguments and omni.engine.pipeline_config is None:
        raise InvalidRequestError(
            f"vLLM-Omni reads no --deploy-config for a {name}, and ignores it; what it says are "
            "flags after --"
        )


def _facts(name: str, directory: Path, components: Mapping[str, str], default: Any) -> Facts:
    """Return sizes and defaults: of a known family, else as the deployment says.

    Raises:
        InvalidRequestError: it does not say all; the message says what is missing.
    """
    family = FAMILIES.get(name)
    if family is not None:
        found = family.facts(read_configs(directory, components))
        steps = default.num_inference_steps or found.steps
        return dataclasses.replace(found, steps=steps)
    if default.num_inference_steps is None:
        raise InvalidRequestError(
            f"inlay does not know in how many steps {name} makes an image; say it, and what else "
            """is not 1024x1024 without guidance, after --: --default-sampling-params """
            """'{"0": {"num_inference_steps": 9}}'"""
        )
    return Facts(
        width=default.width or 1024,
        height=default.height or 1024,
        multiple=_MULTIPLE,
        latent_channels=1,
        scale=_MULTIPLE // 2,
        steps=default.num_inference_steps,
        guidance=default.guidance_scale,
        negative=default.guidance_scale is not None,
        max_steps=1000,
        packed=True,
        embeds={},
        max_length=default.max_sequence_length or 512,
    )


def _family(
    name: str, directory: Path, components: Mapping[str, str], facts: Facts
) -> DiffusionFamily | None:
    family = FAMILIES.get(name)
    if family is None:
        return None
    tokenizers = [each for each in family.text_encoder if each.startswith("tokenizer")]
    return family(read(name, directory, components, tokenizers, torch.float32), facts)


def _said(error: Exception) -> str:
    return " ".join(str(error).split())
