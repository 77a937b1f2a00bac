"""The diffusers engine, against diffusers' own pipelines run alone."""

import asyncio
import io
import itertools
import threading
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from inlay.base.errors import EngineError, InlayError, InvalidRequestError, OverloadedError
from inlay.engine.api import Engine
from inlay.engine.settings import EngineSettings
from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer
from inlay.messages.request import Input, Output, Payload, Request, Task
from inlay_stages.engines.diffusers import engine as engine_module
from inlay_stages.engines.diffusers.engine import DiffusersEngine
from inlay_stages.engines.diffusers.families.base import PassRow
from inlay_stages.engines.diffusers.image_pipeline import ImagePipeline, payload
from inlay_stages.params import Diffusion
from tests.diffusion_models import save_flux, save_qwen_image, save_stable_diffusion
from tests.scratch import scratch

SECRET = Secret(bytes(32))
SAVE = {"sd": save_stable_diffusion, "flux": save_flux, "qwen": save_qwen_image}
FAMILIES = sorted(SAVE)
PROMPT = "a red fox"
SHAPE = (1, 4, 16, 16)
"""Of the latents of an image of `params`, of Stable Diffusion."""
_ids = itertools.count()

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

Pixels = npt.NDArray[np.uint8]


@cache
def model(family: str) -> Path:
    return SAVE[family](scratch(f"diffusion-{family}"))


@cache
def whole(family: str) -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(diffusers.utils.logging, "enable_progress_bar", lambda: None)
        name = {"sd": "StableDiffusion", "flux": "Flux", "qwen": "QwenImage"}[family] + "Pipeline"
        more = {"safety_checker": None} if family == "sd" else {}
        found = getattr(diffusers, name).from_pretrained(
            model(family), dtype=torch.float32, local_files_only=True, **more
        )
    found.set_progress_bar_config(disable=True)
    return found


def alone(family: str, prompt: str, params: Diffusion, pipeline: Any = None) -> list[Pixels]:
    """Images of diffusers' own pipeline, or of `pipeline`."""
    fields: dict[str, Any] = {}
    if family == "qwen":
        fields["true_cfg_scale"] = params.guidance
        fields["negative_prompt"] = params.negative
    else:
        fields["guidance_scale"] = params.guidance
        if family == "sd":
            fields["negative_prompt"] = params.negative
    found = (pipeline or whole(family))(
        prompt,
        width=params.width,
        height=params.height,
        num_inference_steps=params.steps,
        num_images_per_prompt=params.count,
        generator=torch.Generator().manual_seed(params.seed),
        **fields,
    )
    return [np.asarray(image) for image in found.images]


@asynccontextmanager
async def serving(
    family: str, part: str = "pipeline", **more: Any
) -> AsyncIterator[DiffusersEngine]:
    settings = EngineSettings.of(
        **{"model": str(model(family)), "engine": "diffusers", "dtype": "float32", "part": part}
        | {"num_threads": 1}
        | more
    )
    engine = DiffusersEngine(settings, SECRET)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def text(prompt: str) -> tuple[Input, ...]:
    data = prompt.encode()
    return (Input("prompt", Payload("prompt", "uint8", (len(data),), Buffer(data))),)


class Run:
    """A request under way."""

    def __init__(
        self,
        engine: Engine,
        params: Diffusion,
        inputs: Sequence[Input],
        **more: Any,
    ) -> None:
        self.id = f"r{next(_ids)}"
        self.outputs: list[Output] = []
        self.ended = asyncio.Event()
        self.seen = asyncio.Event()
        request = Request(
            id=self.id, prompts=(), params=params, task=Task.STAGE, inputs=tuple(inputs), **more
        )
        engine.submit(request, self._take)

    def _take(self, output: Output) -> None:
        assert not self.ended.is_set()
        self.outputs.append(output)
        self.seen.set()
        if output.finish_reason is not None:
            self.ended.set()

    @property
    def payloads(self) -> list[Payload]:
        return [payload for output in self.outputs for payload in output.payloads]

    async def done(self) -> list[Payload]:
        await self.ended.wait()
        last = self.outputs[-1]
        if last.error is not None:
            raise last.error.to_error()
        assert last.finish_reason == "stop"
        return self.payloads

    async def images(self) -> list[Pixels]:
        return [read(payload) for payload in await self.done() if payload.port == "image"]


def read(payload: Payload) -> Pixels:
    return np.asarray(Image.open(io.BytesIO(bytes(payload.data.view))))


def params(**more: Any) -> Diffusion:
    return Diffusion(**({"width": 32, "height": 32, "steps": 3, "seed": 7, "guidance": 3.0} | more))


def same(one: Sequence[Pixels], other: Sequence[Pixels]) -> bool:
    assert len(one) == len(other)
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def near(one: Sequence[Pixels], other: Sequence[Pixels]) -> bool:
    """A batch sums in another order: a pixel may be one of 255 off."""
    assert len(one) == len(other)
    pairs = zip(one, other, strict=True)
    return all(np.abs(a.astype(int) - b.astype(int)).max() <= 1 for a, b in pairs)


@pytest.mark.parametrize("family", FAMILIES)
async def test_images_are_those_of_the_pipeline_run_alone(family: str) -> None:
    negative = None if family == "flux" else "blurred"
    asked = [
        params(negative=negative),
        params(count=2, steps=2, seed=1, negative=negative),
        params(width=48, guidance=1.0),
    ]
    async with serving(family) as engine:
        found = [await Run(engine, each, text(PROMPT)).images() for each in asked]
    for each, images in zip(asked, found, strict=True):
        assert near(images, alone(family, PROMPT, each)), each
    # Another seed, another picture: what is compared is no constant.
    assert not near(found[0], alone(family, PROMPT, params(seed=8, negative=negative)))


@pytest.mark.parametrize("family", FAMILIES)
async def test_requests_of_unlike_steps_and_prompts_share_steps(family: str) -> None:
    asked = [
        (PROMPT, params(steps=6)),
        ("blue", params(steps=4, seed=2, guidance=2.0)),
        ("a green house", params(steps=3, seed=3, count=2)),
    ]
    async with serving(family) as engine:
        apart = [await Run(engine, each, text(prompt)).images() for prompt, each in asked]
        before = engine.stats().steps
        runs = [Run(engine, each, text(prompt)) for prompt, each in asked]
        together = [await run.images() for run in runs]
        steps = engine.stats().steps - before
    assert steps < sum(each.steps for _, each in asked)
    for one, other in zip(apart, together, strict=True):
        assert near(one, other)


@pytest.mark.parametrize("family", FAMILIES)
async def test_parts_in_a_row_make_what_the_whole_makes(family: str) -> None:
    each = params(count=2, negative=None if family == "flux" else "blurred")
    async with serving(family) as engine:
        expected = await Run(engine, each, text(PROMPT)).images()
    async with serving(family, "text_encoder") as engine:
        embeds = await Run(engine, each, text(PROMPT)).done()
    assert {payload.port.partition(".")[0] for payload in embeds} == {"embeds"}
    async with serving(family, "denoiser") as engine:
        (latents,) = await Run(engine, each, [Input(one.port, one) for one in embeds]).done()
    assert latents.port == "latents"
    async with serving(family, "vae") as engine:
        found = await Run(engine, each, [Input("latents", latents)]).images()
    assert same(found, expected)


async def test_a_decoder_decodes_an_image_once_while_its_file_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, both, written = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    decoded: list[float] = []

    def pixels(painter: ImagePipeline, latents: torch.Tensor, params: Diffusion) -> Image.Image:
        decoded.append(float(latents[0, 0, 0, 0]))
        if len(decoded) == 2:
            loop.call_soon_threadsafe(both.set)
        return Image.new("RGB", (params.width, params.height))

    def image_file(image: Image.Image, image_format: str) -> bytes:
        written.wait()
        return b"file"

    monkeypatch.setattr(ImagePipeline, "pixels", pixels)
    monkeypatch.setattr(engine_module, "image_file", image_file)
    async with serving("sd", "vae") as engine:
        try:
            runs = [
                Run(engine, params(), [Input("latents", payload("latents", torch.full(SHAPE, of)))])
                for of in (1.0, 2.0)
            ]
            await both.wait()
        finally:
            written.set()
        assert [len(await run.done()) for run in runs] == [1, 1]
    assert decoded == [1.0, 2.0]


async def test_previews_come_before_the_image_and_change_nothing() -> None:
    async with serving("sd") as engine:
        plain = await Run(engine, params(steps=6), text(PROMPT)).images()
        run = Run(engine, params(steps=6, preview_every=2), text(PROMPT))
        payloads = await run.done()
    assert [payload.port for payload in payloads] == ["preview.2", "preview.4", "image"]
    assert same([read(payloads[-1])], plain)
    assert not np.array_equal(read(payloads[0]), plain[0])


async def test_an_aborted_request_leaves_its_batch_and_others_go_on() -> None:
    async with serving("sd") as engine:
        alone_ = await Run(engine, params(steps=20), text(PROMPT)).images()
        stays = Run(engine, params(steps=20), text(PROMPT))
        leaves = Run(engine, params(steps=200, preview_every=1), text("other"))
        await leaves.seen.wait()
        engine.abort(leaves.id)
        assert leaves.outputs[-1].finish_reason == "abort"
        assert near(await stays.images(), alone_)
        assert engine.stats().running + engine.stats().waiting == 0
        engine.abort("nobody")


async def test_a_request_whose_preview_cannot_be_sent_leaves_the_engine() -> None:
    taken: list[Output] = []
    ended = asyncio.Event()

    def emit(output: Output) -> None:
        if output.payloads:
            raise ValueError("too large")
        taken.append(output)
        ended.set()

    async with serving("sd") as engine:
        request = Request(
            id="cut", prompts=(), params=params(steps=200, preview_every=1), task=Task.STAGE,
            inputs=text(PROMPT),
        )  # fmt: skip
        engine.submit(request, emit)
        await ended.wait()
        await Run(engine, params(), text(PROMPT)).done()
        assert engine.stats().running + engine.stats().waiting == 0
    (last,) = taken
    assert last.error is not None


async def test_a_later_client_does_not_wait_for_an_earlier_ones_queue() -> None:
    async with serving("sd", max_num_seqs=2) as engine:
        many = [Run(engine, params(steps=30), text("x"), client="many") for _ in range(8)]
        one = Run(engine, params(steps=2), text("y"), client="one")
        await one.done()
        assert sum(run.ended.is_set() for run in many) <= 2
        for run in many:
            engine.abort(run.id)


async def test_only_the_request_that_memory_is_too_small_for_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if memory did for four rows, or for two of the large image, which alone has four."""
    async with serving("sd", max_num_batched_tokens=1 << 14) as engine:
        alone_ = [
            await Run(engine, params(steps=4, seed=seed), text(PROMPT)).images() for seed in (1, 2)
        ]
        family = engine._loaded.family
        predict, most = family.predict, [0]

        def bounded(rows: Sequence[PassRow]) -> torch.Tensor:
            most[0] = max(most[0], len(rows))
            if len(rows) > (2 if rows[0].painting.width == 48 else 4):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return predict(rows)

        monkeypatch.setattr(family, "predict", bounded)
        large = Run(engine, params(width=48, count=2), text(PROMPT))
        runs = [Run(engine, params(steps=4, seed=seed), text(PROMPT)) for seed in (1, 2, 1)]
        for run, expected in zip(runs, [*alone_, alone_[0]], strict=True):
            assert near(await run.images(), expected)
        with pytest.raises(EngineError, match="memory is too small for 2 images of 48x32"):
            await large.done()
        # Six rows were tried together, of three requests with guidance.
        assert most[0] == 6
        assert engine.stats().running + engine.stats().waiting == 0


@pytest.mark.parametrize("work", ["begin", "pixels"])
async def test_memory_that_is_too_small_beside_the_steps_is_an_error_of_one_request(
    work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = getattr(ImagePipeline, work)

    def limited(painter: ImagePipeline, given: Any, asked: Diffusion, *more: Any) -> Any:
        if asked.width == 48:
            torch.empty(1 << 62, dtype=torch.uint8)
        return done(painter, given, asked, *more)

    async with serving("sd") as engine:
        expected = await Run(engine, params(), text(PROMPT)).images()
        monkeypatch.setattr(ImagePipeline, work, limited)
        large, other = (Run(engine, params(width=width), text(PROMPT)) for width in (48, 32))
        with pytest.raises(EngineError, match="memory is too small for this request"):
            await large.done()
        assert near(await other.images(), expected)
        assert engine.stats().running + engine.stats().waiting == 0


async def test_a_deadline_ends_a_request() -> None:
    async with serving("sd") as engine:
        run = Run(engine, params(steps=200), text(PROMPT), deadline=0.01)
        with pytest.raises(InlayError, match="the deadline passed"):
            await run.done()
        assert engine.stats().running + engine.stats().waiting == 0


def embeds(shape: tuple[int, ...], value: float = 0.1, dtype: str = "float32") -> tuple[Input, ...]:
    data = np.full(shape, value, np.dtype("float32")).tobytes()
    port = "embeds.prompt_embeds"
    return (Input(port, Payload(port, dtype, shape, Buffer(data))),)


BAD: Mapping[str, tuple[Diffusion, Sequence[Input], str]] = {
    "size": (params(width=33), text("x"), "size is 33x32; sides are multiples of"),
    "large": (params(width=8192, height=8192), text("x"), "size is 8192x8192"),
    "steps": (params(steps=0), text("x"), "num_inference_steps"),
    "many steps": (params(steps=100000), text("x"), "num_inference_steps"),
    "count": (params(count=11), text("x"), "n "),
    "guidance": (params(guidance=float("nan")), text("x"), "guidance_scale"),
    "nothing": (params(), (), "got nothing"),
    "long": (params(), text("x" * 200_000), "prompt"),
    "width": (params(guidance=1.0), embeds((4, 31)), "31"),
    "positions": (params(guidance=1.0), embeds((100, 32)), "100 positions"),
}


@pytest.mark.parametrize("name", BAD)
async def test_what_can_never_run_is_refused_before_it_costs_anything(name: str) -> None:
    each, inputs, said = BAD[name]
    async with serving("sd") as engine:
        with pytest.raises(InvalidRequestError, match=said):
            Run(engine, each, inputs)
        assert engine.stats().running + engine.stats().waiting == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
async def test_embeddings_that_are_not_finite_or_too_large_end_their_request_alone(
    value: float,
) -> None:
    async with serving("sd") as engine:
        plain = await Run(engine, params(), text(PROMPT)).images()
        bad = Run(engine, params(guidance=1.0), embeds((4, 32), value))
        good = Run(engine, params(), text(PROMPT))
        with pytest.raises(InvalidRequestError):
            await bad.done()
        assert near(await good.images(), plain)


async def test_a_prompt_longer_than_the_encoder_reads_is_refused() -> None:
    async with serving("sd") as engine:
        with pytest.raises(InvalidRequestError, match="tokens; this model reads at most 24"):
            await Run(engine, params(), text("x" * 100)).done()


async def test_the_queue_is_bounded_and_a_closed_engine_takes_nothing() -> None:
    async with serving("sd", max_num_seqs=1) as engine:
        runs = [Run(engine, params(steps=200), text("x")) for _ in range(8)]
        with pytest.raises(OverloadedError, match="8 requests are queued already"):
            Run(engine, params(), text("x"))
        assert await engine.probe() > 0
        for run in runs:
            engine.abort(run.id)
    with pytest.raises(OverloadedError, match="closing"):
        Run(engine, params(), text("x"))


@pytest.mark.parametrize("part", ["pipeline", "denoiser"])
async def test_a_sleeping_engine_has_no_models_and_wakes_with_the_same_answers(part: str) -> None:
    given = text(PROMPT) if part == "pipeline" else embeds((4, 32))
    guidance = 3.0 if part == "pipeline" else 1.0
    async with serving("sd", part=part) as engine:
        before = [
            bytes(one.data.view)
            for one in await Run(engine, params(guidance=guidance), given).done()
        ]
        models = [weakref.ref(one) for one in engine._loaded.models.values()]
        left = Run(engine, params(guidance=guidance, steps=200), given)
        with pytest.raises(EngineError, match="1 requests are under way"):
            await engine.sleep(1)
        engine.abort(left.id)
        await engine.sleep(1)
        await engine.sleep(2)
        assert models
        assert [ref() for ref in models] == [None] * len(models)
        with pytest.raises(OverloadedError, match="asleep"):
            Run(engine, params(guidance=guidance), given)
        assert not await engine.wake_up(["weights"])
        assert await engine.wake_up(["kv_cache"])
        after = [
            bytes(one.data.view)
            for one in await Run(engine, params(guidance=guidance), given).done()
        ]
        assert after == before


def test_a_family_that_is_not_served_and_a_directory_without_weights_are_named(
    tmp_path: Path,
) -> None:
    from inlay_stages.engines.diffusers.loading import load

    (tmp_path / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    settings = EngineSettings.of(model=str(tmp_path), engine="diffusers")
    with pytest.raises(InvalidRequestError, match="is a WanPipeline, which is not served; served"):
        load(settings)
