"""Previews by a denoiser and a VAE apart: those of the whole pipeline, and nothing waits for them."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from PIL import Image

from inlay.base.errors import (
    LEASE_LOST,
    EngineError,
    InlayError,
    InvalidRequestError,
    NotFoundError,
)
from inlay.messages.edges import Window
from inlay.messages.request import Emit, Input, Payload, Request
from inlay_stages.engines.diffusers.engine import DiffusersEngine
from inlay_stages.engines.diffusers.families.base import PassRow
from inlay_stages.engines.diffusers.image_pipeline import ImagePipeline, payload
from inlay_stages.feeds import NEWEST
from inlay_stages.params import Diffusion
from inlay_stages.worker.input_stream import InputStream
from tests.engine.test_diffusers import FAMILIES, PROMPT, SHAPE, Run, params, serving, text

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

SHOWN = ["preview.2", "preview.4", "image"]


class Decoding(Run):
    """A request of a VAE whose latents come one after another."""

    def __init__(self, engine: DiffusersEngine, params: Diffusion, streams: int = 1) -> None:
        self.inflow = InputStream(streams=streams)
        self.engine = engine
        super().__init__(_Fed(engine, self.inflow), params, ())

    async def next(self, given: Payload) -> Payload:
        """What is made of latents, before others come."""
        before = len(self.payloads)
        self.inflow.put([Input(given.port, given)])
        while len(self.payloads) == before and not self.ended.is_set():
            self.seen.clear()
            await self.seen.wait()
        return self.payloads[-1]


class _Fed:
    """An engine that is given a request with its inflow."""

    def __init__(self, engine: DiffusersEngine, inflow: InputStream) -> None:
        self._engine = engine
        self._inflow = inflow

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Request, emit: Emit) -> None:
        self._engine.submit_fed(request, emit, self._inflow)


def latents(port: str, value: float = 1.0) -> Payload:
    return payload(port, torch.full(SHAPE, float(value)), last=port == "latents")


def files(payloads: Sequence[Payload]) -> list[tuple[str, bytes]]:
    return [(one.port, bytes(one.data.view)) for one in payloads]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_previews_of_parts_are_to_the_byte_those_of_the_whole(
    family: str, dtype: str
) -> None:
    each = params(steps=6, preview_every=2, negative=None if family == "flux" else "blurred")
    async with serving(family, dtype=dtype) as engine:
        expected = files(await Run(engine, each, text(PROMPT)).done())
    assert [port for port, _ in expected] == SHOWN
    async with serving(family, "text_encoder", dtype=dtype) as engine:
        embeds = await Run(engine, each, text(PROMPT)).done()
    async with serving(family, "denoiser", dtype=dtype) as engine:
        made = await Run(engine, each, [Input(one.port, one) for one in embeds]).done()
    assert [(one.port, one.last) for one in made] == [
        ("latents.2", False), ("latents.4", False), ("latents", True),
    ]  # fmt: skip
    async with serving(family, "vae", dtype=dtype) as engine:
        decoding = Decoding(engine, each)
        found = [await decoding.next(one) for one in made]
        await decoding.done()
    assert files(found) == expected
    assert len({data for _, data in expected}) == 3


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, list[float]]]:
    """The event that a VAE waits for before it decodes, and what it has begun to decode."""
    decode, opened, begun = ImagePipeline.pixels, threading.Event(), list[float]()

    def pixels(painter: ImagePipeline, given: torch.Tensor, asked: Diffusion) -> Image.Image:
        begun.append(float(given[0, 0, 0, 0]))
        opened.wait()
        return decode(painter, given, asked)

    monkeypatch.setattr(ImagePipeline, "pixels", pixels)
    yield opened, begun
    opened.set()


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not done():  # noqa: ASYNC110  # a thread does it
            await asyncio.sleep(0.001)


async def test_a_slow_vae_passes_over_what_is_not_the_newest(
    gate: tuple[threading.Event, list[float]],
) -> None:
    opened, begun = gate
    async with serving("sd", "vae") as engine:
        decoding = Decoding(engine, params(preview_every=1))
        for step in range(1, 4):
            one = latents(f"latents.{step}", step)
            decoding.inflow.put([Input(one.port, one)])
        await until(lambda: begun == [3.0])
        for port, value in (("latents.4", 4.0), ("latents.5", 5.0), ("latents", 6.0)):
            decoding.inflow.put([Input(port, latents(port, value))])
            # There is room at once: whoever gives them never waits.
            assert await decoding.inflow.room(Window(1)) == Window(1)
        decoding.inflow.end()
        opened.set()
        assert [one.port for one in await decoding.done()] == ["preview.3", "image"]
        assert begun == [3.0, 6.0]
        assert engine.stats().running + engine.stats().waiting == 0


async def test_previews_of_several_images_give_way_to_the_images(
    gate: tuple[threading.Event, list[float]],
) -> None:
    opened, begun = gate
    async with serving("sd", "vae") as engine:
        decoding = Decoding(engine, params(preview_every=1, count=3))
        for port, value in (("latents.1", 1.0), ("latents", 2.0)):
            given = payload(port, torch.full((3, *SHAPE[1:]), value), last=port == "latents")
            decoding.inflow.put([Input(port, given)])
            await until(lambda: bool(begun))
        opened.set()
        assert [one.port for one in await decoding.done()] == ["preview.1", *["image"] * 3]
        assert begun == [1.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("at", range(4))
async def test_an_abort_at_any_moment_leaves_nothing(
    gate: tuple[threading.Event, list[float]], at: int
) -> None:
    opened, begun = gate
    async with serving("sd", "vae") as engine:
        decoding = Decoding(engine, params(preview_every=1))
        if at:
            decoding.inflow.put([Input("latents.1", latents("latents.1"))])
        if at > 1:
            await until(lambda: bool(begun))
        if at > 2:
            decoding.inflow.put([Input("latents", latents("latents"))])
        engine.abort(decoding.id)
        decoding.inflow.put([Input("latents.2", latents("latents.2"))])
        opened.set()
        assert decoding.outputs[-1].finish_reason == "abort"
        other = Decoding(engine, params())
        assert (await other.next(latents("latents"))).port == "image"
        assert len(decoding.outputs) == 1
        assert engine.stats().running + engine.stats().waiting == 0


async def test_a_denoiser_that_is_lost_is_an_error_unless_all_has_come() -> None:
    lost = NotFoundError("lost", code=LEASE_LOST)
    async with serving("sd", "vae") as engine:
        decoding = Decoding(engine, params(preview_every=1))
        assert (await decoding.next(latents("latents.1"))).port == "preview.1"
        decoding.inflow.end(lost)
        with pytest.raises(NotFoundError, match="lost"):
            await decoding.done()
        decoding = Decoding(engine, params(preview_every=1))
        decoding.inflow.put([Input("latents", latents("latents"))])
        decoding.inflow.end(lost)
        assert [one.port for one in await decoding.done()] == ["image"]
        decoding = Decoding(engine, params())
        decoding.inflow.end()
        with pytest.raises(EngineError, match="the denoiser has ended without latents"):
            await decoding.done()


@pytest.mark.parametrize(
    ("port", "shape", "said"),
    [
        ("latents.1", (1, 4, 16, 17), "latents.* is \\(1, 4, 16, 17\\), not \\(1, 4, 16, 16\\)"),
        ("embeds.1", SHAPE, "this vae takes latents; got embeds"),
    ],
)
async def test_latents_that_do_not_fit_end_their_request_alone(
    port: str, shape: tuple[int, ...], said: str
) -> None:
    async with serving("sd", "vae") as engine:
        bad, good = (Decoding(engine, params(preview_every=1)) for _ in range(2))
        bad.inflow.put([Input(port, payload(port, torch.zeros(shape)))])
        with pytest.raises(InvalidRequestError, match=said):
            await bad.done()
        assert (await good.next(latents("latents"))).port == "image"


async def test_only_a_vae_is_given_inputs_while_it_works() -> None:
    async with serving("sd", "denoiser") as engine:
        with pytest.raises(InvalidRequestError, match="the inputs of a denoiser are whole"):
            Decoding(engine, params())


async def test_a_preview_that_is_not_finite_is_the_same_error_in_parts_as_in_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    each = params(steps=6, preview_every=2)
    async with serving("sd", "text_encoder") as engine:
        embeds = [Input(one.port, one) for one in await Run(engine, each, text(PROMPT)).done()]
    for part, inputs in (("pipeline", text(PROMPT)), ("denoiser", embeds)):
        async with serving("sd", part) as engine:
            family = engine._loaded.family
            spoilt = partial(_spoilt, family.predict)
            monkeypatch.setattr(family, "predict", spoilt)
            run = Run(engine, each, inputs)
            with pytest.raises(InlayError, match="the model's output was not finite") as failed:
                await run.done()
            assert isinstance(failed.value, EngineError)
            assert not run.payloads


def _spoilt(
    predict: Callable[[Sequence[PassRow]], torch.Tensor], rows: Sequence[PassRow]
) -> torch.Tensor:
    return predict(rows) * float("nan")


def test_the_newest_window_is_never_full() -> None:
    assert not NEWEST.full(1 << 20, 1 << 40)
