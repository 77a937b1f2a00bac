"""`DiffusionFamily`: one kind of pipeline, as the denoising loop sees it; and what it works on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeAlias

import torch

from inlay_stages.engines.diffusers.facts import Configs, Facts

Embeds: TypeAlias = Mapping[str, torch.Tensor]
"""Tensors of one prompt from the text encoders, by diffusers' names, without a batch dimension."""


@dataclass(slots=True, kw_only=True, eq=False)
class DenoiseState:
    """The images of one request while they are denoised.

    Attributes:
        width: of the images, in pixels.
        height: of the images, in pixels.
        positions: of one image, as the denoiser computes them.
        guidance: the scale of guidance.
        positive: what the prompt asks for.
        negative: what guidance leads away from; None: no classifier-free guidance.
        scheduler: diffusers' own, of this request alone; its timesteps are set.
        generator: on the CPU, seeded: source of all noise.
        latents: [images, ...], as the denoiser takes them.
        step: number of steps done.
        estimate: of the final latents after the last step, where the scheduler has one.
        adapter: key of the adapter of the denoiser, or None.
        preview_every: steps after which the images so far are shown; 0: never.
        left: nobody wants the images any more.
    """

    width: int
    height: int
    positions: int
    guidance: float
    positive: Embeds
    negative: Embeds | None
    scheduler: Any
    generator: torch.Generator
    latents: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    step: int = 0
    estimate: torch.Tensor | None = None
    adapter: str | None = None
    preview_every: int = 0
    left: bool = False

    @property
    def num_steps(self) -> int:
        """Steps of the whole, as the scheduler counts them."""
        return len(self.scheduler.timesteps)

    @property
    def done(self) -> bool:
        """True after the last step."""
        return self.step == self.num_steps

    @property
    def shows(self) -> bool:
        """True after a step with which the images so far are shown, or done."""
        return self.done or (self.preview_every > 0 and self.step % self.preview_every == 0)

    @property
    def shown(self) -> torch.Tensor:
        """The final latents [images, ...], or what they are estimated to be."""
        return self.latents if self.done or self.estimate is None else self.estimate

    @property
    def timestep(self) -> torch.Tensor:
        """The next timestep, without dimensions."""
        timestep: torch.Tensor = self.scheduler.timesteps[self.step]
        return timestep


@dataclass(frozen=True, slots=True)
class PassRow:
    """One row of a forward pass: an image of a painting, with one of its two prompts.

    Attributes:
        painting: it belongs to.
        latents: [...], scaled for the model.
        embeds: of the prompt.
    """

    painting: DenoiseState
    latents: torch.Tensor
    embeds: Embeds


class DiffusionFamily(Protocol):
    """One kind of pipeline. Its tensors are of the served dtype, on the served device."""

    name: ClassVar[str]
    """The class in `model_index.json`."""
    text_encoder: ClassVar[tuple[str, ...]]
    """Components of the part that reads text; then those of the denoiser, and of the decoder."""
    denoiser: ClassVar[tuple[str, ...]]
    vae: ClassVar[tuple[str, ...]]

    def __init__(self, pipeline: Any, facts: Facts) -> None:
        """Serve `pipeline`, diffusers' own, with the components of a part."""

    @classmethod
    def facts(cls, configs: Configs) -> Facts:
        """Read what holds for all parts from the configurations of the components."""

    def count_tokens(self, text: str) -> tuple[int, int]:
        """Return the tokens of `text`, and how many the text encoders read."""

    def encode(self, text: str) -> Embeds:
        """Run the text encoders over one prompt."""

    def begin(self, painting: DenoiseState, steps: int, count: int) -> None:
        """Set timesteps and draw the noise of `count` images.

        Raises `ValueError` if the scheduler cannot do so many steps.
        """

    def group(self, painting: DenoiseState) -> tuple[object, ...]:
        """Return what paintings that share a forward pass have in common."""

    def predict(self, rows: Sequence[PassRow]) -> torch.Tensor:
        """Run the denoiser: [rows, ...]."""

    def guide(
        self, positive: torch.Tensor, negative: torch.Tensor, guidance: float
    ) -> torch.Tensor:
        """Combine the predictions for a prompt and a negative prompt."""

    def advance(self, painting: DenoiseState, prediction: torch.Tensor) -> None:
        """Do the scheduler's step: new latents, and an estimate of the last."""

    def decode(self, latents: torch.Tensor, width: int, height: int) -> torch.Tensor:
        """Decode latents [images, ...] to pixels in -1 to 1 [images, 3, height, width]."""


def timesteps(rows: Sequence[PassRow]) -> torch.Tensor:
    return torch.stack([row.painting.timestep for row in rows])


def stacked(rows: Sequence[PassRow], name: str) -> torch.Tensor:
    """Return the embeddings called `name`, of equal shapes: [rows, ...]."""
    return torch.stack([row.embeds[name] for row in rows])
