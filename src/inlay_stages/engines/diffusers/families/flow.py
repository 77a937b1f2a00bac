"""Parts that transformers over packed latents share, FLUX and Qwen-Image: noise, schedule, steps.

Latents are packed: [images, positions, channels x 4], a position for each 2 x 2 of them.
"""

from typing import Any

import numpy as np
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.utils.torch_utils import randn_tensor

from inlay_stages.engines.diffusers.facts import Facts
from inlay_stages.engines.diffusers.families.base import DenoiseState


def begin(painting: DenoiseState, transformer: Any, facts: Facts, steps: int, count: int) -> None:
    """As `Family.begin`, with a schedule shifted by the number of positions."""
    height, width = (2 * (side // facts.multiple) for side in (painting.height, painting.width))
    channels = facts.latent_channels
    noise = randn_tensor(
        (count, channels, height, width),
        generator=painting.generator,
        device=transformer.device,
        dtype=transformer.dtype,
    )
    noise = noise.view(count, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    painting.latents = noise.reshape(count, (height // 2) * (width // 2), channels * 4)
    scheduler = painting.scheduler
    config = scheduler.config
    shift = calculate_shift(
        painting.latents.shape[1],
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", 1.15),
    )
    sigmas = None if config.get("use_flow_sigmas") else np.linspace(1.0, 1 / steps, steps)
    scheduler.set_timesteps(
        steps if sigmas is None else None, device=transformer.device, sigmas=sigmas, mu=shift
    )
    scheduler.set_begin_index(0)


def advance(painting: DenoiseState, prediction: torch.Tensor) -> None:
    """As `Family.advance`: the prediction is the velocity from the image to the noise."""
    before, scheduler = painting.latents, painting.scheduler
    sigma = scheduler.sigmas[painting.step]
    painting.estimate = (before - sigma * prediction).to(before.dtype)
    painting.latents = scheduler.step(prediction, painting.timestep, before).prev_sample


def unpacked(latents: torch.Tensor, width: int, height: int, facts: Facts) -> torch.Tensor:
    """Return packed latents as [images, channels, height, width] of the latents."""
    count, _, channels = latents.shape
    rows, columns = height // facts.multiple, width // facts.multiple
    latents = latents.view(count, rows, columns, channels // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return latents.reshape(count, channels // 4, 2 * rows, 2 * columns)
