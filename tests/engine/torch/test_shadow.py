"""The structure of a model is compared in float32 with small random weights, before it is loaded.

What the rounding of bfloat16 hides is seen here.
"""

import logging
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3NextConfig

from inlay.base.errors import EngineError
from inlay.engine.torch.body_arguments import has_inputs_per_layer
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.self_check import shadow as shadow_module
from inlay.engine.torch.self_check.reference import Reference
from inlay.engine.torch.self_check.shadow import (
    SHADOW_BOUND,
    Shadow,
    compare,
    shadow_of,
    small_model,
)
from inlay.engine.torch.weights.checkpoint import parsed_config
from inlay.engine.torch.weights.families import FAMILIES as SERVED
from inlay.engine.torch.weights.families import family_of
from inlay.tensors.checkpoint import config_of as fields_of
from tests.audio_models import AUDIO_FAMILIES, audio
from tests.model_configs import FAMILIES, config_of
from tests.models import tiny
from tests.numbers.distance import load
from tests.numbers.faults import FAULTS
from tests.numbers.seeding import Seeding
from tests.vision_models import FAMILIES as VISION_FAMILIES
from tests.vision_models import vision

NOTHING = {"residuals clipped as in float16"}
"""Faults that change nothing: no residual is so large."""

CANCELLED = {
    family: {"products 0.5% too large", "a scale of embeddings that is 1% too large"}
    for family in ("gemma2", "gemma3_text")
}
"""Scales that the norms after each part take away."""

SLOW = (
    *((family, False) for family in ("gemma2", "gemma3_text", "qwen3", "phi", "deepseek_v3")),
    *(("gpt_oss", False), ("gemma2", True), ("gemma3_text", True)),
)
"""A family, and whether it is as published."""

FAULTY = ("qwen2", "gemma", "gemma2", "gemma3_text", "qwen3", "phi", "deepseek_v3", "gpt_oss")


def shadow(parsed: Any, family: Any) -> Shadow | None:
    """The comparison of a configuration, as at a start."""
    rows = family.refuses_rows is None and not has_inputs_per_layer(parsed.get_text_config())
    length = parsed.get_text_config().max_position_embeddings
    return shadow_of(CausalModel, parsed, family, length, rows=rows)


@cache
def compared(family: str, *, published: bool = False) -> tuple[CausalModel, Reference]:
    """The small model of a family in a size of the tests or as published, and its reference."""
    kept: list[tuple[CausalModel, Reference]] = []

    def keep(model: CausalModel, reference: Reference) -> Shadow:
        kept.append((model, reference))
        return compare(model, reference)

    parsed = config_of(family)
    if published:
        parsed = type(parsed)()
    with mock.patch.object(shadow_module, "compare", keep):
        shadow(parsed, SERVED[parsed.model_type])
    return kept[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_the_same_but_for_the_rounding_of_float32(family: str) -> None:
    parsed = config_of(family)
    found = shadow(parsed, SERVED[parsed.model_type])
    assert found is not None
    assert 0 < found.distance <= SHADOW_BOUND / 10


@pytest.mark.parametrize("name", [*VISION_FAMILIES, *AUDIO_FAMILIES])
def test_so_are_language_models_beside_towers(name: str) -> None:
    directory = vision(name) if name in VISION_FAMILIES else audio(name)
    found = shadow(parsed_config(directory), family_of(fields_of(directory)))
    assert found is not None
    assert 0 < found.distance <= SHADOW_BOUND / 2


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, Gemma3TextConfig, Qwen3NextConfig])
def test_models_of_published_sizes_are_cut_to_some_megabytes(kind: Any) -> None:
    parsed = kind()
    before = parsed.to_dict()
    family = SERVED[parsed.model_type]
    found = shadow(parsed, family)
    assert found is not None
    assert found.right
    assert parsed.to_dict() == before
    model = small_model(parsed, family)
    assert sum(weight.nbytes for weight in model.parameters()) < 20 << 20
    text = model.config
    assert text.num_hidden_layers == 2 * len(set(getattr(text, "layer_types", "1")))
    for name in ("rope_parameters", "hidden_act", "rms_norm_eps", "head_dim", "sliding_window"):
        assert getattr(text, name, None) == getattr(parsed, name, None)


@pytest.mark.parametrize(
    ("family", "published"),
    [
        ("qwen2", False),
        ("gemma", False),
        *(pytest.param(family, published, marks=pytest.mark.slow) for family, published in SLOW),
    ],
)
def test_faults_that_bfloat16_hides_are_seen(family: str, published: bool) -> None:
    model, reference = compared(family, published=published)
    usual = compare(model, reference)
    assert usual.right
    missed = set()
    for name, fault in FAULTS.items():
        with fault.into(model) as made:
            if made and compare(model, reference).right:
                missed.add(name)
    assert compare(model, reference) == usual
    assert missed <= NOTHING | CANCELLED.get(family, set())


@pytest.mark.parametrize("family", FAULTY)
def test_an_epsilon_ten_times_as_large_is_seen(family: str) -> None:
    model, reference = compared(family)
    with Seeding(model) as into, torch.no_grad():
        for module in into.whole.modules():
            for name in ("eps", "variance_epsilon"):
                if isinstance(own := getattr(module, name, None), float):
                    into.put(module, name, 10 * own)
        assert into.changed
        assert not compare(model, reference).right


def test_a_structure_that_transformers_cannot_make_is_not_compared() -> None:
    parsed = config_of("llama")
    parsed.hidden_act = "none of these"
    assert shadow(parsed, SERVED["llama"]) is None


def test_a_structure_that_the_engine_cannot_run_differs() -> None:
    parsed = config_of("llama")
    with mock.patch.object(CausalModel, "hidden", side_effect=RuntimeError("no such kernel")):
        found = shadow(parsed, SERVED["llama"])
    assert found is not None
    assert not found.right
    assert "no such kernel" in found.place


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("cache_home")
def test_the_first_start_compares_the_structure_and_later_ones_do_not() -> None:
    first = load(tiny("llama"), self_check="start").self_check
    again = load(tiny("llama"), self_check="start").self_check
    assert first is not None
    assert again is not None
    assert 0 < first.shadow < SHADOW_BOUND
    assert again.shadow == 0


@pytest.mark.usefixtures("cache_home")
def test_a_structure_that_differs_is_loaded_without_faster_modules(
    caplog: pytest.LogCaptureFixture,
) -> None:
    differs = Shadow(0.01, "text, decoding")
    with (
        mock.patch.object(shadow_module, "compare", return_value=differs),
        caplog.at_level(logging.WARNING),
    ):
        found = load(tiny("llama"), self_check="start").self_check
        assert found is not None
        assert found.result == "plain"
        assert found.shadow == 0.01
        assert "0.01 (allowed: 0.0001): text, decoding" in caplog.text
        with pytest.raises(EngineError, match=r"strict.* 0\.01 .*text, decoding"):
            load(tiny("llama"), self_check="strict")
    # Nothing is kept of such a start.
    found = load(tiny("llama"), self_check="start").self_check
    assert found is not None
    assert found.result == "passed"


def test_a_full_disk_keeps_no_model_from_starting(caplog: pytest.LogCaptureFixture) -> None:
    full = OSError(28, "No space left on device")
    with (
        mock.patch("tempfile.TemporaryDirectory", side_effect=full),
        mock.patch("inlay.engine.torch.self_check.start.find", return_value=None),
    ):
        found = load(tiny("llama"), self_check="start").self_check
    assert found is not None
    assert (found.result, found.shadow) == ("passed", 0.0)
    assert "No space left on device" in caplog.text
