"""The denoising loop: one step of many paintings in common forward passes."""

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch

from inlay.engine.diffusers.families.base import Family, Painting, Row


@torch.inference_mode()
def step(family: Family, paintings: Sequence[Painting], max_positions: int) -> None:
    """Do the next step of every painting.

    Prompts, numbers of steps, steps done and scales may differ. Paintings that `family` can give
    one forward pass share it, up to `max_positions` positions each; an image with classifier-free
    guidance takes two. The scheduler's step is each painting's own, so that its images are those it
    would have alone, but for rounding.

    Raises:
        EngineError: the model's output is not finite; nothing was changed.
    """
    keyed = sorted(paintings, key=lambda painting: repr(family.group(painting)))
    for _, group in groupby(keyed, key=family.group):
        _step(family, list(group), max_positions)


def _step(family: Family, paintings: Sequence[Painting], max_positions: int) -> None:
    max_rows = max(1, max_positions // paintings[0].positions)
    rows = [row for painting in paintings if painting.negative for row in _rows(painting, True)]
    guided = len(rows)
    rows += [row for painting in paintings for row in _rows(painting, False)]
    found = torch.cat(
        [family.predict(rows[start : start + max_rows]) for start in range(0, len(rows), max_rows)]
    )
    negatives, positives = iter(found[:guided]), iter(found[guided:])
    for painting in paintings:
        prediction = _next(positives, painting)
        if painting.negative:
            prediction = family.guide(prediction, _next(negatives, painting), painting.guidance)
        family.advance(painting, prediction)
        painting.step += 1


def _rows(painting: Painting, negative: bool) -> list[Row]:
    scale = getattr(painting.scheduler, "scale_model_input", None)
    latents = painting.latents
    if scale is not None:
        latents = scale(latents, painting.timestep)
    embeds = painting.negative if negative else painting.positive
    return [Row(painting, image, embeds or {}) for image in latents]


def _next(found: Iterator[torch.Tensor], painting: Painting) -> torch.Tensor:
    return torch.stack([next(found) for _ in painting.latents])


__all__ = ["step"]
