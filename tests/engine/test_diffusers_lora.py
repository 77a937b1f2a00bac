"""LoRA adapters of denoisers, against PEFT's own merge run by diffusers."""

import asyncio
import copy
import threading
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from inlay.adapter.library import AdapterLibrary, Opened
from inlay.card import Adapter
from inlay.commands import LoadAdapter, Sleep, WakeUp
from inlay.engine.diffusers.engine import DiffusersEngine
from inlay.engine.diffusers.lora import DenoiserLoras
from inlay.errors import InvalidRequestError, OverloadedError
from inlay.worker.adapters import AdapterRegistry
from inlay.worker.host import EngineHost
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


@cache
def lora(family: str, seed: int, rank: int = 4, targets: tuple[str, ...] = TARGETS) -> Path:
    """A LoRA whose random matrices are large enough to change a picture, in PEFT's form."""
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(targets))
    adapted = peft.get_peft_model(denoiser(family), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(drawn / parameter.shape[-1] ** 0.5)
    directory = scratch(f"lora-{family}")
    adapted.save_pretrained(directory)
    return directory


def denoiser(family: str) -> Any:
    return copy.deepcopy(getattr(whole(family), DENOISERS[family]))


def merged(family: str, seed: int) -> Any:
    """diffusers' pipeline with PEFT's merge of `lora` in its denoiser."""
    model = peft.PeftModel.from_pretrained(denoiser(family), lora(family, seed))
    parts = {**whole(family).components, DENOISERS[family]: model.merge_and_unload()}
    more = {"requires_safety_checker": False} if family == "sd" else {}
    found = type(whole(family))(**parts, **more)
    found.set_progress_bar_config(disable=True)
    return found


def named(name: str, directory: Path) -> Adapter:
    return Adapter(name=name, content_id=name, path=str(directory))


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
            broken.setattr(DenoiserLoras, "put", no_memory)
            with pytest.raises(MemoryError):
                await engine.wake_up([])
        assert await engine.wake_up([])
        assert near(await Run(engine, params(), text(PROMPT), adapter="a1").images(), before)


def no_memory(loras: DenoiserLoras, name: str, directory: str) -> None:
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
        ({"enable_lora": True, "part": "vae"}, TARGETS, 4, "of the denoiser"),
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
