"""Rows of `benchmarks.gpu` about what is around decoding and prompts: sleep, images."""

import asyncio
import gc
import io
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tests.vision_models import vision

from inlay.engine.settings import EngineSettings
from inlay.engine.torch.engine import TorchEngine
from inlay.media.spec import layout, media_segments
from inlay.messages.digest import Secret, media_digest
from inlay.messages.prompt import Buffer, Prompt, Segment, Tokens
from inlay.messages.request import Output, Request, Sampling

IMAGES = 8
SIDE, SMALL_SIDE = 448, 112
"""Pixels of images for a model of its own, and for a tiny one, whose patches are smaller."""


def held(device: str) -> int:
    """Return the bytes of the GPU's memory that torch has, 0 on a CPU."""
    gc.collect()
    return torch.cuda.memory_reserved() if device.startswith("cuda") else 0


async def answer(engine: TorchEngine, prompt: Prompt, name: str, max_tokens: int = 1) -> float:
    """Return the seconds until an output of `max_tokens` has ended.

    Raises `RuntimeError` if it ended with an error.
    """
    done: asyncio.Future[Output] = asyncio.get_running_loop().create_future()

    def emit(output: Output) -> None:
        if output.finish_reason is not None and not done.done():
            done.set_result(output)

    began = time.perf_counter()
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    engine.submit(Request(id=name, prompts=(prompt,), params=sampling), emit)
    if (error := (await done).error) is not None:
        raise RuntimeError(f"a request failed: {error}")
    return time.perf_counter() - began


def settings_of(path: str | Path, device: str, dtype: str, length: int) -> EngineSettings:
    """Return the settings of an engine that sleeps, with pages of 256 MB, for a short context."""
    settings = {"model": str(path), "dtype": dtype, "device": device, "max_model_len": length}
    settings |= {"enable_sleep_mode": True, "kv_cache_memory_bytes": 1 << 28}
    return EngineSettings.of(**settings)


async def sleep(path: str | Path, device: str) -> None:
    """Print how long both levels of sleep take, and waking, and what memory is free meanwhile."""
    print(f"\n{'sleep':26} {'asleep':>9} {'awake':>9} {'released':>10} {'first token after':>18}")
    engine = TorchEngine(settings_of(path, device, "bfloat16", 512), Secret.random())
    await engine.start()
    try:
        for level in (1, 2):
            prompt = Prompt.of(Tokens(range(1, 65)))
            await answer(engine, prompt, f"before-{level}")
            before, began = held(device), time.perf_counter()
            await engine.sleep(level)
            asleep, released = time.perf_counter() - began, before - held(device)
            began = time.perf_counter()
            await engine.wake_up(())
            awake = time.perf_counter() - began
            first = await answer(engine, prompt, f"after-{level}")
            print(
                f"{f'level {level}':26} {asleep:7.2f} s {awake:7.2f} s {released / 1e9:7.2f} GB "
                f"{first * 1e3:15.1f} ms",
                flush=True,
            )
    finally:
        await engine.close()


def files(side: int) -> list[bytes]:
    """Return JPEG files with as much detail as photographs have."""
    draw, found = np.random.default_rng(0), list[bytes]()
    for _ in range(2 * IMAGES):
        small = Image.fromarray(draw.integers(0, 256, (64, 64, 3)).astype(np.uint8))
        file = io.BytesIO()
        small.resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        found.append(file.getvalue())
    return found


def with_image(engine: TorchEngine, secret: Secret, data: bytes, side: int) -> tuple[Prompt, int]:
    """Return a prompt with one image, and the number of its rows."""
    media = engine.card.media
    if media is None:
        raise RuntimeError("the model takes no images")
    file = Buffer(data)
    digest = media_digest(file.view, secret, kind="image", encoder_id=media.encoder_id)
    laid = layout(media, side, side)
    segments: list[Segment] = list(media_segments(laid, digest, file, atomic=media.atomic))
    rows = sum(map(len, segments))
    return Prompt.of(Tokens([5, 6, 9]), *segments, Tokens([7, 8])), rows


async def images(path: str | Path | None, device: str) -> None:
    """Print the seconds to the first token of new and of cached images, alone and together.

    Without `path` the model is a tiny Qwen2.5-VL in float32, which says that it works, no more.
    """
    secret = Secret.random()
    if path is None:
        side, settings = SMALL_SIDE, settings_of(vision("qwen2_5_vl"), device, "float32", 512)
    else:
        side, settings = SIDE, settings_of(path, device, "bfloat16", 1024)
    engine = TorchEngine(settings, secret)
    await engine.start()
    try:
        prompts = [with_image(engine, secret, data, side) for data in files(side)]
        await answer(engine, prompts[0][0], "first")
        alone = await answer(engine, prompts[1][0], "alone")
        cached = await answer(engine, prompts[1][0], "again")
        fresh: Sequence[Prompt] = [prompt for prompt, _ in prompts[2 : 2 + IMAGES]]
        began = time.perf_counter()
        await asyncio.gather(*(answer(engine, of, f"n{at}") for at, of in enumerate(fresh)))
        together = (time.perf_counter() - began) / len(fresh)
        print(
            f"\nimages of {side} x {side}, {prompts[0][1]} rows: first token {alone * 1e3:.1f} ms, "
            f"cached {cached * 1e3:.1f} ms; of {IMAGES} at once {together * 1e3:.1f} ms each",
            flush=True,
        )
    finally:
        await engine.close()
