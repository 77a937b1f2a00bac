"""Faults that are seeded into the engine are seen: a check that never failed is not known to work.

Of each fault the engine's error over the reference's own noise at that position is taken, its
geometric mean over chunks and over decoding, at positions one after another and at spread ones.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from inlay.engine.torch import model as model_module
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.self_check import reference as self_check
from inlay.engine.torch.self_check import start
from inlay.engine.torch.self_check.judgement import LAYER_BOUND, Judgement, judge
from inlay.engine.torch.weights.fused import FusedAttention
from tests.lifelike import text
from tests.numbers.distance import (
    DECODED,
    LENGTH,
    Reference,
    load,
    logits_of,
    prompts,
    reference,
    spread,
)
from tests.numbers.faults import FAULTS
from tests.numbers.seeding import Seeding
from tests.quantised_models import write

BOUND = 2.0

QUANTISED = "qwen3, awq"

FAMILIES = (
    *("gemma3_text", "gemma2", "llama3", "mistral", "qwen2", "qwen3", "qwen3_moe", "phi"),
    *("deepseek_v3", "gpt_oss", QUANTISED),
)

QUICK = ("qwen2",)

BELOW: dict[str, dict[str, tuple[float, float]]] = {
    "a scale of embeddings that is 1% too large": {
        "gemma3_text": (0.88, 1.16),
        "gemma2": (1.69, 1.29),
    },
    "angles in bfloat16": {
        "qwen3, awq": (26.79, 2.02),
    },
    "decoding blind to itself": {
        "qwen2": (1.06, 11.65),
        "phi": (1.22, 2.62),
        "qwen3, awq": (1.57, 7.34),
    },
    "inputs of products in 8 bits": {
        "gemma3_text": (1.43, 1.27),
        "gemma2": (1.7, 1.81),
        "qwen2": (1.63, 1.96),
        "qwen3": (2.13, 1.89),
        "phi": (1.56, 1.41),
        "deepseek_v3": (1.54, 1.61),
        "gpt_oss": (1.41, 0.98),
        "qwen3, awq": (2.65, 2.17),
    },
    "no correction of the choice of experts": {
        "deepseek_v3": (4.09, 1.82),
    },
    "products 0.5% too large": {
        "gemma3_text": (0.81, 0.68),
        "gemma2": (1.19, 0.77),
        "llama3": (1.33, 1.15),
        "mistral": (1.19, 1.03),
        "qwen2": (0.86, 1.2),
        "qwen3": (0.86, 0.79),
        "qwen3_moe": (0.97, 0.87),
        "phi": (0.99, 0.93),
        "deepseek_v3": (0.83, 0.92),
        "gpt_oss": (1.65, 0.8),
        "qwen3, awq": (0.83, 1.19),
    },
    "products with more noise": {
        "gemma3_text": (1.18, 1.25),
        "gemma2": (1.39, 1.57),
        "mistral": (2.38, 1.95),
        "qwen3": (2.04, 1.74),
        "qwen3_moe": (2.29, 1.62),
        "phi": (1.73, 1.49),
        "deepseek_v3": (1.65, 1.44),
        "gpt_oss": (1.73, 1.13),
        "qwen3, awq": (1.99, 2.11),
    },
    "residuals clipped as in float16": {
        "gemma3_text": (0.8, 0.5),
        "gemma2": (1.02, 0.78),
        "llama3": (0.72, 0.85),
        "mistral": (0.77, 0.94),
        "qwen2": (0.64, 0.87),
        "qwen3": (0.67, 0.71),
        "qwen3_moe": (0.83, 0.75),
        "phi": (0.91, 0.6),
        "deepseek_v3": (0.78, 0.94),
        "gpt_oss": (1.36, 0.72),
        "qwen3, awq": (0.64, 0.89),
    },
    "scores 1.1 times as large": {
        "gemma2": (1.41, 2.07),
        "qwen3_moe": (4.6, 1.83),
        "phi": (1.61, 1.72),
        "deepseek_v3": (3.18, 1.84),
        "gpt_oss": (2.35, 1.99),
    },
    "scores of one layer 1.41 times as large": {
        "gemma2": (1.84, 5.38),
    },
    "sinks of the next head": {
        "gpt_oss": (2.15, 6.15),
    },
    "the exact GELU for its approximation by tanh": {
        "gemma3_text": (0.8, 0.49),
        "gemma2": (0.91, 0.79),
    },
    "the last 16 outputs of one product wrong": {
        "gemma3_text": (1.46, 2.49),
        "gemma2": (1.62, 1.99),
    },
    "the quick GELU in one layer": {
        "gemma3_text": (0.81, 0.52),
        "gemma2": (0.95, 0.89),
        "phi": (1.04, 0.83),
    },
    "the slowest quarter of angles unscaled": {
        "qwen2": (0.93, 2.07),
        "qwen3_moe": (1.05, 0.76),
    },
    "two channels of one head swapped": {
        "qwen3_moe": (1.66, 3.45),
    },
    "two outputs of one product swapped": {
        "gemma3_text": (0.9, 0.7),
        "gemma2": (1.23, 1.02),
        "llama3": (1.97, 2.18),
        "mistral": (2.1, 1.72),
        "qwen2": (1.76, 3.05),
        "qwen3": (1.62, 1.84),
        "phi": (2.14, 1.66),
        "qwen3, awq": (1.93, 2.22),
    },
}
"""Faults that are within the reference's own rounding, or hardly above it: their answers cannot be
told from right ones. By model: the distance; and that of the check at start, or half of the layer's
own where that is larger."""


class Loaded(NamedTuple):
    """A model, what transformers says at both kinds of positions, and its own check's reference."""

    model: CausalModel
    near: Reference
    far: Reference
    own: self_check.Reference


@cache
def loaded(family: str) -> Loaded:
    """The engine's model with its check at start, which it passed."""
    directory, values = paths(family)
    kept: list[self_check.Reference] = []

    def keep(model: CausalModel, found: self_check.Reference) -> Judgement:
        kept.append(found)
        return judge(model, found)

    length = 512 if family == QUANTISED else 8192
    with (
        mock.patch.object(model_module, "judge", keep),
        # A reference that was kept has no layers.
        mock.patch.object(start, "find", return_value=None),
    ):
        model = load(directory, max_model_len=length, self_check="strict")
    return Loaded(model, reference(values), reference(values, far=True), kept[0])


def paths(family: str) -> tuple[Path, Path]:
    """Directories of a model and of its values."""
    if family == QUANTISED:
        return write("awq", lively=True)
    directory = text(family, 1)
    return directory, directory


def distance(family: str) -> float:
    """The largest mean of log distances, over the groups."""
    model, near, far, _ = loaded(family)
    cut = LENGTH - DECODED
    return max(
        float(part.mean().exp())
        for found in (
            near.distances(logits_of(model, prompts())),
            far.distances(logits_of(model, prompts(), spread())),
        )
        for part in (found[:, :cut], found[:, cut:])
    )


def rounding(family: str) -> set[str]:
    """Faults that may be missed."""
    return {name for name, families in BELOW.items() if family in families}


CASES = [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in FAMILIES]


@pytest.mark.parametrize("family", CASES)
def test_faults_are_seen_unless_they_are_rounding(family: str) -> None:
    assert distance(family) < 1.5
    found = {}
    for name, fault in FAULTS.items():
        with fault.into(loaded(family).model) as made:
            if made:
                found[name] = distance(family)
    assert distance(family) < 1.5
    missed = {name: value for name, value in found.items() if not value > BOUND}
    assert missed.keys() <= rounding(family), missed


@pytest.mark.parametrize("family", CASES)
def test_the_check_at_start_sees_them_as_a_whole_or_in_the_layer_that_has_them(family: str) -> None:
    model, own = loaded(family).model, loaded(family).own
    missed = {}
    for name, fault in FAULTS.items():
        with fault.into(model) as made:
            found = judge(model, own)
            if made and (found.right if fault.instance else found.similar):
                missed[name] = found.distance
    assert judge(model, own).right
    assert missed.keys() <= rounding(family), missed


def _other_scoring(**values: Any) -> Callable[[Seeding, Any], None]:
    return lambda into, one: into.put(one, "scoring", one.scoring._replace(**values))


def _keys_for_values(_: Tensor, found: Tensor) -> Tensor:
    return torch.cat(
        [found[..., : -2 * KEYS], found[..., -KEYS:], found[..., -2 * KEYS : -KEYS]], -1
    )


KEYS = 2 * 16
"""Channels of all key heads of a tiny model."""

OF_FUSED_ATTENTION: dict[str, Callable[[Seeding, Any], None]] = {
    "scores 1.41 times as large": _other_scoring(scaling=1.41 / 16**0.5),
    "a window where there is none": _other_scoring(window=4),
    "keys for values": lambda into, one: into.after(one.project, _keys_for_values),
    "the norm of queries for keys": lambda into, one: (
        into.put(one, "norms", one.norms[:1] * 2) if one.norms else None
    ),
    "an epsilon of 1": lambda into, one: into.put(one, "eps", 1.0) if one.norms else None,
    "pages of another layer": lambda into, one: into.put(one, "layer", one.layer - 1),
    "outputs of another head": lambda into, one: into.before(
        one.out, lambda found: found.roll(16, -1)
    ),
}


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_each_fault_of_one_fused_attention_shows_in_its_layer(family: str) -> None:
    model, own = loaded(family).model, loaded(family).own
    fused = [each for each in model.modules() if isinstance(each, FusedAttention)]
    if not fused:
        pytest.skip("no native kernels for bfloat16 here")
    assert len(fused) == len(model.decoder_layers)
    made = 0
    for name, make in OF_FUSED_ATTENTION.items():
        with Seeding(model) as into:
            make(into, fused[into.middle])
            layers = judge(model, own).layers
            wrong = [at for at, far in enumerate(layers) if not far <= LAYER_BOUND]
            # What another layer keeps in its pages is lost.
            at = into.middle - (name == "pages of another layer")
            assert wrong == [at] * bool(into.changed), (name, layers)
            made += into.changed
    assert made == len(OF_FUSED_ATTENTION) - 2 * (fused[0].norms is None)


@pytest.mark.slow
def test_every_fault_is_made_in_some_model() -> None:
    made = set()
    for family in FAMILIES:
        for name, fault in FAULTS.items():
            with fault.into(loaded(family).model) as possible:
                made |= {name} if possible else set()
    assert made == set(FAULTS)
