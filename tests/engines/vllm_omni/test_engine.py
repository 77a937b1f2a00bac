"""The vLLM-Omni engine, against vLLM-Omni itself and against diffusers' own pipelines.

vLLM-Omni has no platform for CPUs: `cpu_platform` is one. It has no other part than in production.
"""

import asyncio
import math
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from inlay.base.errors import (
    DeadlineExceededError,
    EmbeddingsError,
    EngineError,
    InvalidRequestError,
)
from inlay.messages.request import Input
from inlay_stages.cards import image_card
from inlay_stages.engines.diffusers.image_pipeline import payload
from inlay_stages.engines.vllm_omni.engine import VllmOmniEngine
from inlay_stages.engines.vllm_omni.prompts import sampling_of
from inlay_stages.params import Diffusion
from tests.engine.conformance import SECRET
from tests.engine.test_diffusers import (
    PROMPT,
    Pixels,
    Run,
    alone,
    near,
    params,
    same,
    text,
    whole,
)
from tests.engines.vllm_omni.serving import settings

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG = params(steps=150, width=64, height=64, negative="blurred")
"""Takes seconds."""


def omni(engine: VllmOmniEngine) -> Any:
    return engine._running.omni


async def asked(engine: VllmOmniEngine, prompt: dict[str, Any], each: Diffusion) -> list[Pixels]:
    """Images of vLLM-Omni, asked as its own server asks it."""
    loaded = engine._running
    images: list[Any] = []
    async for output in loaded.omni.generate(
        prompt, sampling_params_list=[sampling_of(each, loaded.default, loaded.pipeline)]
    ):
        images += output.images
    return [np.asarray(image) for image in images]


async def idle(engine: VllmOmniEngine) -> None:
    """Return when the engine and vLLM-Omni know of no request."""
    async with asyncio.timeout(60):
        while engine._tasks or omni(engine).request_states:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.02)


def embeds(prompt: str, prefix: str = "") -> list[Input]:
    """The rows of diffusers' own text encoder."""
    with torch.inference_mode():
        rows = whole("qwen").encode_prompt(prompt)[0][0]
    port = f"embeds.{prefix}prompt_embeds"
    return [Input(port, payload(port, rows))]


async def test_images_are_those_of_vllm_omni_and_of_diffusers(engine: VllmOmniEngine) -> None:
    requests = [
        params(negative="blurred"),
        params(count=2, steps=2, seed=1),
        params(width=48, guidance=1.0, negative="blurred"),
        params(guidance=0.0, negative="blurred"),
    ]
    for each in requests:
        found = await Run(engine, each, text(PROMPT)).images()
        prompt = {"prompt": PROMPT, "modalities": ["image"]}
        if each.negative is not None:
            prompt["negative_prompt"] = each.negative
        assert same(found, await asked(engine, prompt, each)), each
        assert near(found, alone("qwen", PROMPT, each)), each
    other = await Run(engine, params(seed=8, negative="blurred"), text(PROMPT)).images()
    assert not near(other, alone("qwen", PROMPT, requests[0]))


async def test_its_card_says_that_nothing_compares_its_images(engine: VllmOmniEngine) -> None:
    found = engine.card.self_check
    assert found is not None
    assert (found.result, found.reason) == ("unchecked", "")
    assert "engine diffusers is compared" in found.note


async def test_rows_of_a_text_encoder_make_the_image_of_its_text(engine: VllmOmniEngine) -> None:
    each = params(negative="blurred")
    expected = await Run(engine, each, text(PROMPT)).images()
    bare = params()
    rows, negative = embeds(PROMPT), embeds("blurred", "negative_")
    for request, inputs in (
        (each, rows),
        (bare, [*rows, *negative]),
        (bare, [*text(PROMPT), *negative]),
    ):
        assert near(await Run(engine, request, inputs).images(), expected)
    assert not near(await Run(engine, each, embeds("blue")).images(), expected)


async def test_what_cannot_be_made_is_refused_before_vllm_omni_has_it(
    engine: VllmOmniEngine,
) -> None:
    before = engine.stats().progress
    wide = [Input("embeds.prompt_embeds", payload("embeds.prompt_embeds", torch.zeros(4, 33)))]
    wrong: Sequence[tuple[Diffusion, Sequence[Input], str]] = [
        (params(width=33), text("x"), "multiples of 4"),
        (params(width=8192, height=8192), text("x"), "at most 262144 pixels"),
        (params(steps=0), text("x"), "num_inference_steps may be 1 to 200"),
        (params(count=11), text("x"), "n may be 1 to 10"),
        (params(guidance=1000.0), text("x"), "guidance_scale may be 0 to 100"),
        (params(preview_every=1), text("x"), "whole images alone"),
        (params(), (), "takes prompt"),
        (params(), wide, r"size of tensor must match the model's: prompt_embeds is \(4, 33\)"),
    ]
    for each, inputs, said in wrong:
        with pytest.raises((InvalidRequestError, EmbeddingsError), match=said):
            Run(engine, each, inputs)
    too_long = "the prompt has 2000 tokens; this model reads at most 1024"
    with pytest.raises(InvalidRequestError, match=too_long):
        await Run(engine, params(), text("x" * 2000)).done()
    poisoned = torch.zeros(4, 32)
    poisoned[1, 2] = math.nan
    rows = [Input("embeds.prompt_embeds", payload("embeds.prompt_embeds", poisoned))]
    with pytest.raises(EmbeddingsError, match="must be finite"):
        await Run(engine, params(), rows).done()
    assert engine.stats().progress == before


async def test_a_request_that_ends_is_aborted_and_its_neighbour_is_not(
    engine: VllmOmniEngine,
) -> None:
    each = params(negative="blurred")
    left, late, neighbour = (
        Run(engine, LONG, text("x")),
        Run(engine, LONG, text("y"), deadline=0.05),
        Run(engine, each, text(PROMPT)),
    )
    await asyncio.sleep(0.2)
    engine.abort(left.id)
    assert left.outputs[-1].finish_reason == "abort"
    with pytest.raises(DeadlineExceededError):
        await late.done()
    assert near(await neighbour.images(), alone("qwen", PROMPT, each))
    await idle(engine)


async def test_a_request_that_leaves_as_its_turn_comes_keeps_no_place(
    engine: VllmOmniEngine,
) -> None:
    left = Run(engine, LONG, text("x"))
    while not engine._tasks:  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(0)
    engine.abort(left.id)
    async with asyncio.timeout(60):
        assert len(await Run(engine, params(negative="blurred"), text(PROMPT)).images()) == 1
    await idle(engine)


async def test_clients_take_turns_for_the_places(engine: VllmOmniEngine) -> None:
    order: list[str] = []

    async def ended(name: str, run: Run) -> None:
        await run.done()
        order.append(name)

    runs = [Run(engine, params(seed=seed), text("x"), client="a") for seed in range(4)]
    runs.append(Run(engine, params(), text("x"), client="b"))
    tasks = [
        asyncio.create_task(ended(name, run))
        for name, run in zip(("a0", "a1", "a2", "a3", "b"), runs, strict=True)
    ]
    await asyncio.sleep(0)
    most = 0
    while len(order) < 5:
        most = max(most, engine.stats().running)
        # A probe does not wait for an image.
        assert await engine.probe() < 60
        await asyncio.sleep(0.005)
    await asyncio.gather(*tasks)
    assert most == engine.card.limits.max_num_seqs == 1
    assert order.index("b") < order.index("a2")
    await idle(engine)


async def test_its_card_says_what_it_takes(engine: VllmOmniEngine) -> None:
    card = engine.card
    assert (card.engine, card.dtype, card.hidden_size) == ("vllm-omni", "float32", 32)
    image = image_card(card)
    assert image is not None
    assert not image.previews
    assert image.embeds == {"prompt_embeds": (-1, 32)}
    assert image.steps == 50
    with pytest.raises(InvalidRequestError, match="--enable-sleep-mode"):
        engine.check_sleep(1)


class Sleeper:
    """A vLLM-Omni whose stages say these words when they are told to sleep, and to wake."""

    def __init__(self, *said: str) -> None:
        self.said = list(said)
        self.tags: set[str] = set()

    def ack(self) -> list[Any]:
        status = self.said.pop(0)
        if status == "raises":
            raise RuntimeError("no answer")
        return [SimpleNamespace(status=status)]

    async def sleep(self, level: int) -> list[Any]:
        acks = self.ack()
        self.tags = {"weights"}
        return acks

    async def wake_up(self, tags: Any) -> list[Any]:
        acks = self.ack()
        self.tags = set()
        return acks

    async def is_sleeping(self) -> bool:
        return bool(self.tags)


@pytest.mark.parametrize(
    ("said", "fails"),
    [
        (["SUCCESS", "SUCCESS"], False),
        (["ERROR"], True),
        (["raises"], True),
        (["SUCCESS", "ERROR"], True),
        (["SUCCESS", "raises", "SUCCESS"], False),
    ],
    ids=lambda each: "-".join(each) if isinstance(each, list) else "",
)
async def test_an_engine_of_which_a_part_sleeps_has_failed(said: list[str], fails: bool) -> None:
    """Sleep runs on GPUs alone: vLLM-Omni is stood in for."""
    engine = VllmOmniEngine(settings("qwen"), SECRET)
    engine._loaded = SimpleNamespace(omni=Sleeper(*said), sleeps=True)  # type: ignore[assignment]
    engine._jobs.shell.begin()
    for number, status in enumerate(said):
        step = engine.wake_up(()) if number else engine.sleep(1)
        if status == "SUCCESS":
            await step
        else:
            with pytest.raises((EngineError, RuntimeError)):
                await step
    with pytest.raises(EngineError) if fails else nullcontext():
        engine._alive()


async def test_a_look_at_it_that_fails_is_a_failure_of_the_engine() -> None:
    async def check_health() -> None:
        raise RuntimeError("the orchestrator's thread is gone")

    engine = VllmOmniEngine(settings("qwen"), SECRET)
    engine._loaded = SimpleNamespace(omni=SimpleNamespace(check_health=check_health))  # type: ignore[assignment]
    engine._jobs.shell.begin()
    await engine._watch()
    assert "the orchestrator's thread is gone" in (await engine.failed()).message


async def test_its_death_ends_every_request_and_the_engine(engine: VllmOmniEngine) -> None:
    """Stays the last: the engine is that of all tests."""
    run = Run(engine, LONG, text("x"))
    await asyncio.sleep(0.2)
    await asyncio.to_thread(omni(engine).engine.shutdown)
    async with asyncio.timeout(60):
        assert "vLLM-Omni died" in (await engine.failed()).message
        with pytest.raises(EngineError, match="vLLM-Omni"):
            await run.done()
    with pytest.raises(EngineError, match="vLLM-Omni died"):
        Run(engine, params(), text("x"))
    with pytest.raises(EngineError, match="vLLM-Omni died"):
        await engine.probe()
