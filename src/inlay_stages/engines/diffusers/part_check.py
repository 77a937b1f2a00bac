"""The self-check of a pipeline's models, on inputs that are made here."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from inlay.engine.torch.self_check import parts
from inlay_stages.engines.diffusers.denoising import rows_of
from inlay_stages.engines.diffusers.image_pipeline import ImagePipeline
from inlay_stages.engines.diffusers.loading import LoadedPipeline, Part, weighted
from inlay_stages.params import Diffusion

_MOST_SIDE = 512
"""Pixels of a side of the image at most: models for larger ones compute these as well."""

_TEXT = "a harbour town at night, lanterns on the quay, oil on canvas"
_POSITIONS = 32
"""Of a prompt, where the text encoder is another worker's."""


def pipeline_parts(loaded: LoadedPipeline) -> dict[str, parts.CheckedPart]:
    """Return what is compared with float32: each loaded part, with its models."""
    runs: Mapping[Part, Callable[[LoadedPipeline], Sequence[Tensor]]] = {
        "text_encoder": _encoded,
        "denoiser": _predicted,
        "vae": _decoded,
    }
    found: dict[str, parts.CheckedPart] = {}
    for part in get_args(Part):
        if part in runs and loaded.has(part):
            names = weighted(getattr(loaded.family, part))
            modules = [loaded.models[name] for name in names]
            found[part.replace("_", " ")] = parts.CheckedPart(modules, partial(runs[part], loaded))
    return found


def _embeds(loaded: LoadedPipeline) -> dict[str, Tensor]:
    if loaded.has("text_encoder"):
        return dict(loaded.family.encode(_TEXT))
    generator = torch.Generator().manual_seed(8)
    return {
        name: torch.randn(
            [_POSITIONS if size == -1 else size for size in shape], generator=generator
        ).to(loaded.device, loaded.dtype)
        for name, shape in loaded.facts.embeds.items()
    }


def _encoded(loaded: LoadedPipeline) -> Sequence[Tensor]:
    return [rows.reshape(-1, rows.shape[-1]) for rows in loaded.family.encode(_TEXT).values()]


def _predicted(loaded: LoadedPipeline) -> Sequence[Tensor]:
    """Compute the first step of an image."""
    facts = loaded.facts
    width, height = _size(loaded)
    steps = min(facts.steps, facts.max_steps)
    params = Diffusion(width=width, height=height, steps=steps, guidance=facts.guidance or 1.0)
    embeds = _embeds(loaded)
    # Guidance would only run the same model on another prompt.
    painting = ImagePipeline(loaded).begin(
        embeds | {f"negative_{name}": rows for name, rows in embeds.items()}, params
    )
    return [loaded.family.predict(rows_of(painting, False)).flatten(1)]


def _decoded(loaded: LoadedPipeline) -> Sequence[Tensor]:
    width, height = _size(loaded)
    shape = 1, *loaded.facts.latent_shape(width, height)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(9))
    found = loaded.family.decode(latents.to(loaded.device, loaded.dtype), width, height)
    return [found.reshape(-1, found.shape[-1])]


def _size(loaded: LoadedPipeline) -> tuple[int, int]:
    multiple = loaded.facts.multiple
    width, height = (
        max(multiple, min(own, _MOST_SIDE) // multiple * multiple)
        for own in (loaded.facts.width, loaded.facts.height)
    )
    return width, height
