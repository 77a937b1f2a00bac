"""FLUX.1: a transformer over packed latents, CLIP's pooled vector and T5, embedded guidance."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from inlay_stages.engines.diffusers.facts import Configs, Facts
from inlay_stages.engines.diffusers.families import flow
from inlay_stages.engines.diffusers.families.base import (
    DenoiseState,
    Embeds,
    PassRow,
    stacked,
    timesteps,
)

_MAX_LENGTH = 512


class Flux:
    """`FluxPipeline`, as `Family` says."""

    name: ClassVar[str] = "FluxPipeline"
    text_encoder: ClassVar[tuple[str, ...]] = (
        "tokenizer",
        "text_encoder",
        "tokenizer_2",
        "text_encoder_2",
    )
    denoiser: ClassVar[tuple[str, ...]] = ("transformer", "scheduler")
    vae: ClassVar[tuple[str, ...]] = ("vae",)

    def __init__(self, pipeline: Any, facts: Facts) -> None:
        self._pipeline = pipeline
        self._facts = facts

    @classmethod
    def facts(cls, configs: Configs) -> Facts:
        transformer = configs["transformer"]
        scale = 2 ** (len(configs["vae"]["block_out_channels"]) - 1)
        return Facts(
            width=128 * scale,
            height=128 * scale,
            multiple=2 * scale,
            latent_channels=transformer["in_channels"] // 4,
            scale=2 * scale,
            steps=28,
            guidance=3.5 if transformer["guidance_embeds"] else None,
            negative=False,
            max_steps=configs["scheduler"].get("num_train_timesteps", 1000),
            packed=True,
            embeds={
                "prompt_embeds": (-1, transformer["joint_attention_dim"]),
                "pooled_prompt_embeds": (transformer["pooled_projection_dim"],),
            },
            max_length=_MAX_LENGTH,
        )

    def count_tokens(self, text: str) -> tuple[int, int]:
        """As `Family`: T5's. CLIP's vector is of the beginning of a longer prompt."""
        return len(self._pipeline.tokenizer_2(text).input_ids), _MAX_LENGTH

    def encode(self, text: str) -> Embeds:
        device = self._pipeline.text_encoder.device
        embeds, pooled, _ = self._pipeline.encode_prompt(text, device=device)
        return {"prompt_embeds": embeds[0], "pooled_prompt_embeds": pooled[0]}

    def begin(self, painting: DenoiseState, steps: int, count: int) -> None:
        flow.begin(painting, self._pipeline.transformer, self._facts, steps, count)

    def group(self, painting: DenoiseState) -> tuple[object, ...]:
        length = painting.positive["prompt_embeds"].shape[0]
        return painting.width, painting.height, length

    def predict(self, rows: Sequence[PassRow]) -> torch.Tensor:
        transformer = self._pipeline.transformer
        latents = torch.stack([row.latents for row in rows])
        embeds = stacked(rows, "prompt_embeds")
        painting, multiple = rows[0].painting, self._facts.multiple
        guidance = None
        if self._facts.guidance is not None:
            scales = [row.painting.guidance for row in rows]
            guidance = torch.tensor(scales, dtype=torch.float32, device=latents.device)
        found: torch.Tensor = transformer(
            hidden_states=latents,
            timestep=timesteps(rows).to(latents.dtype) / 1000,
            guidance=guidance,
            pooled_projections=stacked(rows, "pooled_prompt_embeds"),
            encoder_hidden_states=embeds,
            txt_ids=torch.zeros(embeds.shape[1], 3).to(embeds),
            img_ids=self._pipeline._prepare_latent_image_ids(
                1,
                painting.height // multiple,
                painting.width // multiple,
                latents.device,
                latents.dtype,
            ),
            return_dict=False,
        )[0]
        return found

    def guide(
        self, positive: torch.Tensor, negative: torch.Tensor, guidance: float
    ) -> torch.Tensor:
        """Raise `TypeError`: there is no negative prompt."""
        raise TypeError("FLUX takes no negative prompt")

    def advance(self, painting: DenoiseState, prediction: torch.Tensor) -> None:
        flow.advance(painting, prediction)

    def decode(self, latents: torch.Tensor, width: int, height: int) -> torch.Tensor:
        vae = self._pipeline.vae
        latents = flow.unpacked(latents, width, height, self._facts)
        latents = latents / vae.config.scaling_factor + vae.config.shift_factor
        found: torch.Tensor = vae.decode(latents, return_dict=False)[0]
        return found
