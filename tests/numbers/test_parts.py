"""Towers, pipelines and speech are compared with float32 at their start; faults of dtypes are seen."""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from inlay.base.errors import EngineError
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.media.loading import load_tower, media_encoder
from inlay.engine.torch.media.part_check import tower_parts
from inlay.engine.torch.media.readers import readers_of
from inlay.engine.torch.media.tower import Tower
from inlay.engine.torch.self_check.parts import CheckedPart, checked_parts, in_float32
from inlay.engine.torch.self_check.reference import relative
from inlay.messages.card import SelfCheck
from inlay.messages.digest import Secret
from inlay_stages.engines.diffusers.engine import DiffusersEngine
from inlay_stages.engines.diffusers.loading import load as load_pipeline
from inlay_stages.engines.diffusers.part_check import pipeline_parts
from inlay_stages.engines.speech.loading import load as load_speech
from tests.engine.test_diffusers import FAMILIES, model
from tests.engine.torch.test_vision import CASES
from tests.engine.torch.vision_reference import directory_of, spec
from tests.lifelike import lifelike, pipeline
from tests.omni_models import omni

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

TOWERS = [case for case in CASES if "+" not in case]
QUICK = ("llava", "gemma3", "qwen2_5_vl", "llama4", "qwen2_audio", "qwen2_5_omni")


def settings(directory: Path, **values: Any) -> EngineSettings:
    given = {"model": str(directory), "device": "cpu", "num_threads": 1, "self_check": "strict"}
    return EngineSettings.of(**given | values)


def tower(
    case: str, dtype: torch.dtype = torch.bfloat16
) -> tuple[nn.Module, dict[str, CheckedPart]]:
    """A lifelike tower in `dtype`, and its parts."""
    loaded = load_tower(settings(lifelike(directory_of(case)), task="encode"))
    body = loaded.body.to(dtype)
    made = spec(case)
    return body, tower_parts(
        Tower(body, loaded.hidden_size), readers_of(loaded.directory, body.config, made), made
    )


def exact(modules: Sequence[nn.Module], run: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
    """What `run` gives with all weights, and what every module takes, in float32."""

    def raised(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(raised, value))
        return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

    def before(_: nn.Module, given: Any, named: Any) -> Any:
        return raised(given), {name: raised(value) for name, value in named.items()}

    kept = [copy.deepcopy(module.state_dict()) for module in modules]
    dtypes = [next(module.parameters()).dtype for module in modules]
    handles = [
        each.register_forward_pre_hook(before, with_kwargs=True)
        for module in modules
        for each in module.float().modules()
    ]
    with torch.inference_mode():
        found = run()
    for handle in handles:
        handle.remove()
    for module, dtype, state in zip(modules, dtypes, kept, strict=True):
        module.to(dtype).load_state_dict(state)
    return found


def check_float32(part: CheckedPart) -> None:
    """Float32 layer by layer is float32 of the whole, and the weights stay what they were."""
    before = [each.clone() for module in part.modules for each in module.state_dict().values()]
    with torch.inference_mode(), in_float32(part.modules):
        found = part.run()
    after = [each for module in part.modules for each in module.state_dict().values()]
    for kept, now in zip(before, after, strict=True):
        assert kept.dtype == now.dtype
        assert torch.equal(kept, now)
    with torch.inference_mode():
        served = part.run()
    for rows, own, coarse in zip(exact(part.modules, part.run), found, served, strict=True):
        # What stands between layers may be rounded.
        assert relative(own, rows, rows).median() < 0.7 * relative(coarse, rows, rows).median()


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in TOWERS]
)
def test_towers_pass_and_are_compared_with_float32_layer_by_layer(case: str) -> None:
    body, parts = tower(case)
    del body
    found = checked_parts("strict", torch.bfloat16, parts)
    assert found is not None
    assert found.result == "passed"
    assert set(found.parts) == set(parts)
    assert all(1e-4 < far < 0.05 for far in found.parts.values())
    for part in parts.values():
        check_float32(part)


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=() if each == "sd" else pytest.mark.slow) for each in FAMILIES],
)
@pytest.mark.parametrize("part", ["pipeline", "denoiser"])
def test_pipelines_and_their_parts_pass(family: str, part: str) -> None:
    directory = pipeline(model(family))
    loaded = load_pipeline(settings(directory, engine="diffusers", part=part))
    parts = pipeline_parts(loaded)
    names = ["text encoder", "denoiser", "vae"] if part == "pipeline" else ["denoiser"]
    assert list(parts) == names
    found = checked_parts("strict", loaded.dtype, parts)
    assert found is not None
    assert found.result == "passed"
    for each in parts.values():
        check_float32(each)


@pytest.mark.parametrize("part", ["talker", "token2wav"])
def test_talkers_and_vocoders_pass(part: str) -> None:
    loaded = load_speech(settings(lifelike(omni()), engine="speech", part=part))
    found = checked_parts("strict", loaded.dtype, loaded.model.parts())
    assert found is not None
    assert found.result == "passed"
    if part == "talker":
        check_float32(loaded.model.parts()["talker"])


def test_a_tower_that_overflows_in_float16_does_not_start_and_does_in_bfloat16() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        body, parts = tower("llava", dtype)
        layer: Any = body.get_submodule("vision_tower.encoder.layers.0.mlp.fc2")
        layer.weight.data *= 2e4
        if dtype == torch.bfloat16:
            found = checked_parts("strict", dtype, parts)
            assert found is not None
            assert found.result == "passed"
            continue
        for mode in ("start", "full", "strict"):
            with pytest.raises(
                EngineError, match=r"image makes in float16 is not finite.*bfloat16"
            ):
                checked_parts(mode, dtype, parts)
        assert checked_parts("off", dtype, parts) is None


@contextmanager
def coarse(body: nn.Module) -> Iterator[None]:
    """Layers that keep one bit in bfloat16, as broken kernels of one dtype do."""

    def hook(_: nn.Module, __: Any, found: Tensor) -> Tensor:
        if found.dtype != torch.bfloat16:
            return found
        mantissa, exponent = torch.frexp(found)
        return torch.ldexp((mantissa * 2).round() / 2, exponent)

    handles = [
        each.register_forward_hook(hook) for each in body.modules() if isinstance(each, nn.Linear)
    ]
    yield
    for handle in handles:
        handle.remove()


def test_a_tower_that_is_far_from_float32_is_told_of_and_refused_by_strict(
    caplog: pytest.LogCaptureFixture,
) -> None:
    body, parts = tower("qwen2_5_vl")
    language = SelfCheck(result="passed", reference="transformers", distance=0.8, seconds=1.0)
    with coarse(body), caplog.at_level(logging.WARNING):
        found = checked_parts("start", torch.bfloat16, parts, language)
        with pytest.raises(EngineError, match="strict: what the model's image makes in bfloat16"):
            checked_parts("strict", torch.bfloat16, parts, language)
    assert found is not None
    assert (found.result, found.distance) == ("noise", 0.8)
    assert found.parts["image"] > 0.1
    assert "from float32 (allowed: 0.1)" in caplog.text


def test_a_part_that_does_not_run_in_float32_is_told_of_and_refused_by_strict(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layer = nn.Linear(8, 8, dtype=torch.bfloat16).requires_grad_(False)

    def run() -> Sequence[Tensor]:
        if layer.weight.dtype == torch.float32 or layer._forward_hooks:
            raise RuntimeError("no kernel of this dtype")
        return [layer(torch.ones(2, 8, dtype=torch.bfloat16))]

    parts = {"denoiser": CheckedPart([layer], run)}
    found = checked_parts("start", torch.bfloat16, parts)
    assert found is not None
    assert (found.result, found.parts) == ("partial", {})
    assert "no kernel of this dtype" in caplog.text
    with pytest.raises(EngineError, match="strict: the model's denoiser could not be compared"):
        checked_parts("strict", torch.bfloat16, parts)


def test_the_card_of_an_encoder_has_the_distance_of_its_tower() -> None:
    loaded = load_tower(given := settings(lifelike(directory_of("llava")), task="encode"))
    encoder = media_encoder(
        given,
        loaded.body,
        loaded.directory,
        loaded.hidden_size,
        loaded.weights_id,
        loaded.dtype,
        SelfCheck(result="reduced", reference="transformers", distance=0.9),
    )
    assert encoder.self_check is not None
    assert (encoder.self_check.result, encoder.self_check.distance) == ("reduced", 0.9)
    assert 0 < encoder.self_check.parts["image"] < 0.1


async def test_a_denoiser_that_is_not_finite_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = settings(pipeline(model("sd")), engine="diffusers", part="denoiser", self_check="start")
    engine = DiffusersEngine(given, Secret(bytes(32)))
    await engine.start()
    assert engine.card.self_check is not None
    assert 0 < engine.card.self_check.parts["denoiser"] < 0.1
    await engine.close()

    def broken(*given: Any) -> Any:
        loaded = load_pipeline(*given)
        unet: Any = loaded.models["unet"]
        unet.conv_out.bias.data[0] = torch.inf
        return loaded

    monkeypatch.setattr("inlay_stages.engines.diffusers.engine.load", broken)
    engine = DiffusersEngine(given, Secret(bytes(32)))
    with pytest.raises(EngineError, match="denoiser makes in bfloat16 is not finite"):
        await engine.start()
    await engine.close()
