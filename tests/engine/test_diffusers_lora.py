"""LoRA adapters of denoisers and text encoders, against PEFT's merge and diffusers' own loader."""

import asyncio
import copy
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from diffusers.training_utils import _collate_lora_metadata
from diffusers.utils import convert_state_dict_to_diffusers
from safetensors.torch import load_file, save_file

from inlay.adapter.files import PIPELINE
from inlay.adapter.library import AdapterLibrary, Opened
from inlay.base.errors import InvalidRequestError, OverloadedError
from inlay.messages.card import Adapter
from inlay.messages.commands import LoadAdapter, Sleep, WakeUp
from inlay.worker.adapters import AdapterRegistry
from inlay.worker.host import EngineHost
from inlay_stages.engines.diffusers.engine import DiffusersEngine
from inlay_stages.engines.diffusers.image_pipeline import tensor_of
from inlay_stages.engines.diffusers.lora import PipelineLoras
from tests.engine.conformance import SECRET
from tests.engine.test_diffusers import (
    FAMILIES,
    PROMPT,
    Pixels,
    Run,
    alone,
    near,
    params,
    serving,
    text,
    whole,
)
from tests.scratch import scratch

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

TARGETS = "to_q", "to_k", "to_v", "to_out.0"
DENOISERS = {"sd": "unet", "flux": "transformer", "qwen": "transformer"}


ENCODERS = (
    ("sd", "text_encoder", ("q_proj", "v_proj", "fc1")),
    ("flux", "text_encoder", ("q_proj", "out_proj", "fc2")),
    ("flux", "text_encoder_2", ("q", "o", "wo")),
    ("qwen", "text_encoder", ("q_proj", "down_proj")),
)
"""Text encoders, and layers of each."""


@cache
def lora(
    family: str,
    seed: int,
    rank: int = 4,
    targets: tuple[str, ...] = TARGETS,
    part: str | None = None,
) -> Path:
    """A LoRA whose random matrices are large enough to change a picture, in PEFT's form.

    Of the denoiser, or of `part`.
    """
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(targets))
    adapted = peft.get_peft_model(part_of(family, part), config)
    draw(adapted, seed)
    directory = scratch(f"lora-{family}")
    adapted.save_pretrained(directory)
    return directory


def draw(adapted: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(drawn / parameter.shape[-1] ** 0.5)


def part_of(family: str, part: str | None = None) -> Any:
    return copy.deepcopy(getattr(whole(family), part or DENOISERS[family]))


def merged(family: str, seed: int, part: str | None = None, **how: Any) -> Any:
    """diffusers' pipeline with PEFT's merge of `lora` in its denoiser, or in `part`."""
    directory = lora(family, seed, **how) if part is None else lora(family, seed, part=part, **how)
    model = peft.PeftModel.from_pretrained(part_of(family, part), directory)
    return with_parts(family, {part or DENOISERS[family]: model.merge_and_unload()})


def with_parts(family: str, parts: Mapping[str, Any]) -> Any:
    more = {"requires_safety_checker": False} if family == "sd" else {}
    found = type(whole(family))(**{**whole(family).components, **parts}, **more)
    found.set_progress_bar_config(disable=True)
    return found


@cache
def trained(family: str, seed: int, described: bool = True) -> Path:
    """A LoRA of a denoiser and CLIP as diffusers' scripts write it, with their configurations.

    Without them, in the older form of the names.
    """
    parts = {
        DENOISERS[family]: (part_of(family), TARGETS),
        "text_encoder": (part_of(family, "text_encoder"), ("q_proj", "out_proj", "fc1")),
    }
    layers: dict[str, Any] = {}
    for name, (model, targets) in parts.items():
        model.add_adapter(peft.LoraConfig(r=4, lora_alpha=6, target_modules=list(targets)))
        draw(model, seed)
        state = peft.get_peft_model_state_dict(model)
        old = not described or name == "text_encoder"
        layers[f"{name}_lora_layers"] = convert_state_dict_to_diffusers(state) if old else state
    models = {name: model for name, (model, _) in parts.items()}
    more = _collate_lora_metadata(models) if described else {}
    directory = scratch(f"trained-{family}")
    type(whole(family)).save_lora_weights(directory, **layers, **more)
    return directory


def loaded(family: str, directory: Path) -> Any:
    """diffusers' pipeline with a LoRA that it has loaded itself."""
    names = DENOISERS[family], "text_encoder"
    found = with_parts(family, {name: part_of(family, name) for name in names})
    found.load_lora_weights(directory)
    return found


def named(name: str, directory: Path) -> Adapter:
    return Adapter(name=name, content_id=name, path=str(directory))


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
async def test_images_of_adapters_are_those_of_pefts_merge_in_whatever_batch(family: str) -> None:
    async with serving(family, enable_lora=True) as engine:
        for seed in (1, 2):
            await engine.load_adapter(
                named(f"a{seed}", lora(family, seed)), str(lora(family, seed))
            )
        asked = [
            (None, params()),
            ("a1", params()),
            ("a2", params(count=2)),
            ("a1", params(seed=3)),
        ]
        runs = [Run(engine, each, text(PROMPT), adapter=name) for name, each in asked]
        found = [await run.images() for run in runs]
        with pytest.raises(InvalidRequestError, match="adapter 'a3' does not exist"):
            Run(engine, params(), text(PROMPT), adapter="a3")
        assert near(await after_sleep(engine), found[1])
        await engine.unload_adapter("a1")
        with pytest.raises(InvalidRequestError, match="adapter 'a1' does not exist"):
            Run(engine, params(), text(PROMPT), adapter="a1")
    pipelines = {None: whole(family)} | {f"a{seed}": merged(family, seed) for seed in (1, 2)}
    for (name, each), images in zip(asked, found, strict=True):
        assert near(images, alone(family, PROMPT, each, pipelines[name])), name
    assert not near(found[0], found[1])


@pytest.mark.thorough
@pytest.mark.parametrize(("family", "part", "targets"), ENCODERS)
async def test_an_adapter_of_a_text_encoder_is_pefts_merge(
    family: str, part: str, targets: tuple[str, ...]
) -> None:
    directory = lora(family, 1, targets=targets, part=part)
    asked = [(None, params()), ("a", params()), ("a", params(seed=3)), (None, params(seed=3))]
    async with serving(family, enable_lora=True) as engine:
        await engine.load_adapter(named("a", directory), str(directory))
        runs = [Run(engine, each, text(PROMPT), adapter=name) for name, each in asked]
        found = [await run.images() for run in runs]
    pipelines = {None: whole(family), "a": merged(family, 1, part, targets=targets)}
    for (name, each), images in zip(asked, found, strict=True):
        assert near(images, alone(family, PROMPT, each, pipelines[name])), name
    assert not near(found[0], found[1])


@pytest.mark.parametrize("family", ["sd", pytest.param("flux", marks=pytest.mark.slow)])
@pytest.mark.parametrize("described", [True, False])
async def test_a_file_of_diffusers_gives_the_images_of_its_own_loader(
    family: str, described: bool
) -> None:
    files = {f"a{seed}": trained(family, seed, described) for seed in (1, 2)}
    asked = [(None, params()), ("a1", params()), ("a2", params(count=2)), ("a1", params(seed=3))]
    async with serving(family, enable_lora=True) as engine:
        for each, directory in files.items():
            await engine.load_adapter(named(each, directory), str(directory))
        runs = [Run(engine, given, text(PROMPT), adapter=name) for name, given in asked]
        found = [await run.images() for run in runs]
        assert near(await after_sleep(engine), found[1])
        await engine.unload_adapter("a1")
        with pytest.raises(InvalidRequestError, match="adapter 'a1' does not exist"):
            Run(engine, params(), text(PROMPT), adapter="a1")
    pipelines = {None: whole(family)} | {each: loaded(family, files[each]) for each in files}
    for (name, given), images in zip(asked, found, strict=True):
        assert near(images, alone(family, PROMPT, given, pipelines[name])), name
    assert not near(found[0], found[1])
    # Of the text alone, and of the denoiser alone, is another picture.
    half = with_parts(family, {"text_encoder": pipelines["a1"].text_encoder})
    assert not near(found[1], alone(family, PROMPT, asked[1][1], half))


async def test_a_text_encoder_that_is_a_stage_takes_its_part_of_a_file() -> None:
    files = {f"a{seed}": trained("sd", seed) for seed in (1, 2)}
    names = [None, "a1", "a2", "a1"]
    async with serving("sd", "text_encoder", enable_lora=True) as engine:
        for each, directory in files.items():
            await engine.load_adapter(named(each, directory), str(directory))
        runs = [Run(engine, params(), text(PROMPT), adapter=name) for name in names]
        outputs = [await run.done() for run in runs]
        with pytest.raises(InvalidRequestError, match="is of unet; this stage has text_encoder"):
            await engine.load_adapter(named("b", halved()), str(halved()))
    for name, output in zip(names, outputs, strict=True):
        pipeline = whole("sd") if name is None else loaded("sd", files[name])
        with torch.no_grad():
            wanted = pipeline.encode_prompt(PROMPT, "cpu", 1, True, negative_prompt="")
        payloads = {one.port: tensor_of(one) for one in output}
        for port, embeds in zip(("prompt_embeds", "negative_prompt_embeds"), wanted, strict=True):
            # PEFT multiplies by the scale last.
            torch.testing.assert_close(payloads[f"embeds.{port}"], embeds[0])


@cache
def halved() -> Path:
    """The matrices of a denoiser alone, in diffusers' form."""
    directory = scratch("halved")
    tensors = load_file(trained("sd", 1) / PIPELINE)
    save_file(
        {name: one for name, one in tensors.items() if name.startswith("unet.")},
        directory / PIPELINE,
    )
    return directory


async def test_an_adapter_of_a_vae_is_refused_by_name() -> None:
    directory = scratch("of-a-vae")
    ends = "lora_A", "lora_B"
    tensors = {f"vae.decoder.mid.to_q.{end}.weight": torch.ones(4, 4) for end in ends}
    save_file(tensors, directory / PIPELINE)
    async with serving("sd", enable_lora=True) as engine:
        with pytest.raises(InvalidRequestError, match="has matrices of the VAE; adapters are of"):
            await engine.load_adapter(named("a", directory), str(directory))


async def after_sleep(engine: DiffusersEngine) -> list[Pixels]:
    """The image of an adapter after its engine has slept."""
    await engine.sleep(2)
    with pytest.raises(OverloadedError, match="asleep"):
        Run(engine, params(), text(PROMPT), adapter="a1")
    assert await engine.wake_up([])
    return await Run(engine, params(), text(PROMPT), adapter="a1").images()


async def test_models_that_sleep_keep_no_adapter() -> None:
    # As a GPU's do, whose weights wait in the host's memory.
    async with serving("sd", enable_lora=True) as engine:
        await engine.load_adapter(named("a1", lora("sd", 1)), str(lora("sd", 1)))
        unet = engine._loaded.models["unet"]
        assert any(module._forward_hooks for module in unet.modules())
        await engine.sleep(1)
        assert not any(module._forward_hooks for module in unet.modules())


async def test_an_adapter_that_does_not_come_back_is_loaded_when_woken_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving("sd", enable_lora=True) as engine:
        for name, seed in (("a1", 1), ("a2", 2)):
            await engine.load_adapter(named(name, lora("sd", seed)), str(lora("sd", seed)))
        before = await Run(engine, params(), text(PROMPT), adapter="a1").images()
        await engine.sleep(1)
        with monkeypatch.context() as broken:
            broken.setattr(PipelineLoras, "put", no_memory)
            with pytest.raises(MemoryError):
                await engine.wake_up([])
        assert await engine.wake_up([])
        assert near(await Run(engine, params(), text(PROMPT), adapter="a1").images(), before)


def no_memory(loras: PipelineLoras, name: str, directory: str) -> None:
    raise MemoryError


class Slow(AdapterLibrary):
    """A library that opens files once it may."""

    def __init__(self) -> None:
        super().__init__(["file:///"], cache_dir=None, cache_bytes=1 << 20, max_bytes=1 << 23)
        self.asked, self.may = threading.Event(), threading.Event()

    def open(self, address: str, sha256: str | None = None) -> Opened:
        self.asked.set()
        self.may.wait()
        return super().open(address, sha256)


async def test_an_adapter_whose_files_come_while_its_engine_sleeps_is_a_503() -> None:
    library = Slow()
    async with serving("sd", enable_lora=True) as engine:
        registry = AdapterRegistry(engine, library, SECRET, most=2, drain_seconds=5)
        host = EngineHost(engine, registry, sleep_mode=True)
        order = LoadAdapter("a1", str(lora("sd", 1)))
        loading = asyncio.create_task(host.call(order))
        await asyncio.to_thread(library.asked.wait)
        await host.call(Sleep(2))
        library.may.set()
        with pytest.raises(OverloadedError, match="the worker is asleep"):
            await loading
        await host.call(WakeUp())
        await host.call(order)
        assert [adapter.name for adapter in host.card.adapters] == ["a1"]
        await registry.close()


@pytest.mark.parametrize(
    ("settings", "targets", "rank", "said"),
    [
        ({}, TARGETS, 4, "--enable-lora"),
        (
            {"enable_lora": True, "part": "vae"},
            TARGETS,
            4,
            r"text encoders \(text_encoder, unet\), which .* a VAE, for which none are published",
        ),
        ({"enable_lora": True, "max_lora_rank": 2}, TARGETS, 4, "rank 4; allowed: at most 2"),
        ({"enable_lora": True}, ("conv1",), 4, "a matrix is needed"),
        ({"enable_lora": True}, ("flux",), 4, "not adapted here"),
    ],
)
async def test_what_is_no_adapter_of_the_denoiser_is_refused_and_changes_nothing(
    settings: dict[str, Any], targets: tuple[str, ...], rank: int, said: str
) -> None:
    family, targets = ("flux", TARGETS) if targets == ("flux",) else ("sd", targets)
    directory = lora(family, 1, rank, targets)
    async with serving("sd", **settings) as engine:
        with pytest.raises(InvalidRequestError, match=said):
            await engine.load_adapter(named("a", directory), str(directory))
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequestError, match="adapter 'a' does not exist"):
            Run(engine, params(), text(PROMPT), adapter="a")
