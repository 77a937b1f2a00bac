"""Images a second of a denoiser whose requests share its steps, beside one request after another.

    python -m benchmarks.denoising [--model DIRECTORY] [--size N] [--images N] [--rounds N]

Two engines in this process have the same pipeline: one takes all requests together, batched by
step; the other has room for one (`--max-num-seqs 1`). Prompts, seeds and numbers of steps differ.
Engines take turns; printed are the median seconds of a round, images a second, and the ratio. Their
images are the same but for rounding, which is checked.
"""

import asyncio
import io
import statistics
import time
from itertools import count
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from benchmarks._options import parser_of
from inlay import demo
from inlay.engine.settings import EngineSettings
from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer
from inlay.messages.request import Input, Output, Payload, Request, Task
from inlay_stages.engines.diffusers.engine import DiffusersEngine
from inlay_stages.params import Diffusion

_PROMPTS = ("red four", "blue seven", "green one", "black nine")
_STEPS = (10, 14, 20)
_NEAR = 2
"""Levels of 255 that rounding may change."""
_ids = count()


async def image(engine: DiffusersEngine, number: int, size: int) -> npt.NDArray[np.uint8]:
    """Return the pixels of one request's image."""
    prompt = _PROMPTS[number % len(_PROMPTS)].encode()
    request = Request(
        id=str(next(_ids)),
        task=Task.STAGE,
        prompts=(),
        params=Diffusion(
            width=size, height=size, steps=_STEPS[number % len(_STEPS)], guidance=3.0, seed=number
        ),
        inputs=(Input("prompt", Payload("prompt", "uint8", (len(prompt),), Buffer(prompt))),),
    )
    outputs: asyncio.Queue[Output] = asyncio.Queue()
    engine.submit(request, outputs.put_nowait)
    file = b""
    while True:
        output = await outputs.get()
        if output.error is not None:
            raise output.error.to_error()
        for payload in output.payloads:
            file = bytes(payload.data.view)
        if output.finish_reason is not None:
            return np.asarray(Image.open(io.BytesIO(file)))


async def measure(model: Path, size: int, images: int, rounds: int) -> None:
    """Print the seconds of each way."""
    engines = {}
    for way, most in (("one by one", 1), ("batched by step", images)):
        settings = EngineSettings.of(
            model=str(model), engine="diffusers", dtype="float32", max_num_seqs=most
        )
        engines[way] = DiffusersEngine(settings, Secret(bytes(32)))
        await engines[way].start()
    took: dict[str, list[float]] = {way: [] for way in engines}
    for number in range(rounds + 1):
        made = {}
        for way, engine in engines.items():
            began = time.perf_counter()
            if way == "one by one":
                made[way] = [await image(engine, one, size) for one in range(images)]
            else:
                made[way] = await asyncio.gather(*(image(engine, n, size) for n in range(images)))
            if number:
                took[way].append(time.perf_counter() - began)
        for alone, together in zip(*made.values(), strict=True):
            if np.abs(alone.astype(int) - together).max() > _NEAR:
                raise RuntimeError("the ways' images differ")
    for engine in engines.values():
        await engine.close()
    medians = {way: statistics.median(times) for way, times in took.items()}
    for way, seconds in medians.items():
        print(f"{way:16} {seconds:.2f} s for {images} images: {images / seconds:.2f} a second")
    print(f"ratio {medians['one by one'] / medians['batched by step']:.2f}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, default=demo.pipeline_dir() / "painter")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    asyncio.run(measure(given.model, given.size, given.images, given.rounds))


if __name__ == "__main__":
    main()
