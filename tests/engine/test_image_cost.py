"""What an image may cost, and the end of a step that nobody wants any more."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from inlay.base.errors import InvalidRequestError
from inlay_stages.cards import image_card
from inlay_stages.engines.diffusers.families import FAMILIES
from inlay_stages.engines.diffusers.families.base import PassRow
from tests.engine.test_diffusers import PROMPT, Run, params, serving, text

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.mark.parametrize("part", ["pipeline", "denoiser", "text_encoder", "vae"])
async def test_an_image_far_over_the_models_own_size_is_refused_before_anything_is_computed(
    part: str,
) -> None:
    async with serving("sd", part) as engine:
        image = image_card(engine.card)
        assert image is not None
        assert (image.width, image.height) == (32, 32)
        assert (image.max_pixels, image.max_cost) == (64 * 64, 200 * 32 * 32)
        for asked, said in (
            (params(width=1024, height=1024, steps=1), r"4096 pixels .--max-generated-image-size"),
            (params(width=64, height=64, steps=51), r"costs 204 .* 32x32; at most 200 .*max-image"),
        ):
            with pytest.raises(InvalidRequestError, match=said) as refused:
                Run(engine, asked, text(PROMPT))
            assert refused.value.param in ("size", "num_inference_steps")
        assert (engine.stats().steps, engine.stats().waiting) == (0, 0)


async def test_the_cost_of_an_image_is_what_the_worker_was_told() -> None:
    more: dict[str, Any] = {"max_generated_image_size": 96 * 96, "max_image_cost": 18.0}
    async with serving("sd", **more) as engine:
        with pytest.raises(InvalidRequestError, match=r"costs 27 steps .*; at most 18 are allowed"):
            Run(engine, params(width=96, height=96, steps=3), text(PROMPT))
        (image,) = await Run(engine, params(width=96, height=96, steps=2), text(PROMPT)).images()
        assert image.shape == (96, 96, 3)


async def test_a_step_of_many_passes_ends_once_nobody_wants_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family = FAMILIES["StableDiffusionPipeline"]
    loop, begun, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    predict, passes = family.predict, 0

    def held(self: object, rows: Sequence[PassRow]) -> torch.Tensor:
        nonlocal passes
        passes += 1
        loop.call_soon_threadsafe(begun.set)
        go_on.wait(60)
        return predict(self, rows)  # type: ignore[arg-type]

    monkeypatch.setattr(family, "predict", held)
    # An image a pass: 16 x 16 positions.
    async with serving("sd", max_num_batched_tokens=256) as engine:
        try:
            run = Run(engine, params(count=10, guidance=1.0), text(PROMPT))
            await begun.wait()
            engine.abort(run.id)
            await run.ended.wait()
            left = passes
        finally:
            go_on.set()
        other = await Run(engine, params(steps=1, guidance=1.0), text(PROMPT)).images()
    assert (left, passes, len(other)) == (1, 2, 1)
