"""Models with images, audio and video, in bfloat16, with lifelike weights in tower and language.

Files go through the engine's reader, its tower, and the language model over pages; float32 is held
by `tests/engine/torch/test_vision.py`.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional

from inlay.base.errors import InlayError
from inlay.engine.embed.encoder import Encoder
from inlay.engine.embed.engine import _encoded
from inlay.engine.embed.vector_model import EmbedInput
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.media.tower import Tower, as_rows
from inlay.engine.torch.model import CausalModel
from inlay.media.positions import rope_positions
from inlay.messages.prompt import Media, Prompt, Rows
from tests import output_models
from tests.engine.embed.test_media import CASES as EMBEDDED
from tests.engine.embed.test_media import prompts as embedded
from tests.engine.embed.test_pages import PAGES, page_vectors
from tests.engine.torch.test_vision import CASES, prompts, tower_inputs
from tests.engine.torch.vision_reference import (
    Parts,
    directory_of,
    inputs_of,
    prompt_of,
    spec,
)
from tests.lifelike import lifelike
from tests.numbers.distance import BOUND, Asked, answers, centred, load, ratio, rel, typical
from tests.vision_models import IMAGE

SEEDS = range(3)
NAMES = ("both", "one", "twice")

EXPERTS = tuple(case for case in CASES if "moe" in case or case.startswith("llama4"))

QUICK = ("llava", "gemma3", "qwen2_vl", "qwen3_vl+video", "qwen3_5", "qwen2_audio")


def with_rows(case: str, model: CausalModel | Encoder, parts: Parts) -> Prompt:
    """A prompt with the rows of its media, by the engine's reader and tower."""
    prompt, made = prompt_of(case, parts), dict[bytes, Rows]()
    tower = Tower(model.tower, model.hidden_size)
    for run in prompt.segments:
        if isinstance(run, Media) and run.digest not in made:
            (arrays,) = tower.encode([tower_inputs(case, run)], [run.total])
            assert not isinstance(arrays, InlayError), arrays
            made[run.digest] = as_rows(arrays, atomic=spec(case).atomic)
    return _encoded(prompt, made)


def asked(case: str, model: CausalModel, parts: Parts) -> Asked:
    """The same, with the positions that a sequence computes of the media themselves."""
    rope = None
    if model.rope_axes > 1:
        rope = rope_positions(prompt_of(case, parts))[0].astype("int64")
    prompt = with_rows(case, model, parts)
    return Asked(prompt, rope, prompt.atomic_bounds())


def reference(directory: Path, dtype: torch.dtype) -> Any:
    """transformers' model."""
    (name,) = json.loads((directory / "config.json").read_text())["architectures"]
    model = getattr(transformers, name).from_pretrained(
        directory, dtype=dtype, attn_implementation="eager"
    )
    return getattr(model, "thinker", model).eval()


@torch.no_grad()
def compared(case: str, directory: Path, found: Tensor, outputs: Callable[[Any], Tensor]) -> float:
    """The distance of what the engine `found`, over that of transformers' `outputs`."""
    exact = outputs(reference(directory, torch.float32))
    theirs, rounded = reference(directory, torch.bfloat16), []
    for name in ("eager", "sdpa"):
        theirs.set_attn_implementation(name)
        rounded.append(outputs(theirs))
    return ratio(exact, found, rounded, typical if case in EXPERTS else rel)


def given_to(model: Any, case: str, parts: Parts) -> dict[str, Any]:
    """What transformers takes, in the dtype of `model`."""
    return {
        name: value.to(model.dtype)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in inputs_of(case, parts).items()
    }


def logits_ratio(case: str, seed: int) -> float:
    """Of the logits of all positions."""
    directory = lifelike(directory_of(case), seed)
    model, given = load(directory), [prompts(case)[name] for name in NAMES]
    wanted = [asked(case, model, parts) for parts in given]
    longest = max(len(each.prompt) for each in wanted)
    # What sees all of itself is computed in one step.
    cuts = [longest] if model.bidirectional != "none" else [20, longest - 3]
    found = answers(model, wanted, [*cuts, *range(cuts[-1] + 1, longest + 1)])

    def outputs(theirs: Any) -> Tensor:
        return torch.cat(
            [centred(theirs(**given_to(theirs, case, parts)).logits[0]) for parts in given]
        )

    return compared(case, directory, torch.cat(found), outputs)


def vector_ratio(case: str, seed: int) -> float:
    """Of the last states, as `--task embed` gives them before they get length 1."""
    directory = lifelike(directory_of(case), seed)
    encoder = Encoder.load(EngineSettings.of(model=str(directory), task="embed", num_threads=1))
    given = embedded(case)
    found = encoder.vectors([with_rows(case, encoder, parts) for parts in given])

    def outputs(theirs: Any) -> Tensor:
        wanted = [given_to(theirs, case, parts) for parts in given]
        if case == "llama4":  # it has no body without a head
            states = [
                theirs(**each, output_hidden_states=True).hidden_states[-1] for each in wanted
            ]
        else:
            states = [theirs.base_model(**each).last_hidden_state for each in wanted]
        return torch.stack([each[0, -1].float() for each in states])

    return compared(case, directory, found, outputs)


def page_ratio(seed: int) -> float:
    """Of the vectors of pages, of all positions."""
    directory = lifelike(output_models.pages(), seed)
    encoder = Encoder.load(EngineSettings.of(model=str(directory), task="embed", num_threads=1))
    prompts = []
    for page in PAGES:
        ids, _ = page_vectors(directory, page)
        first, count = ids.index(IMAGE), ids.count(IMAGE)
        parts: Parts = [ids[:first], page, ids[first + count :]]
        prompts.append(with_rows("qwen2_vl", encoder, parts))
    made = encoder.outputs([EmbedInput(prompt, len(prompt)) for prompt in prompts])
    found = torch.from_numpy(np.concatenate([each["tokens"] for each in made]))

    def outputs(theirs: Any) -> Tensor:
        return torch.cat(
            [torch.from_numpy(page_vectors(directory, page, theirs)[1]) for page in PAGES]
        )

    return compared("qwen2_vl", directory, functional.normalize(found), outputs)


def _mean(ratios: Sequence[float]) -> float:
    return math.prod(ratios) ** (1 / len(ratios))


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_prompts_with_media_in_bfloat16_are_as_near_float32_as_transformers_own(case: str) -> None:
    found = [logits_ratio(case, seed) for seed in SEEDS]
    assert _mean(found) <= BOUND, found


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in ("gemma3", "qwen3_vl") else pytest.mark.slow)
        for case in EMBEDDED
    ],
)
def test_vectors_with_media_in_bfloat16_are_as_near_float32_as_transformers_own(case: str) -> None:
    found = [vector_ratio(case, seed) for seed in SEEDS]
    assert _mean(found) <= BOUND, found


@pytest.mark.thorough
def test_vectors_of_pages_in_bfloat16_are_as_near_float32_as_transformers_own() -> None:
    found = [page_ratio(seed) for seed in SEEDS]
    assert _mean(found) <= BOUND, found
