"""Families of pipelines, by the class that `model_index.json` names.

A family says which components each part needs, how a prompt becomes embeddings, how its latents
begin, what the denoiser is called with, how guidance combines two predictions, and how latents
become pixels. All else is shared: one loop (`inlay_stages.engines.diffusers.denoising`) batches
paintings of unlike prompts, steps and scales.
"""

from collections.abc import Mapping

from inlay_stages.engines.diffusers.families.base import DiffusionFamily
from inlay_stages.engines.diffusers.families.flux import Flux
from inlay_stages.engines.diffusers.families.qwen_image import QwenImage
from inlay_stages.engines.diffusers.families.stable_diffusion import StableDiffusion

FAMILIES: Mapping[str, type[DiffusionFamily]] = {
    StableDiffusion.name: StableDiffusion,
    Flux.name: Flux,
    QwenImage.name: QwenImage,
}
"""Served families by the name of their pipeline."""

__all__ = ["FAMILIES", "DiffusionFamily"]
