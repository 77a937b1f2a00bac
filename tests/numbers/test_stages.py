"""Pipelines that draw and speak, in bfloat16, with lifelike weights in all their models.

They run the libraries' own modules: what could differ is how these are called, batched and cast.
"""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, Qwen2_5OmniForConditionalGeneration

from inlay.engine.settings import EngineSettings
from inlay_stages.engines.diffusers.image_pipeline import ImagePipeline
from inlay_stages.engines.diffusers.loading import load as load_pipeline
from inlay_stages.engines.speech.loading import load as load_speech
from inlay_stages.engines.speech.talker import Talker
from inlay_stages.params import Diffusion
from tests.engine.test_diffusers import FAMILIES, model
from tests.lifelike import lifelike, pipeline
from tests.numbers.distance import BOUND, centred, ratio
from tests.omni_models import omni

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

SEEDS = range(3)
PROMPTS = ("a red fox", "the sea at night")


def _settings(directory: Path, **values: Any) -> EngineSettings:
    return EngineSettings.of(
        **{"model": str(directory), "device": "cpu", "num_threads": 1} | values
    )


def drawn(directory: Path, params: Diffusion) -> tuple[list[Tensor], Tensor]:
    """The noise of two paintings that are painted together, and their images [2, 3, H, W]."""
    loaded = load_pipeline(_settings(directory, engine="diffusers", part="pipeline"))
    assert loaded.dtype == torch.bfloat16
    painter = ImagePipeline(loaded)
    paintings = [painter.begin(painter.encode(text, {}, params)[0], params) for text in PROMPTS]
    noise = [painting.latents.clone() for painting in paintings]
    while not paintings[0].done:
        assert painter.step(paintings, 1 << 20) == [None, None]
    with torch.inference_mode():
        decoded = [
            loaded.family.decode(painting.latents, params.width, params.height)
            for painting in paintings
        ]
    return noise, loaded.pipeline.image_processor.postprocess(torch.cat(decoded), "pt")


def alone(directory: Path, params: Diffusion, noise: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Images of diffusers' own pipeline, one after another."""
    found = diffusers.DiffusionPipeline.from_pretrained(directory, dtype=dtype)
    found.set_progress_bar_config(disable=True)
    guided = "true_cfg_scale" if "Qwen" in type(found).__name__ else "guidance_scale"
    negative = {} if "Flux" in type(found).__name__ else {"negative_prompt": params.negative}
    return torch.cat(
        [
            found(
                text,
                width=params.width,
                height=params.height,
                num_inference_steps=params.steps,
                latents=latents.to(dtype),
                output_type="pt",
                **{guided: params.guidance},
                **negative,
            ).images
            for text, latents in zip(PROMPTS, noise, strict=True)
        ]
    )


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=() if each == "sd" else pytest.mark.slow) for each in FAMILIES],
)
def test_images_in_bfloat16_are_as_near_float32_as_diffusers_own(family: str) -> None:
    params = Diffusion(width=32, height=32, steps=3, seed=7, guidance=3.0, negative="dull")
    ratios = []
    for seed in SEEDS:
        directory = pipeline(model(family), seed)
        latents, found = drawn(directory, params)
        theirs, exact = (
            alone(directory, params, latents, dtype) for dtype in (torch.bfloat16, torch.float32)
        )
        ratios.append(ratio(_flat(exact), _flat(found), [_flat(theirs)]))
    assert math.prod(ratios) ** (1 / len(ratios)) <= BOUND, ratios


def _flat(images: Tensor) -> Tensor:
    """Images [N, ...] without their mean [N, pixels]."""
    return centred(images.flatten(1))


@torch.no_grad()
def codes_ratio(directory: Path) -> float:
    """Of the logits of 17 codes, the first behind a prompt, the others one by one."""
    loaded = load_speech(_settings(directory, engine="speech", part="talker"))
    own, cache = loaded.model, DynamicCache()
    assert isinstance(own, Talker)
    assert loaded.dtype == torch.bfloat16
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(30, own.width, generator=generator).to(torch.bfloat16)
    places = torch.arange(30).expand(3, -1)
    found = [
        own.logits(rows[start:stop], places[:, start:stop], cache)
        for start, stop in pairwise((0, *range(14, 31)))
    ]

    def logits(dtype: torch.dtype) -> Tensor:
        whole = Qwen2_5OmniForConditionalGeneration.from_pretrained(directory, dtype=dtype)
        talker: Any = whole.talker.eval()
        inputs = talker.thinker_to_talker_proj(rows[None].to(dtype))
        states = talker.model(inputs_embeds=inputs, position_ids=places[:, None])
        return centred(talker.codec_head(states.last_hidden_state)[0, 13:])

    return ratio(logits(torch.float32), centred(torch.cat(found)), [logits(torch.bfloat16)])


@pytest.mark.thorough
def test_logits_of_codes_in_bfloat16_are_as_near_float32_as_transformers_own() -> None:
    ratios = [codes_ratio(lifelike(omni(), seed)) for seed in SEEDS]
    assert math.prod(ratios) ** (1 / len(ratios)) <= BOUND, ratios
