"""The denoising loop: one step of many paintings in common forward passes."""

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch

from inlay.engine.torch.failures import is_out_of_memory
from inlay_stages.engines.diffusers.families.base import DenoiseState, DiffusionFamily, PassRow
from inlay_stages.engines.diffusers.lora import PipelineLoras


@torch.inference_mode()
def step(
    family: DiffusionFamily,
    paintings: Sequence[DenoiseState],
    max_positions: int,
    loras: PipelineLoras,
) -> list[DenoiseState]:
    """Do the next step of every painting; return those for which memory is too small.

    Prompts, numbers of steps, steps done and scales may differ. Paintings that `family` can give
    one forward pass share it, if they have the same adapter, up to `max_positions` positions each;
    an image with classifier-free guidance takes two. The scheduler's step is each painting's own,
    so that its images are those it would have alone, but for rounding. Where memory is too small
    for several, halves of them are tried, so that only those are returned for which it is too
    small alone. A step of many forward passes ends between two of them once nobody wants it.
    """

    def group_of(painting: DenoiseState) -> tuple[object, ...]:
        return painting.adapter, family.group(painting)

    keyed = sorted(paintings, key=lambda painting: repr(group_of(painting)))
    return [
        painting
        for _, group in groupby(keyed, key=group_of)
        for painting in _step(family, list(group), max_positions, loras)
    ]


def _step(
    family: DiffusionFamily, paintings: list[DenoiseState], max_positions: int, loras: PipelineLoras
) -> list[DenoiseState]:
    try:
        with loras.used(paintings[0].adapter):
            predicted = _predicted(family, paintings, max_positions)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    else:
        if predicted is None:
            return []
        negative, positive = predicted
        for painting in paintings:
            prediction = _next(positive, painting)
            if painting.negative:
                prediction = family.guide(prediction, _next(negative, painting), painting.guidance)
            family.advance(painting, prediction)
            painting.step += 1
        return []
    # Not in the handler, where the error keeps what was computed so far.
    if len(paintings) == 1:
        return paintings
    middle = len(paintings) // 2
    halves = paintings[:middle], paintings[middle:]
    return [painting for half in halves for painting in _step(family, half, max_positions, loras)]


def _predicted(
    family: DiffusionFamily, paintings: Sequence[DenoiseState], max_positions: int
) -> tuple[Iterator[torch.Tensor], Iterator[torch.Tensor]] | None:
    """Return the predictions for the negative prompts that there are, and for the prompts.

    None where all paintings were left meanwhile.
    """
    max_rows = max(1, max_positions // paintings[0].positions)
    rows = [row for painting in paintings if painting.negative for row in rows_of(painting, True)]
    guided = len(rows)
    rows += [row for painting in paintings for row in rows_of(painting, False)]
    parts: list[torch.Tensor] = []
    for start in range(0, len(rows), max_rows):
        if all(painting.left for painting in paintings):
            return None
        parts.append(family.predict(rows[start : start + max_rows]))
    found = torch.cat(parts)
    return iter(found[:guided]), iter(found[guided:])


def rows_of(painting: DenoiseState, negative: bool) -> list[PassRow]:
    """Return the rows of the next step of a painting, for one of its two prompts."""
    scale = getattr(painting.scheduler, "scale_model_input", None)
    latents = painting.latents
    if scale is not None:
        latents = scale(latents, painting.timestep)
    embeds = painting.negative if negative else painting.positive
    return [PassRow(painting, image, embeds or {}) for image in latents]


def _next(found: Iterator[torch.Tensor], painting: DenoiseState) -> torch.Tensor:
    return torch.stack([next(found) for _ in painting.latents])
