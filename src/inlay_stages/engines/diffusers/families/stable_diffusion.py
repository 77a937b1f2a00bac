"""Stable Diffusion 1 and 2: a UNet over latents, CLIP, classifier-free guidance."""

import inspect
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from diffusers.utils.torch_utils import randn_tensor

from inlay_stages.engines.diffusers.facts import Configs, Facts
from inlay_stages.engines.diffusers.families.base import (
    DenoiseState,
    Embeds,
    PassRow,
    stacked,
    timesteps,
)


class StableDiffusion:
    """`StableDiffusionPipeline`, as `Family` says."""

    name: ClassVar[str] = "StableDiffusionPipeline"
    text_encoder: ClassVar[tuple[str, ...]] = ("tokenizer", "text_encoder")
    denoiser: ClassVar[tuple[str, ...]] = ("unet", "scheduler")
    vae: ClassVar[tuple[str, ...]] = ("vae",)

    def __init__(self, pipeline: Any, facts: Facts) -> None:
        self._pipeline = pipeline
        self._facts = facts
        accepted = (
            ()
            if pipeline.scheduler is None
            else inspect.signature(pipeline.scheduler.step).parameters
        )
        self._takes_generator = "generator" in accepted

    @classmethod
    def facts(cls, configs: Configs) -> Facts:
        unet, encoder = configs["unet"], configs["text_encoder"]
        scale = 2 ** (len(configs["vae"]["block_out_channels"]) - 1)
        size = unet["sample_size"]
        height, width = (size, size) if isinstance(size, int) else size
        length = encoder["max_position_embeddings"]
        return Facts(
            width=width * scale,
            height=height * scale,
            multiple=max(8, scale),
            latent_channels=unet["in_channels"],
            scale=scale,
            steps=50,
            guidance=7.5,
            negative=True,
            max_steps=configs["scheduler"].get("num_train_timesteps", 1000),
            packed=False,
            embeds={"prompt_embeds": (-1, encoder["hidden_size"])},
            max_length=length,
            empty_negative=True,
            padded=True,
            distilled=unet.get("time_cond_proj_dim") is not None,
        )

    def count_tokens(self, text: str) -> tuple[int, int]:
        tokenizer = self._pipeline.tokenizer
        return len(tokenizer(text).input_ids), tokenizer.model_max_length

    def encode(self, text: str) -> Embeds:
        device = self._pipeline.text_encoder.device
        embeds, _ = self._pipeline.encode_prompt(text, device, 1, False)
        return {"prompt_embeds": embeds[0]}

    def begin(self, painting: DenoiseState, steps: int, count: int) -> None:
        unet = self._pipeline.unet
        painting.scheduler.set_timesteps(steps, device=unet.device)
        shape = count, *self._facts.latent_shape(painting.width, painting.height)
        noise = randn_tensor(
            shape, generator=painting.generator, device=unet.device, dtype=unet.dtype
        )
        painting.latents = noise * painting.scheduler.init_noise_sigma

    def group(self, painting: DenoiseState) -> tuple[object, ...]:
        length = painting.positive["prompt_embeds"].shape[0]
        return painting.width, painting.height, length

    def predict(self, rows: Sequence[PassRow]) -> torch.Tensor:
        unet = self._pipeline.unet
        latents = torch.stack([row.latents for row in rows])
        condition = None
        if self._facts.distilled:
            scales = torch.tensor([row.painting.guidance - 1 for row in rows])
            condition = self._pipeline.get_guidance_scale_embedding(
                scales, embedding_dim=unet.config.time_cond_proj_dim
            ).to(latents.device, latents.dtype)
        found: torch.Tensor = unet(
            latents,
            timesteps(rows),
            encoder_hidden_states=stacked(rows, "prompt_embeds"),
            timestep_cond=condition,
            return_dict=False,
        )[0]
        return found

    def guide(
        self, positive: torch.Tensor, negative: torch.Tensor, guidance: float
    ) -> torch.Tensor:
        return negative + guidance * (positive - negative)

    def advance(self, painting: DenoiseState, prediction: torch.Tensor) -> None:
        options = {"generator": painting.generator} if self._takes_generator else {}
        found = painting.scheduler.step(prediction, painting.timestep, painting.latents, **options)
        painting.latents = found.prev_sample
        painting.estimate = getattr(found, "pred_original_sample", None)

    def decode(self, latents: torch.Tensor, width: int, height: int) -> torch.Tensor:
        vae = self._pipeline.vae
        found: torch.Tensor = vae.decode(latents / vae.config.scaling_factor, return_dict=False)[0]
        return found
