"""Qwen-Image: a transformer over packed latents, Qwen2.5-VL, guidance by a negative prompt."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch.nn.functional import pad

from inlay.base.errors import InvalidRequestError
from inlay_stages.engines.diffusers.facts import Configs, Facts
from inlay_stages.engines.diffusers.families import flow
from inlay_stages.engines.diffusers.families.base import DenoiseState, Embeds, PassRow, timesteps

_MAX_LENGTH = 1024


class QwenImage:
    """`QwenImagePipeline`, as `Family` says."""

    name: ClassVar[str] = "QwenImagePipeline"
    text_encoder: ClassVar[tuple[str, ...]] = ("tokenizer", "text_encoder")
    denoiser: ClassVar[tuple[str, ...]] = ("transformer", "scheduler")
    vae: ClassVar[tuple[str, ...]] = ("vae",)

    def __init__(self, pipeline: Any, facts: Facts) -> None:
        self._pipeline = pipeline
        self._facts = facts

    @classmethod
    def facts(cls, configs: Configs) -> Facts:
        """As `Family`. Raises `InvalidRequestError` for a model with distilled guidance."""
        transformer = configs["transformer"]
        if transformer.get("guidance_embeds"):
            raise InvalidRequestError("Qwen-Image with guidance_embeds is not served")
        scale = 2 ** len(configs["vae"]["temperal_downsample"])
        return Facts(
            width=128 * scale,
            height=128 * scale,
            multiple=2 * scale,
            latent_channels=transformer["in_channels"] // 4,
            scale=2 * scale,
            steps=50,
            guidance=4.0,
            negative=True,
            max_steps=configs["scheduler"].get("num_train_timesteps", 1000),
            packed=True,
            embeds={"prompt_embeds": (-1, transformer["joint_attention_dim"])},
            max_length=_MAX_LENGTH,
        )

    def count_tokens(self, text: str) -> tuple[int, int]:
        """As `Family`: without the template around it."""
        return len(self._pipeline.tokenizer(text).input_ids), _MAX_LENGTH

    def encode(self, text: str) -> Embeds:
        embeds, _ = self._pipeline.encode_prompt(text, device=self._pipeline.text_encoder.device)
        return {"prompt_embeds": embeds[0]}

    def begin(self, painting: DenoiseState, steps: int, count: int) -> None:
        flow.begin(painting, self._pipeline.transformer, self._facts, steps, count)

    def group(self, painting: DenoiseState) -> tuple[object, ...]:
        """As `Family`. Prompts of unlike lengths are padded."""
        return painting.width, painting.height

    def predict(self, rows: Sequence[PassRow]) -> torch.Tensor:
        latents = torch.stack([row.latents for row in rows])
        prompts = [row.embeds["prompt_embeds"] for row in rows]
        lengths = [len(prompt) for prompt in prompts]
        longest, mask = max(lengths), None
        if min(lengths) < longest:
            places = torch.arange(longest, device=latents.device)
            mask = places[None] < torch.tensor(lengths, device=latents.device)[:, None]
        painting, multiple = rows[0].painting, self._facts.multiple
        shape = (1, painting.height // multiple, painting.width // multiple)
        found: torch.Tensor = self._pipeline.transformer(
            hidden_states=latents,
            timestep=timesteps(rows).to(latents.dtype) / 1000,
            encoder_hidden_states=torch.stack(
                [pad(prompt, (0, 0, 0, longest - len(prompt))) for prompt in prompts]
            ),
            encoder_hidden_states_mask=mask,
            img_shapes=[[shape]] * len(rows),
            return_dict=False,
        )[0]
        return found

    def guide(
        self, positive: torch.Tensor, negative: torch.Tensor, guidance: float
    ) -> torch.Tensor:
        """As `Family`, with the length that the prompt alone would give."""
        combined = negative + guidance * (positive - negative)
        length = torch.norm(positive, dim=-1, keepdim=True)
        guided: torch.Tensor = combined * (length / torch.norm(combined, dim=-1, keepdim=True))
        return guided

    def advance(self, painting: DenoiseState, prediction: torch.Tensor) -> None:
        flow.advance(painting, prediction)

    def decode(self, latents: torch.Tensor, width: int, height: int) -> torch.Tensor:
        vae = self._pipeline.vae
        latents = flow.unpacked(latents, width, height, self._facts)[:, :, None].to(vae.dtype)
        shape = (1, vae.config.z_dim, 1, 1, 1)
        mean = torch.tensor(vae.config.latents_mean).view(shape).to(latents)
        scale = 1.0 / torch.tensor(vae.config.latents_std).view(shape).to(latents)
        found: torch.Tensor = vae.decode(latents / scale + mean, return_dict=False)[0]
        return found[:, :, 0]
